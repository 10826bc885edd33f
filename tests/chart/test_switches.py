"""Each value can be switched on an installed release, or the chart refuses it.

Helm patches an object that has the same kind and name in both renderings, so what never changes of
such an object must be the same in both.
"""

from __future__ import annotations

import json
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import permutations

import jsonschema
import pytest
import yaml

from support.helm import CHART, RefusedError
from support.manifests import VALUES_FILES, install, values_of

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# What API servers refuse to change, of each kind that the chart has or may come to have. A kind
# that is new has to be put here first.
NEVER_CHANGES = {
    "ConfigMap": ["immutable"],
    "DaemonSet": ["spec.selector"],
    "Deployment": ["spec.selector"],
    "GRPCRoute": [],
    "Certificate": [],
    "HorizontalPodAutoscaler": [],
    "Ingress": [],
    "Job": ["spec.selector", "spec.template", "spec.completionMode", "spec.completions"],
    "LeaderWorkerSet": ["spec.leaderWorkerTemplate.size"],
    "NetworkPolicy": [],
    "PersistentVolumeClaim": ["spec"],
    "PodDisruptionBudget": [],
    "PrometheusRule": [],
    "Role": [],
    "RoleBinding": ["roleRef"],
    "ScaledObject": [],
    "Service": ["spec.clusterIP"],
    "ServiceAccount": [],
    "ServiceMonitor": [],
    "StatefulSet": [
        *("spec.selector", "spec.serviceName", "spec.podManagementPolicy"),
        "spec.volumeClaimTemplates",
    ],
    "TriggerAuthentication": [],
}
# What Helm asks the cluster for, and the chart then refuses: see the last tests.
REFUSED_IN_THE_CLUSTER = "orchestrator.service.loadBalancerClass"

SECRETS = {role: f"{role}-tls" for role in ("orchestrator", "gateway", "target", "drafter")}
MODEL = {
    "path": "/opt/model",
    "claim": {"name": "models"},
    "download": {"repository": "org/model"},
    "image": {"reference": "registry.example.org/model:1"},
}
# Whatever a switch needs is said already, so that it can be flipped alone.
READY = {
    "gateway": {"enabled": True, "ingress": {"host": "paceline.example.org"}},
    "networkPolicy": {"collector": [{"podSelector": {}}]},
    "target": {
        "latency": {"targetMicroseconds": 36_000, "drafterMicroseconds": 4_000},
        "model": MODEL,
    },
    "drafter": {"model": MODEL},
    "tls": {"secrets": {**SECRETS, "client": "client-tls"}},
}
OUTSIDE = {
    "networkPolicy": {"enabled": False},
    "orchestrator": {"service": {"type": "LoadBalancer", "loadBalancerClass": "example.org/a"}},
}
INSTALLED = {
    "keda": {**READY, "autoscaling": {"mode": "keda"}},
    "hpa": {**READY, "autoscaling": {"mode": "hpa"}},
    "outside": OUTSIDE,
    "pools": {"target": {"pools": {"a": {}, "b": {}}}, "drafter": {"pools": {"c": None}}},
}
# Of a pod, or of a server: no object but Deployments has it.
KUBERNETES_OWN = {"affinity", "podSecurityContext", "containerSecurityContext", "settings"}
TRIED = (
    *(3, 50, 900, 30_050, 0.5, "50%", "example", "a/b", "512Mi", None, 1),
    *("/opt/model", "15m", "[::]", f"sha256:{'0' * 64}", ["10.0.0.0/8"], [53], {"a": "b"}),
    *([{"name": "a", "mountPath": "/a"}], [{"podSelector": {}}], [{"key": "a"}], {"a": {}}, []),
)


def resolved(schema):
    reference = schema.get("$ref")
    return SCHEMA["definitions"][reference.rpartition("/")[2]] if reference else schema


def switches(schema=SCHEMA, path=()):
    """Yield the way to each value that is no section, and what else it can be.

    What roles can say over `common` is switched there.
    """
    schema = resolved(schema)
    common = SCHEMA["properties"]["common"]["properties"]
    for key, value in schema.get("properties", {}).items():
        is_repeated = path[:1] != ("common",) and path and key in common and key != "image"
        if key not in KUBERNETES_OWN and not is_repeated:
            yield from switches(value, (*path, key))
    if "properties" in schema or not path:
        return
    validator = jsonschema.Draft7Validator({**schema, "definitions": SCHEMA["definitions"]})
    candidates = [each for each in TRIED if validator.is_valid(each)][:1]
    if schema.get("type") == "boolean":
        candidates = [True, False]
    for value in schema.get("enum", candidates):
        yield path, value


def put(values, path, value):
    head, *rest = path
    inner = put(values.get(head) or {}, rest, value) if rest else value
    return {**values, head: inner}


def field(thing, name):
    for key in name.split("."):
        thing = thing.get(key) if isinstance(thing, dict) else None
    return thing


def refused_changes(old, new):
    """Return what an API server would refuse of an upgrade from one release to another."""
    found = []
    before = {(each["kind"], each["metadata"]["name"]): each for each in old.objects}
    for each in new.objects:
        kind, name = key = each["kind"], each["metadata"]["name"]
        is_hook = "helm.sh/hook" in each["metadata"].get("annotations", {})
        if is_hook or key not in before:
            continue
        fixed = list(NEVER_CHANGES[kind])
        if kind == "Service" and {field(it, "spec.type") for it in (each, before[key])} == {
            "LoadBalancer"
        }:
            fixed.append("spec.loadBalancerClass")
        found += [
            f"{kind} {name}: {it}" for it in fixed if field(before[key], it) != field(each, it)
        ]
    return found


@pytest.mark.parametrize("name", INSTALLED)
def test_no_switch_changes_what_never_changes(name):
    old = install(INSTALLED[name])
    for path, value in switches():
        switch = ".".join(path)
        if name != "keda" and not isinstance(value, bool | str):
            continue
        values = put(INSTALLED[name], path, value)
        try:
            new = install(values)
        except RefusedError:
            continue
        if switch == REFUSED_IN_THE_CLUSTER:
            continue
        assert refused_changes(old, new) == [], f"{switch}={value!r}"
        assert refused_changes(new, old) == [], f"{switch}={value!r}, and back"


def test_every_value_that_is_no_section_has_been_switched():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    tried = {".".join(path) for path, _ in switches()}

    def leaves(node, path=""):
        for key, value in node.items():
            name = f"{path}{key}"
            is_section = isinstance(value, dict) and value and name not in tried
            yield from leaves(value, f"{name}.") if is_section else [name]

    free = {*KUBERNETES_OWN, "requests", "limits", "labels", "preStopSleepSeconds"}
    missing = {it for it in leaves(values) if it not in tried}
    assert {it for it in missing if not free & set(it.split("."))} == set()


def test_no_values_file_changes_what_never_changes_of_another_one():
    releases = {file.name: install(values_of(file.name)) for file in VALUES_FILES}
    for old, new in permutations(releases, 2):
        assert refused_changes(releases[old], releases[new]) == [], f"{old} to {new}"


def test_the_comparison_sees_a_service_that_loses_its_address():
    old, new = install(), install()
    new.one("Service", "-orchestrator")["spec"]["clusterIP"] = "None"
    assert refused_changes(old, new) == ["Service demo-orchestrator: spec.clusterIP"]


def test_a_pod_is_selected_by_what_made_it_whatever_labels_it_has():
    release = install({"common": {"podLabels": {"team": "serving"}}})
    for each in release.of("Deployment"):
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()


# --- what others own ------------------------------------------------------------------------------


def test_one_autoscaler_takes_the_others_place_while_both_are_there():
    """Helm makes the new one first, and KEDA refuses a Deployment that another one scales."""
    (hpa,) = install(INSTALLED["hpa"]).of("HorizontalPodAutoscaler")
    keda = install(INSTALLED["keda"])
    (scaled,) = keda.of("ScaledObject")
    made = field(scaled, "spec.advanced.horizontalPodAutoscalerConfig.name")
    assert made not in {hpa["metadata"]["name"], *(it["metadata"]["name"] for it in keda.objects)}
    assert hpa["metadata"]["annotations"] == {"validations.keda.sh/hpa-ownership": "false"}


def test_an_autoscaler_is_the_only_one_to_say_a_number():
    for mode in ("hpa", "keda"):
        release = install(INSTALLED[mode])
        assert "replicas" not in release.one("Deployment", "-target-default")["spec"]


def test_a_headless_service_is_the_only_one_and_everything_names_it():
    values = put(
        put(READY, ("orchestrator", "service", "headless"), True), ("tls", "enabled"), True
    )
    annotated = put(values, ("orchestrator", "service", "annotations"), {"example.org/a": "b"})
    release = install(annotated)
    (service,) = (
        it
        for it in release.of("Service")
        if field(it, "spec.ports")[0]["name"] == "grpc" and "orchestrator" in it["metadata"]["name"]
    )
    name = "demo-orchestrator-pods"
    assert service["metadata"]["name"] == name
    assert service["metadata"]["annotations"] == {"example.org/a": "b"}
    host = f"{name}.serving.svc.cluster.local"
    assert release.pod("-test").environment["PACELINE_ADDRESS"] == f"{host}:50050"
    assert release.pod("-gateway").flag("orchestrator-tls-server-name") == host
    assert f"port-forward service/{name} 50050" in release.notes


# --- what the cluster has -------------------------------------------------------------------------


class OneService(BaseHTTPRequestHandler):
    """So much of a Kubernetes API as Helm asks for: one Service, and no release."""

    service: dict[str, object]

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.endswith("/services/demo-orchestrator"):
            self.answer(self.service)
        elif path == "/version":
            self.answer({"major": "1", "minor": "33", "gitVersion": "v1.33.0"})
        elif path == "/api":
            self.answer({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            self.answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})
        elif path == "/api/v1":
            kinds = {"services": "Service", "secrets": "Secret"}
            resources = [
                {"name": it, "kind": kind, "namespaced": True, "verbs": ["get", "list"]}
                for it, kind in kinds.items()
            ]
            self.answer({"kind": "APIResourceList", "groupVersion": "v1", "resources": resources})
        elif path.endswith("/secrets"):
            self.answer({"kind": "SecretList", "apiVersion": "v1", "items": []})
        else:
            self.answer({"kind": "Status", "status": "Failure", "code": 404}, status=404)

    def answer(self, content, *, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("there", ["", "example.org/other"])
def test_a_load_balancers_class_is_not_changed_where_one_is_there(helm3, there, tmp_path):
    spec = {"type": "LoadBalancer", **({"loadBalancerClass": there} if there else {})}
    metadata = {"name": "demo-orchestrator", "namespace": "serving"}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}
    handler = type("Handler", (OneService,), {"service": service})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(OUTSIDE))
    config = tmp_path / "kubeconfig"
    cluster = {"server": f"http://127.0.0.1:{server.server_address[1]}"}
    named = {"name": "fake"}
    config.write_text(
        yaml.safe_dump(
            {
                "clusters": [{**named, "cluster": cluster}],
                "contexts": [{**named, "context": {"cluster": "fake", "user": "fake"}}],
                "current-context": "fake",
                "users": [{**named, "user": {}}],
            }
        )
    )
    command = [helm3, "install", "demo", CHART, "-n", "serving", "-f", values]
    try:
        ran = subprocess.run(
            [*command, "--kubeconfig", config], capture_output=True, text=True, timeout=60
        )
    finally:
        server.shutdown()
        server.server_close()
    assert ran.returncode
    assert "orchestrator.service.loadBalancerClass=example.org/a: the Service" in ran.stderr
    assert f'is there with "{there}"' in ran.stderr
