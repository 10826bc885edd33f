"""Who may talk to whom, and who may ask the Kubernetes API: exactly the call graph."""

import pytest

from support.manifests import VALUES_FILES, install, values_of

ROLES = ("orchestrator", "target", "drafter")
METRICS = {("metrics", role, "metrics") for role in ROLES}
CALLS = {
    ("clients", "orchestrator", "grpc"),
    ("test", "orchestrator", "grpc"),
    ("orchestrator", "target", "grpc"),
    ("orchestrator", "drafter", "grpc"),
}
API = {("orchestrator", "addresses", port) for port in (443, 6443)}
# How values name peers that are no pods of ours.
PEERS = {
    "metrics": {"kubernetes.io/metadata.name": "monitoring"},
    "keda": {"kubernetes.io/metadata.name": "keda"},
    "dns": {"kubernetes.io/metadata.name": "kube-system"},
}
SCALING = {"autoscaling": {"mode": "keda"}}
PEER_CALLS = {("orchestrator", "orchestrator", "scaler")}
LOADING = {"target": {"model": {"source": "download", "download": {"repository": "a/b"}}}}


def name_of(peer, release):
    """Name the end of a connection."""
    if "ipBlock" in peer:
        return "addresses"
    if "namespaceSelector" in peer:
        labels = peer["namespaceSelector"]["matchLabels"]
        return next(name for name, known in PEERS.items() if known == labels)
    selector = peer["podSelector"].get("matchLabels", {}).items()
    found = {pod.role for pod in release.pods if selector <= pod.labels.items()}
    return "clients" if not selector else found.pop()


def edges(release, direction):
    """Return (from, to, port) of every connection that some policy allows."""
    found = set()
    for policy in release.of("NetworkPolicy"):
        me = name_of({"podSelector": policy["spec"]["podSelector"]}, release)
        for rule in policy["spec"].get(direction, ()):
            for peer in rule["from" if direction == "ingress" else "to"]:
                for port in rule["ports"]:
                    ends = (name_of(peer, release), me)
                    found.add((*(ends if direction == "ingress" else ends[::-1]), port["port"]))
    return found


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ({}, set()),
        (SCALING, {("keda", "orchestrator", "scaler")} | PEER_CALLS),
        ({"autoscaling": {"mode": "hpa"}}, PEER_CALLS),
        (LOADING, set()),
    ],
    ids=["default", "keda", "hpa", "download"],
)
def test_pods_are_reached_by_whoever_calls_them_and_nobody_else(values, more):
    assert edges(install(values), "ingress") == CALLS | METRICS | more


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ({}, API),
        (SCALING, API | PEER_CALLS),
        ({"orchestrator": {"discovery": "dns"}}, set()),
        (LOADING, API | {("target", "addresses", 443), ("target", "dns", 53)}),
    ],
    ids=["default", "keda", "dns", "download"],
)
def test_pods_reach_whom_they_call_and_nobody_else(values, more):
    calls = CALLS - {("clients", "orchestrator", "grpc")}
    lookups = {("test", "dns", 53), ("orchestrator", "dns", 53)}
    assert edges(install(values), "egress") == calls | lookups | more


def test_without_drafters_there_is_no_way_to_them():
    release = install({"drafter": {"enabled": False}})
    assert not any("drafter" in edge for edge in edges(release, "egress"))


@pytest.mark.parametrize("name", [file.name for file in VALUES_FILES])
def test_both_directions_of_every_pod_are_closed_but_for_what_is_named(name):
    release = install(values_of(name))
    policies = release.of("NetworkPolicy")
    if not values_of(name).get("networkPolicy", {}).get("enabled", True):
        assert not policies
        return
    for pod in release.pods:
        closed = set()
        for policy in policies:
            if policy["spec"]["podSelector"]["matchLabels"].items() <= pod.labels.items():
                closed |= set(policy["spec"]["policyTypes"])
                # A rule without peers or ports would be one for everybody.
                for rule in (*policy["spec"].get("ingress", ()), *policy["spec"].get("egress", ())):
                    assert rule.get("from") or rule.get("to")
                    assert rule["ports"]
        assert closed == {"Ingress", "Egress"}


def test_an_empty_list_of_peers_means_nobody():
    nobody = {"clients": [], "dns": [], "metrics": [], "keda": [], "apiServer": {"cidrs": []}}
    release = install({"networkPolicy": nobody, **SCALING})
    ours = CALLS - {("clients", "orchestrator", "grpc")} | PEER_CALLS
    assert edges(release, "ingress") == edges(release, "egress") == ours


def test_orchestrators_may_look_at_endpoint_slices_of_their_namespace_and_nothing_else():
    release = install()
    (role,), (binding,) = release.of("Role"), release.of("RoleBinding")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] == release.pod("-orchestrator").spec["serviceAccountName"]
    assert not release.of("ClusterRole")


@pytest.mark.parametrize(("discovery", "expected"), [("kubernetes", True), ("dns", False)])
def test_only_a_pod_that_watches_the_api_gets_a_token(discovery, expected):
    release = install({"orchestrator": {"discovery": discovery}})
    for pod in release.pods:
        token = pod.spec["automountServiceAccountToken"]
        assert token is (pod.role == "orchestrator" and expected)
    assert bool(release.of("Role")) is expected


def test_every_role_has_a_service_account_of_its_own_without_a_token():
    release = install({"target": {"pools": {"a": {}, "b": {}}}})
    accounts = {each["metadata"]["name"]: each for each in release.of("ServiceAccount")}
    assert set(accounts) == {f"demo-{role}" for role in ROLES}
    assert not any(each["automountServiceAccountToken"] for each in accounts.values())
    for pod in release.pods:
        if pod.role != "test":
            assert pod.spec["serviceAccountName"] == f"demo-{pod.role}"
