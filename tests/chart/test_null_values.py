"""A value that is null is as if it had not been said: never 0, never an empty text."""

import copy
import json
import re
import subprocess

import jsonschema
import pytest
import yaml

from support.api_schemas import violations
from support.helm import CHART, KUBE_VERSIONS, RefusedError
from support.manifests import install, load_yaml

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
# So much of the chart is installed that each value shows in some object.
EVERYTHING = {
    "gateway": {"enabled": True, "ingress": {"host": "paceline.example.org"}},
    "monitoring": {
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboard": {"enabled": True},
    },
}
KEDA = {**EVERYTHING, "autoscaling": {"mode": "keda"}}
HPA = {**EVERYTHING, "autoscaling": {"mode": "hpa"}}
# Maps whose keys are the operator's: null takes out a key, or all of them.
OPEN = {"requests", "limits", "labels"}


def paths(values, path=()):
    """Yield the way to every value and to every map of them, as keys."""
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from paths(value, (*path, key))


def put(values, path, value):
    """Return a copy of values with one of them set."""
    changed = copy.deepcopy(values)
    place = changed
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = value
    return changed


def without(values, path):
    """Return values that do not say one of them."""
    if path[0] not in values:
        return values
    rest = {key: value for key, value in values.items() if key != path[0]}
    if len(path) == 1:
        return rest
    return {**rest, path[0]: without(values[path[0]], path[1:])}


@pytest.mark.parametrize(
    ("section", "installed"), [*((key, KEDA) for key in VALUES), ("autoscaling", HPA)]
)
def test_null_is_the_default_of_every_value_and_of_every_section(section, installed):
    untouched = install(installed)
    for path in paths({section: VALUES[section]}):
        if OPEN & set(path):
            continue
        unsaid = without(installed, path)
        expected = untouched if unsaid == installed else install(unsaid)
        assert install(put(installed, path, None)) == expected, ".".join(path)


def test_null_takes_out_what_is_in_requests_limits_and_labels():
    takes_out = {
        "target": {"resources": {"limits": {"memory": None}}},
        "drafter": {"resources": {"limits": None}},
        "monitoring": {"dashboard": {"enabled": True, "labels": None}},
    }
    release = install(takes_out)
    cpu_and_memory = {"cpu": "1", "memory": "1Gi"}
    for role in ("target", "drafter"):
        resources = release.pod(f"-{role}-default").server["resources"]
        assert resources == {"requests": cpu_and_memory, "limits": {}}
    assert "grafana_dashboard" not in release.one("ConfigMap", "-dashboard")["metadata"]["labels"]
    for each in release.objects:
        assert violations(each, kube_version=KUBE_VERSIONS[-1]) == []


def test_null_leaves_a_pools_number_to_equation_1_whatever_its_role_says():
    pools = {"one": {"replicas": None}, "two": {}}
    latency = {"targetMicroseconds": 36_000, "drafterMicroseconds": 4_000, "lookahead": 3}
    release = install({"target": {"replicas": 7, "latency": latency, "pools": pools}})
    numbers = {
        name: release.one("Deployment", f"-target-{name}")["spec"]["replicas"] for name in pools
    }
    assert numbers == {"one": 3, "two": 7}


@pytest.mark.parametrize("values", [{"livenessSeconds": None}, {"pools": {"a": {"gpu": None}}}])
def test_null_where_the_chart_has_no_default_is_refused_by_its_name(values):
    with pytest.raises(RefusedError, match=r"/target/(livenessSeconds|pools/a/gpu)': got null"):
        install({"target": values})


def rendered_by(helm, *, chart=CHART, arguments=()):
    command = [helm, "template", "demo", chart, "--namespace", "serving"]
    command += ["--kube-version", KUBE_VERSIONS[-1], *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return sorted(load_yaml(ran.stdout), key=json.dumps)


def test_helm_3_takes_null_for_the_default_too(helm3):
    nulls = ("orchestrator.replicas", "drafter.replicas", "common", "target.rollout", "tls.enabled")
    said = ",".join(f"{name}=null" for name in nulls)
    assert rendered_by(helm3, arguments=["--set", said]) == rendered_by(helm3)


def test_what_the_values_of_an_older_chart_lack_is_the_new_charts_default(helm3, tmp_path):
    """As with `--reuse-values`: Helm then knows the older chart's values alone."""
    newer = tmp_path / "paceline"
    for file in (path for path in CHART.rglob("*") if path.is_file()):
        copied = newer / file.relative_to(CHART)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(file.read_bytes())
    (newer / "values.yaml").write_text("target: {rollout: {maxSurge: 0}}\n")
    assert rendered_by(helm3, chart=newer) == rendered_by(helm3)


# --- other kinds ----------------------------------------------------------------------------------

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
OTHERS = ("text", "", -1, 0, 1.5, 1_000_000, 10**12, True, ["a"], [], {"a": "b"}, {})


def schema_of(path):
    """Return what the schema says of one value."""
    schema = SCHEMA
    for key in path:
        schema = schema.get("properties", {}).get(key) or schema["additionalProperties"]
        if reference := schema.get("$ref"):
            schema = SCHEMA["definitions"][reference.rpartition("/")[2]]
    return jsonschema.Draft7Validator({**schema, "definitions": SCHEMA["definitions"]})


def why_impossible(values, untouched):
    """Return why values cannot be installed, in the chart's words or in an API server's."""
    try:
        release = install(values)
    except RefusedError as why:
        return str(why)
    changed = (each for each in release.objects if each not in untouched)
    return "\n".join(it for each in changed for it in violations(each, kube_version="1.36.0"))


@pytest.mark.parametrize("other", OTHERS, ids=repr)
def test_a_value_of_another_kind_is_refused_by_its_name_or_gives_objects_that_can_be(other):
    untouched = install(KEDA).objects
    taken = [path for path in paths(VALUES) if schema_of(path).is_valid(other)]
    together = KEDA
    for path in taken:
        if not any(path != longer and path == longer[: len(path)] for longer in taken):
            together = put(together, path, other)
    if not why_impossible(together, untouched):
        return
    for path in taken:
        name = ".".join(path)
        if why := why_impossible(put(KEDA, path, other), untouched):
            assert f": {name}" in why or f" {name}" in why, why


@pytest.mark.parametrize("other", [-1, 1_000_000, True, 1.5], ids=repr)
def test_a_setting_of_texts_takes_no_other_value(other):
    texts = (("target", "engine_option"), ("drafter", "then"), ("common", "peer_roles"))
    for section, name in texts:
        with pytest.raises(RefusedError, match=f"/{section}/settings/{name}': got "):
            install({section: {"settings": {name: other}}})


def test_a_number_that_is_too_large_for_its_place_never_becomes_a_power_of_ten():
    users = {"common": {"podSecurityContext": {"runAsUser": 1_000_700_000, "fsGroup": 10**9}}}
    for pod in install(users).pods:
        assert pod.spec["securityContext"]["runAsUser"] == 1_000_700_000
        assert pod.spec["securityContext"]["fsGroup"] == 10**9
    values = put(KEDA, ("orchestrator", "settings"), {"queue_limit_bytes": 10**12})
    values = put(values, ("orchestrator", "resources"), {"limits": None})
    flags = install(values).pod("-orchestrator").flags
    assert f"--queue-limit-bytes={10**12}" in flags
    assert not [flag for flag in flags if re.search(r"=.*\de\+", flag)]


def test_a_name_that_reads_as_a_number_stays_a_text():
    names = dict.fromkeys(("orchestrator", "gateway", "target", "drafter", "client"), "1e3")
    values = {
        **KEDA,
        "global": {"imagePullSecrets": ["007"]},
        "common": {"serviceAccountName": "12", "priorityClassName": "5", "runtimeClassName": "6"},
        "gateway": {"enabled": True, "keysSecret": "1", "ingress": {"host": "a", "tlsSecret": "2"}},
        "target": {"model": {"source": "claim", "claim": {"name": "3"}}},
        "drafter": {
            "model": {
                "source": "download",
                "download": {"repository": "org/model", "tokenSecret": "4", "revision": "1e3"},
            }
        },
        "tls": {"enabled": True, "mutual": True, "secrets": names},
    }
    for each in install(values, namespace="123").objects:
        assert violations(each, kube_version=KUBE_VERSIONS[-1]) == [], each["metadata"]["name"]
        assert each["metadata"]["namespace"] == "123"
