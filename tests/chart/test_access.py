"""Who may talk to whom, and who may ask the Kubernetes API: exactly the call graph."""

import pytest

from support.manifests import GROUPS_LABEL, VALUES_FILES, install, values_of

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
    "collector": {"kubernetes.io/metadata.name": "observability"},
}
SCALING = {"autoscaling": {"mode": "keda"}}
PEER_CALLS = {("orchestrator", "orchestrator", "scaler")}
HTTP = {"gateway": {"enabled": True}}
HTTP_CALLS = {("gateway", "orchestrator", "grpc")}
TRACING = {"settings": {"trace_endpoint": "http://collector.observability:4317"}}
COLLECTOR = {
    "networkPolicy": {"collector": [{"namespaceSelector": {"matchLabels": PEERS["collector"]}}]}
}
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
        (HTTP, HTTP_CALLS | {("clients", "gateway", "http"), ("metrics", "gateway", "metrics")}),
    ],
    ids=["default", "keda", "hpa", "download", "http"],
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
        (HTTP, API | HTTP_CALLS | {("gateway", "dns", 53)}),
        (
            {"common": TRACING, **HTTP, **COLLECTOR},
            API
            | HTTP_CALLS
            | {(role, "collector", 4317) for role in (*ROLES, "gateway")}
            | {(role, "dns", 53) for role in ("target", "drafter", "gateway")},
        ),
        ({"orchestrator": TRACING, **COLLECTOR}, API | {("orchestrator", "collector", 4317)}),
        (
            {"target": {"pools": {"a": {}, "b": TRACING}}, **COLLECTOR},
            API | {("target", "collector", 4317), ("target", "dns", 53)},
        ),
        (COLLECTOR, API),
    ],
    ids=["default", "keda", "dns", "download", "http", "traces", "own", "pool", "untraced"],
)
def test_pods_reach_whom_they_call_and_nobody_else(values, more):
    calls = CALLS - {("clients", "orchestrator", "grpc")}
    lookups = {("test", "dns", 53), ("orchestrator", "dns", 53)}
    assert edges(install(values), "egress") == calls | lookups | more


def test_a_collector_is_reached_at_the_port_that_its_pods_have():
    policy = {**COLLECTOR["networkPolicy"], "collectorPorts": [14317]}
    release = install({"orchestrator": TRACING, "networkPolicy": policy})
    assert ("orchestrator", "collector", 14317) in edges(release, "egress")
    assert ("orchestrator", "collector", 4317) not in edges(release, "egress")


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
                    peers = (*rule.get("from", ()), *rule.get("to", ()))
                    own = all(GROUPS_LABEL in str(peer) for peer in peers)
                    assert own or rule["ports"]
        assert closed == {"Ingress", "Egress"}


def test_an_empty_list_of_peers_means_nobody():
    nobody = {"clients": [], "dns": [], "metrics": [], "keda": [], "apiServer": {"cidrs": []}}
    release = install({"networkPolicy": nobody, **SCALING})
    ours = CALLS - {("clients", "orchestrator", "grpc")} | PEER_CALLS
    assert edges(release, "ingress") == edges(release, "egress") == ours


def test_a_gateways_clients_are_its_own_and_it_reaches_orchestrators_that_let_no_other_in():
    policy = {"clients": [], "gatewayClients": [], "metrics": []}
    release = install({**HTTP, "networkPolicy": policy})
    assert edges(release, "ingress") == CALLS - {("clients", "orchestrator", "grpc")} | HTTP_CALLS


@pytest.mark.parametrize("name", ["gatewayClients", "metrics"])
def test_a_gateway_that_only_one_kind_of_peer_may_reach_is_reached_by_that_kind(name):
    policy = {"clients": [], "gatewayClients": [], "metrics": []}
    peers = {"namespaceSelector": {"matchLabels": PEERS["metrics"]}}
    release = install({**HTTP, "networkPolicy": {**policy, name: [peers]}})
    (port,) = [port for _, role, port in edges(release, "ingress") if role == "gateway"]
    assert port == {"gatewayClients": "http", "metrics": "metrics"}[name]


def test_what_a_load_balancer_lets_in_the_policy_lets_in_and_nothing_else():
    ranges = ["198.51.100.0/24", "2001:db8::/32"]
    service = {"type": "LoadBalancer", "loadBalancerSourceRanges": ranges}
    release = install({"orchestrator": {"service": service}, "networkPolicy": {"clients": []}})
    spec = release.one("Service", "-orchestrator")["spec"]
    assert spec["loadBalancerSourceRanges"] == ranges
    rule = release.one("NetworkPolicy", "-orchestrator")["spec"]["ingress"][0]
    assert [peer["ipBlock"]["cidr"] for peer in rule["from"] if "ipBlock" in peer] == ranges
    assert [port["port"] for port in rule["ports"]] == ["grpc"]


def test_a_service_is_exposed_as_the_operator_says():
    service = values_of("everything-else-values.yaml")["orchestrator"]["service"]
    release = install(values_of("everything-else-values.yaml"))
    spec = release.one("Service", "-orchestrator")["spec"]
    assert spec["ports"][0]["nodePort"] == service["nodePort"]
    for name in ("type", "loadBalancerClass", "externalTrafficPolicy"):
        assert spec[name] == service[name]
    assert not {"loadBalancerClass", "externalTrafficPolicy"} & set(
        install().one("Service", "-orchestrator")["spec"]
    )


def dns_rules(release):
    return [
        [(port["port"], port["protocol"]) for port in rule["ports"]]
        for policy in release.of("NetworkPolicy")
        for rule in policy["spec"]["egress"]
        if any("openshift-dns" in str(peer) for peer in rule["to"])
    ]


def test_dns_is_asked_where_and_at_the_ports_that_the_operator_says():
    there = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}}
    policy = {"dns": [there], "dnsPorts": [5353]}
    rules = dns_rules(install({"networkPolicy": policy, **LOADING}))
    assert rules == [[(5353, "UDP"), (5353, "TCP")]] * 3, "orchestrator, download and test"


def test_a_download_may_go_where_the_proxy_is_and_nowhere_else():
    release = install(values_of("every-model-source-values.yaml"))
    rules = release.one("NetworkPolicy", "-target-fetched-download")["spec"]["egress"]
    (rule,) = (rule for rule in rules if "ipBlock" in rule["to"][0])
    assert rule == {
        "to": [{"ipBlock": {"cidr": "192.0.2.7/32"}}],
        "ports": [{"port": 3128, "protocol": "TCP"}],
    }


def test_service_accounts_and_roles_are_the_operators_own_where_that_is_said():
    values = {"common": {"serviceAccountName": "theirs"}, "target": {"serviceAccountName": "other"}}
    release = install({**values, "rbac": {"create": False}})
    assert not [*release.of("ServiceAccount"), *release.of("Role"), *release.of("RoleBinding")]
    accounts = {pod.role: pod.spec.get("serviceAccountName") for pod in release.pods}
    assert accounts == {
        "orchestrator": "theirs",
        "target": "other",
        "drafter": "theirs",
        "test": None,
    }
    assert release.pod("-orchestrator").spec["automountServiceAccountToken"] is True


def test_the_role_of_the_chart_is_bound_to_an_account_of_the_operators():
    release = install({"orchestrator": {"serviceAccountName": "theirs"}})
    (binding,) = release.of("RoleBinding")
    assert [subject["name"] for subject in binding["subjects"]] == ["theirs"]
    assert {each["metadata"]["name"] for each in release.of("ServiceAccount")} == {
        "demo-target",
        "demo-drafter",
    }


def test_a_role_whose_pools_differ_in_their_accounts_has_the_charts_for_the_rest():
    pools = {"a": {"serviceAccountName": "theirs"}, "b": {}}
    release = install({"target": {"pools": pools}})
    assert release.pod("-target-a").spec["serviceAccountName"] == "theirs"
    assert release.pod("-target-b").spec["serviceAccountName"] == "demo-target"
    assert release.one("ServiceAccount", "-target")


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
