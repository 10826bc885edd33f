"""What operators add: it leaves what the chart has there, and can be what they say."""

import re

import pytest

from paceline_orchestrator.settings import OrchestratorSettings
from support.helm import RefusedError
from support.manifests import install

OWN_LABEL = "app.kubernetes.io/part-of"
GROUP_LABEL = "leaderworkerset.sigs.k8s.io/name"


def pools(**values):
    return {"drafter": {"pools": {"b": values}}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"common": {"podLabels": {"paceline/pool": "x"}}}, "common.podLabels has paceline/pool"),
        (pools(podLabels={OWN_LABEL: "x"}), f"drafter.pools.b.podLabels has {OWN_LABEL}"),
        ({"target": {"podLabels": {GROUP_LABEL: "x"}}}, f"target.podLabels has {GROUP_LABEL}"),
        (pools(extraVolumes=[{"name": "tmp"}]), "drafter.pools.b.extraVolumes has a volume tmp"),
        ({"target": {"extraContainers": [{"name": "target"}]}}, "target.extraContainers has a"),
        (
            {"common": {"extraInitContainers": [{"name": "download"}]}},
            "common.extraInitContainers has a container download",
        ),
        (
            {"common": {"serviceAccountName": "demo-target"}},
            "common.serviceAccountName=demo-target is what the chart makes itself",
        ),
        (
            {"target": {"resources": {"requests": {"memory": "3Gi"}}}},
            "target.resources.requests.memory=3Gi is more than limits.memory=2Gi",
        ),
        (
            pools(resources={"limits": {"cpu": "500m"}}),
            "raise drafter.pools.b.resources.limits.cpu",
        ),
        ({"test": {"resources": {"limits": {"memory": "128M"}}}}, "test.resources.requests.memory"),
        ({"extraObjects": ["text"]}, "extraObjects[0] is no object"),
        ({"extraObjects": [{"kind": "A"}, {"a": "b"}]}, "extraObjects[1] is no object"),
        ({"common": {"extraEnv": [{"name": "A", "value": 1}]}}, "/common/extraEnv/0/value"),
        ({"common": {"tolerations": [{"tolerationSeconds": "5"}]}}, "tolerations/0/toleration"),
        ({"target": {"extraVolumeMounts": [{"name": "a"}]}}, "/target/extraVolumeMounts/0"),
        ({"common": {"podSecurityContext": {"fsGroup": "2000"}}}, "podSecurityContext/fsGroup"),
        ({"common": {"settings": {"log_level": "loud"}}}, "/common/settings/log_level"),
        ({"orchestrator": {"settings": {"request_limit": 0}}}, "/orchestrator/settings/request"),
        ({"target": {"settings": {"threads": "many"}}}, "/target/settings/threads"),
        ({"gateway": {"settings": {"call_limit_seconds": 0}}}, "/gateway/settings/call_limit_"),
        ({"target": {"latency": {"lookahead": 65}}}, "/target/latency/lookahead"),
        ({"listenHost": "::"}, "/listenHost"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(values, message):
    with pytest.raises(RefusedError, match=re.escape(message)):
        install(values)


def test_quantities_are_compared_whatever_their_units():
    for request, limit in (("1.5Gi", "1610612736"), ("1500M", "1.5G"), ("0", "1Ki")):
        quantities = {"requests": {"memory": request}, "limits": {"memory": limit}}
        assert install({"target": {"resources": quantities}})
    cpu = {"requests": {"cpu": "1500m"}, "limits": {"cpu": "1.5"}}
    assert install({"target": {"resources": cpu}})


def test_a_label_that_the_chart_has_too_is_there_once_with_the_operators_value():
    rule = {"enabled": True, "labels": {OWN_LABEL: "monitoring", "release": "prometheus"}}
    (found,) = install({"monitoring": {"prometheusRule": rule}}).of("PrometheusRule")
    assert found["metadata"]["labels"][OWN_LABEL] == "monitoring"
    assert found["metadata"]["labels"]["release"] == "prometheus"
    annotation = {"kubectl.kubernetes.io/default-container": "logs"}
    for pod in install({"common": {"podAnnotations": annotation}}).pods:
        assert pod.metadata["annotations"].items() >= annotation.items()


def test_the_chart_asks_for_no_more_lookahead_than_an_orchestrator_takes():
    scaled = {"autoscaling": {"mode": "keda"}, "target": {"latency": {"lookahead": 64}}}
    asked = int(install(scaled).pod("-orchestrator").flag("verifier-lookahead"))
    limits = OrchestratorSettings.model_json_schema()["properties"]["verifier_lookahead"]
    assert asked == limits["maximum"]


def test_a_number_may_be_a_text_and_any_setting_a_variable_of_the_pod():
    settings = {"threads": "4", "queue_limit": "$(CALLS)", "log_level": "$(LEVEL)"}
    values = {"listenHost": "$(POD_IP)", "target": {"settings": settings}}
    flags = install(values).pod("-target-default").flags
    assert {"--threads=4", "--queue-limit=$(CALLS)", "--log-level=$(LEVEL)"} <= set(flags)
    assert "--listen=$(POD_IP):50051" in flags
