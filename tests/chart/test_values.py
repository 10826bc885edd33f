"""Values: documented, closed, refused with a remedy, and in step with what they configure."""

import importlib.util
import json
import re
import shlex

import pytest
import yaml

from paceline_cli.generate import GenerateSettings
from paceline_serving.command_line import parse
from support.helm import CHART, RefusedError
from support.manifests import install, load_yaml, values_of

VALUES = (CHART / "values.yaml").read_text()
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
README = (CHART / "README.md").read_text()
# Kubernetes' own objects and open maps: the API server knows what may be in them.
OPEN = {"affinity", "podSecurityContext", "containerSecurityContext"}
OPEN |= {"podSelector", "namespaceSelector"}
# Those of servers, which templates hand on by their names.
OPEN |= {"settings"}


def generator():
    spec = importlib.util.spec_from_file_location("generate", CHART.parent / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keys_of(values, path=""):
    """Yield every key of nested values."""
    for key, value in values.items():
        yield f"{path}{key}"
        if isinstance(value, dict):
            yield from keys_of(value, f"{path}{key}.")


def resolved(schema):
    reference = schema.get("$ref")
    return SCHEMA["definitions"][reference.rpartition("/")[2]] if reference else schema


def schema_keys(schema, path=""):
    """Yield every key that a schema names; pools repeat those of their role."""
    for key, value in resolved(schema).get("properties", {}).items():
        yield f"{path}{key}"
        if key not in OPEN:
            yield from schema_keys(value, f"{path}{key}.")


# --- documented -----------------------------------------------------------------------------------


def test_the_table_in_the_readme_and_the_settings_in_the_schema_are_fresh():
    for path, text in generator().fresh_files().items():
        assert path.read_text() == text, "run `make chart`"


TOY = """\
# Of no value: there is a line between.

# How many there are,
# 1 or more | none.
count: 3
pool:
  # A text.
  name: "4"
  # Open, and empty by default.
  labels: {}
  # Of one line: {a: b}.
  limits: {cpu: 2}
  deeper:
    # Null, and there all the same.
    gone: null
  plain: []
"""
TOY_TABLE = """\
| value | default | what it is |
| --- | --- | --- |
| `count` | `3` | How many there are, 1 or more / none. |
| `pool.name` | `"4"` | A text. |
| `pool.labels` | `{}` | Open, and empty by default. |
| `pool.limits` | `{"cpu": 2}` | Of one line: {a: b}. |
| `pool.deeper.gone` | `null` | Null, and there all the same. |
| `pool.plain` | `[]` |  |
"""


def test_the_table_has_each_value_by_its_whole_name_with_the_comment_right_above_it():
    assert generator().values_table(TOY) == TOY_TABLE
    text = "before\n<!-- values -->\nold\n<!-- /values -->\nafter\n"
    written = generator().readme(TOY, text)
    assert written == f"before\n<!-- values -->\n{TOY_TABLE}<!-- /values -->\nafter\n"
    assert generator().readme(TOY, written) == written


def test_every_value_says_what_it_is():
    rows = list(generator().value_rows(yaml.compose(VALUES), VALUES.splitlines()))
    assert len(rows) > 100
    for key, _, text in rows:
        assert text.endswith((".", "...")), f"{key} has no comment"


def test_the_values_can_be_read_in_one_sitting():
    assert len(VALUES.splitlines()) < 420


def test_recipes_of_the_readme_scale_the_chart_that_is_installed_and_no_newer_one():
    recipes = re.findall(r"^helm upgrade .*", README, re.MULTILINE)
    assert recipes
    for recipe in recipes:
        assert "k8s/paceline" not in recipe
        assert ("reuse-values" in recipe) == ('"$chart"' in recipe)


def test_every_value_that_the_readme_or_the_notes_speak_of_exists():
    known = set(schema_keys(SCHEMA))
    roots = "|".join(load_yaml(VALUES)[0])
    texts = [README.partition("<!-- values -->")[0], install().notes]
    mentioned = re.findall(rf"(?<![\w/.-])((?:{roots})(?:\.[a-zA-Z]+)+)", "\n".join(texts))
    assert mentioned
    for key in set(mentioned) - {"tls.crt", "tls.key"}:  # files of a secret
        assert key in known or key.startswith(("target.pools.", "drafter.pools.")), key


# --- closed ---------------------------------------------------------------------------------------


def test_the_schema_knows_every_value_and_no_other():
    values = {key for key in keys_of(load_yaml(VALUES)[0]) if not re.search("requests|limits", key)}
    known = {key for key in schema_keys(SCHEMA) if not re.search("requests|limits|claims", key)}
    # What a role can say over `common`, and labels whose keys are free.
    repeated = set(schema_keys(SCHEMA["properties"]["common"]))
    missing = {key for key in known - values if key.partition(".")[2] not in repeated}
    assert missing == set()
    assert values - known <= {"monitoring.dashboard.labels.grafana_dashboard"}


def test_a_pool_takes_all_that_its_role_takes_but_pools():
    for role, beyond in (("target", {"pools"}), ("drafter", {"pools", "enabled"})):
        own = SCHEMA["properties"][role]["properties"]
        pool = SCHEMA["definitions"][f"{role}Pool"]["properties"]
        assert set(own) - set(pool) == beyond | {"serviceAccountAnnotations"}
        assert all(own[key] == pool[key] for key in pool)


def test_no_object_that_is_ours_takes_unknown_keys():
    def check(node, name):
        if not isinstance(node, dict):
            return
        if "properties" in node and name != "global":
            assert node["additionalProperties"] is False, name
        for key, value in node.items():
            check(value, key)

    check(SCHEMA, "")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"targets": {}}, "'targets' not allowed"),
        ({"target": {"replica": 3}}, "'replica' not allowed"),
        ({"target": {"pools": {"a": {"gpus": 1}}}}, "'gpus' not allowed"),
        ({"target": {"pools": {"A_b": {}}}}, "A_b"),
        ({"target": {"gpu": {"count": 17}}}, "count"),
        ({"target": {"latency": {"targetMicroseconds": 1.5}}}, "want integer"),
        ({"target": {"latency": {"targetMicroseconds": "1.1"}}}, "want integer"),
        ({"target": {"image": {"digest": "sha256:short"}}}, "digest"),
        ({"target": {"image": {"repository": "team/server:1.2"}}}, "repository"),
        ({"target": {"image": {"repository": ""}}}, "repository"),
        ({"common": {"image": {"registry": "https://registry.example.org"}}}, "registry"),
        ({"common": {"image": {"registry": "registry.example.org/"}}}, "registry"),
        ({"global": {"imageRegistry": "https://registry.example.org"}}, "imageRegistry"),
        ({"target": {"model": {"source": "hub"}}}, "'bundled', 'claim', 'download', 'image'"),
        ({"target": {"settings": {"listen": "0.0.0.0:1"}}}, "listen"),
        ({"target": {"resources": {"limits": {"memory": "lots"}}}}, "memory"),
        ({"orchestrator": {"replicas": 0}}, "minimum"),
        ({"orchestrator": {"discovery": "consul"}}, "'kubernetes', 'dns'"),
        ({"common": {"podDisruptionBudget": {"maxUnavailable": "many"}}}, "maxUnavailable"),
        ({"networkPolicy": {"clients": [{}]}}, "clients"),
        ({"networkPolicy": {"apiServer": {"ports": []}}}, "ports"),
        ({"networkPolicy": {"dnsPorts": ["dns"]}}, "dnsPorts"),
        ({"networkPolicy": {"collector": [{}]}}, "collector"),
        ({"networkPolicy": {"collectorPorts": [0]}}, "collectorPorts"),
        ({"orchestrator": {"service": {"externalTrafficPolicy": "local"}}}, "'Cluster', 'Local'"),
        ({"orchestrator": {"service": {"loadBalancerSourceRanges": ["here"]}}}, "SourceRanges"),
        ({"common": {"extraContainers": [{"image": "a"}]}}, "extraContainers"),
        ({"common": {"temporarySizeLimit": "lots"}}, "temporarySizeLimit"),
    ],
)
def test_the_schema_refuses_a_typo_and_names_it(values, message):
    with pytest.raises(RefusedError, match=re.escape(message)):
        install(values)


@pytest.mark.parametrize(
    ("registry", "repository"),
    [
        ("", "registry.example.org:5000/team/server"),
        ("localhost:5000", "server"),
        ("registry.example.org/team/other_team", "llm/model-server"),
        ("123456789012.dkr.ecr.eu-west-1.amazonaws.com", "a.b/c"),
    ],
)
def test_an_image_is_where_registries_have_images(registry, repository):
    image = {"registry": registry, "repository": repository, "tag": "1"}
    pod = install({"target": {"image": image}}).pod("-target-default")
    assert pod.server["image"] == "/".join(filter(None, (registry, f"{repository}:1")))


# --- refused with a remedy ------------------------------------------------------------------------

MODEL = {"model": {"source": "claim"}}
SECRETS = {"orchestrator": "o", "target": "t", "drafter": "d"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target": MODEL}, "target.model.claim.name is empty: name the PersistentVolumeClaim"),
        ({"target": {"pools": {"a": MODEL}}}, "target.pools.a.model.claim.name is empty"),
        ({"drafter": MODEL}, "drafter.model.claim.name is empty"),
        (
            {"target": {"model": {"source": "download"}}},
            "target.model.download.repository is empty: name the Hugging Face repository",
        ),
        ({"target": {"model": {"source": "image"}}}, "target.model.image.reference is empty"),
        ({"target": {"model": {"path": "models"}}}, "is not absolute: say where"),
        (
            {"target": {"model": {"claim": {"name": "models"}}}},
            "is not used, since target.model.source is bundled: set target.model.source=claim",
        ),
        (
            {"drafter": {"pools": {"a": {"model": {"download": {"repository": "a/b"}}}}}},
            "set drafter.pools.a.model.source=download",
        ),
        (
            {"target": {"model": {"image": {"reference": "models/large:1"}}}},
            "set target.model.source=image",
        ),
        ({"target": {"settings": {"device": "cuda:0"}}}, "set target.gpu.count=1"),
        ({"target": {"gpu": {"count": 2}}}, "set target.settings.backend=vllm"),
        (
            {"target": {"settings": {"backend": "vllm"}}},
            "set target.image.repository=paceline-vllm",
        ),
        (
            {"target": {"gpu": {"count": 1}, "settings": {"backend": "vllm", "device": "cuda"}}},
            "is not for vLLM",
        ),
        (
            {"target": {"latency": {"targetMicroseconds": 9}}},
            "set targetMicroseconds and drafterMicroseconds, or neither",
        ),
        (
            {"drafter": {"rollout": {"maxUnavailable": "0%"}}},
            "drafter.rollout with maxSurge and maxUnavailable 0 could never replace a pod",
        ),
        (
            {"orchestrator": {"rollout": {"maxSurge": 0}}},
            "orchestrator.rollout with maxSurge and maxUnavailable 0",
        ),
        ({"tls": {"mutual": True}}, "set tls.enabled=true"),
        (
            {"target": {"pools": {"a": {"settings": {"peer_roles": ["spiffe://a/b=client"]}}}}},
            "target.pools.a.settings.peer_roles names callers by their certificates",
        ),
        ({"tls": {"enabled": True}}, "tls.secrets.orchestrator is empty: name the secret"),
        (
            {"tls": {"enabled": True, "mutual": True, "secrets": SECRETS}},
            "tls.secrets.client is empty",
        ),
        (
            {"autoscaling": {"mode": "keda"}, "target": {"replicas": 3}},
            "set target.replicas=null and say autoscaling.minReplicas",
        ),
        (
            {"autoscaling": {"mode": "hpa"}, "target": {"pools": {"a": {}, "b": {}}}},
            "scales one target pool, and there are 2: say which in autoscaling.pool (a, b)",
        ),
        (
            {"autoscaling": {"mode": "hpa", "pool": "c"}, "target": {"pools": {"a": {}, "b": {}}}},
            "autoscaling.pool=c is no target pool: set it to one of a, b",
        ),
        (
            {
                "autoscaling": {"mode": "keda", "pool": "b"},
                "target": {"pools": {"a": {"replicas": 2}, "b": {"replicas": 3}}},
            },
            "set target.pools.b.replicas=null and say autoscaling.minReplicas",
        ),
        (
            {"orchestrator": {"service": {"headless": True, "type": "NodePort"}}},
            "headless goes with type ClusterIP",
        ),
        (
            {"orchestrator": {"service": {"type": "LoadBalancer"}}},
            "the network policy drops them: say their addresses in networkPolicy.clients",
        ),
        (
            {"orchestrator": {"service": {"type": "NodePort"}}},
            "or set networkPolicy.enabled=false",
        ),
        (
            {"orchestrator": {"service": {"loadBalancerSourceRanges": ["10.0.0.0/8"]}}},
            "loadBalancerSourceRanges goes with type LoadBalancer, not ClusterIP",
        ),
        (
            {"orchestrator": {"service": {"nodePort": 30050}}},
            "nodePort goes with type NodePort or LoadBalancer, not ClusterIP",
        ),
        (
            {"target": {"settings": {"trace_endpoint": "http://c:4317"}}},
            "target pool default sends to trace_endpoint=http://c:4317: say where the collector is",
        ),
        (
            {"orchestrator": {"service": {"headless": True, "port": 443}}},
            "leads to the pods themselves, which listen on 50050 and not on 443",
        ),
        ({"fullnameOverride": "1st"}, "set fullnameOverride"),
    ],
)
def test_what_cannot_work_is_refused_and_the_message_says_what_to_do(values, message):
    with pytest.raises(RefusedError, match=re.escape(message)):
        install(values)


def test_a_release_whose_name_no_service_can_have_is_refused():
    with pytest.raises(RefusedError, match="set fullnameOverride"):
        install(release="7up")
    assert install({"fullnameOverride": "seven"}, release="7up").of("Deployment")


def test_without_drafters_their_secret_is_not_asked_for():
    secrets = {"orchestrator": "o", "target": "t"}
    assert install({"tls": {"enabled": True, "secrets": secrets}, "drafter": {"enabled": False}})


# --- what is said after an installation -----------------------------------------------------------


def test_the_notes_tell_the_next_commands():
    notes = install().notes
    assert "helm -n serving test demo\n" in notes
    assert "port-forward service/demo-orchestrator 50050:50050" in notes
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    assert f"CHART --version {version} --reuse-values --set target.replicas=4" in notes
    assert "plaintext" in notes
    assert "small bundled model" in notes


def test_the_notes_tell_how_many_targets_equation_1_asks_for():
    latency = {"targetMicroseconds": 36_000, "drafterMicroseconds": 4_000, "lookahead": 2}
    values = {"target": {"latency": latency, "replicas": 3}}
    assert "demo-target-default: 3; Equation 1 asks for 5" in install(values).notes
    scaled = install({"target": {"latency": latency}, "autoscaling": {"mode": "keda"}})
    assert "demo-target-default: 5 to 8, by keda" in scaled.notes
    assert "kubectl scale" not in scaled.notes


MONITORED = {"monitoring": {"serviceMonitor": {"enabled": True}}}


@pytest.mark.parametrize(
    ("values", "callers", "namespaces"),
    [
        ({}, None, None),
        (MONITORED, "metrics", "monitoring"),
        ({"autoscaling": {"mode": "hpa"}}, "metrics", "monitoring"),
        ({"autoscaling": {"mode": "keda"}}, "keda", "keda"),
        ({"autoscaling": {"mode": "keda"}, **MONITORED}, "metrics and keda", "monitoring keda"),
        ({"networkPolicy": {"enabled": False}, **MONITORED}, None, None),
    ],
    ids=["nobody", "monitoring", "hpa", "keda", "both", "no policy"],
)
def test_the_notes_name_the_namespaces_that_the_network_policies_count_on(
    values, callers, namespaces
):
    notes = install(values).notes
    if callers is None:
        assert "in from namespaces" not in notes
        assert "kubectl get namespace" not in notes
    else:
        assert f"The network policies let {callers} in from namespaces" in notes
        assert f"  kubectl get namespace {namespaces}\n" in f"{notes}\n"


def test_the_notes_warn_of_an_ingress_whose_controller_is_not_let_in():
    warning = "only pods of the namespace serving may reach gateways"
    gateway = {"enabled": True, "ingress": {"host": "paceline.example.org"}}
    assert warning in install({"gateway": gateway}).notes
    assert warning not in install({"gateway": {"enabled": True}}).notes
    elsewhere = {"namespaceSelector": {}}, {"ipBlock": {"cidr": "10.0.0.0/8"}}
    for policy in ({"enabled": False}, *({"gatewayClients": [it]} for it in elsewhere)):
        assert warning not in install({"gateway": gateway, "networkPolicy": policy}).notes


def test_the_notes_get_the_certificates_that_their_command_needs():
    one_sided = {"enabled": True, "secrets": {"orchestrator": "o", "target": "t", "drafter": "d"}}
    notes = install({"tls": one_sided}).notes
    assert "get secret o " in notes
    assert "for file in ca.crt;" in notes
    assert notes.count("--tls-") == 1
    notes = install(values_of("tls.yaml")).notes
    assert "get secret paceline-client-tls " in notes
    assert "for file in ca.crt tls.crt tls.key;" in notes
    (command,) = (line for line in notes.splitlines() if "paceline generate" in line)
    arguments = shlex.split(command)[2:]
    settings = parse(GenerateSettings, arguments, program="test", environment={})
    assert settings.tls_certificate is not None


def test_the_notes_get_the_key_that_their_command_needs():
    assert "--api-key-file" not in install().notes
    notes = install({"orchestrator": {"keysSecret": "locks"}}).notes
    assert "get secret locks " in notes
    (command,) = (line for line in notes.splitlines() if "paceline generate" in line)
    arguments = shlex.split(command)[2:]
    settings = parse(GenerateSettings, arguments, program="test", environment={})
    assert str(settings.api_key_file) == "own.key"


def test_the_notes_name_the_namespaces_that_are_let_in_where_that_matters():
    scraped = {"monitoring": {"serviceMonitor": {"enabled": True}}}
    keda = {"autoscaling": {"mode": "keda"}}
    assert "get namespace" not in install().notes
    assert "kubectl get namespace monitoring\n" in install(scraped).notes
    assert "kubectl get namespace monitoring keda\n" in install({**scraped, **keda}).notes
    there = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "autoscaling"}}}
    notes = install({**keda, "networkPolicy": {"keda": [there]}}).notes
    assert "kubectl get namespace autoscaling\n" in notes
    assert "get namespace" not in install({**keda, "networkPolicy": {"enabled": False}}).notes


def test_the_notes_warn_of_gpus_that_compute_in_float32_because_nobody_said_otherwise():
    gpu = {"gpu": {"count": 1}}
    pools = {"said": {"settings": {"dtype": "float32"}}, "silent": {}}
    notes = install({"target": {**gpu, "pools": pools}, "drafter": gpu}).notes
    assert "in float32, the default: target-silent, drafter-default.\n" in notes
    assert "in float32" not in install().notes
    assert "in float32" not in install(values_of("gpu.yaml")).notes


def test_the_notes_name_the_pool_that_can_be_scaled():
    assert (
        "--set target.pools.h100.replicas=4" in install({"target": {"pools": {"h100": {}}}}).notes
    )
