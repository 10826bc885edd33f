"""How many targets run, who decides it, and what a rollout or an eviction may take away."""

import pytest

from paceline_orchestrator.planning.equation import needed_target_count
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_serving.command_line import parse
from support.helm import RefusedError
from support.manifests import install, values_of

# Where floating point is one too many: 0.9 / (3 * 0.3), 2.1 / 0.3, and steps around whole numbers.
LATENCIES_US = [
    (target, drafter, lookahead)
    for drafter in (1, 7, 300, 3_333, 99_999)
    for lookahead in (1, 3, 5, 16)
    for whole in (1, 3, 7, 10)
    for target in {max(1, whole * lookahead * drafter + step) for step in (-1, 0, 1)}
]


def scaled(mode, **values):
    return install({"autoscaling": {"mode": mode, **values}})


def replicas(release, name="-target-default"):
    return release.one("Deployment", name)["spec"].get("replicas")


def test_the_chart_and_the_orchestrator_agree_on_equation_1_for_every_latency():
    pools = {
        f"p{index}": {
            "latency": {
                "targetMicroseconds": target,
                "drafterMicroseconds": drafter,
                "lookahead": lookahead,
            }
        }
        for index, (target, drafter, lookahead) in enumerate(LATENCIES_US)
    }
    release = install({"target": {"pools": pools}})
    found = {each["metadata"]["name"]: each["spec"] for each in release.of("Deployment")}
    for index, (target, drafter, lookahead) in enumerate(LATENCIES_US):
        expected = needed_target_count(target, drafter, lookahead=lookahead)
        assert found[f"demo-target-p{index}"]["replicas"] == expected


def test_without_latencies_there_are_two_targets_and_a_number_that_is_given_wins():
    assert replicas(install()) == 2
    latency = {"targetMicroseconds": 36_000, "drafterMicroseconds": 4_000, "lookahead": 2}
    assert replicas(install({"target": {"latency": latency}})) == 5
    assert replicas(install({"target": {"latency": latency, "replicas": 3}})) == 3
    assert replicas(install({"target": {"latency": latency, "replicas": 0}})) == 0


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [("none", set()), ("hpa", {"HorizontalPodAutoscaler"}), ("keda", {"ScaledObject"})],
)
def test_one_autoscaler_at_most_owns_the_number_of_targets(mode, kinds):
    release = scaled(mode)
    scalers = {"HorizontalPodAutoscaler", "ScaledObject"}
    assert {each["kind"] for each in release.objects} & scalers == kinds
    assert (replicas(release) is None) is (mode != "none")
    assert replicas(release, "-drafter-default") == 1
    assert replicas(release, "-orchestrator") == 2


def test_both_autoscalers_follow_the_same_number_one_target_for_each_unit():
    (metric,) = scaled("hpa").one("HorizontalPodAutoscaler", "-default")["spec"]["metrics"]
    assert metric["external"]["metric"] == {"name": "paceline_desired_verifiers"}
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    (trigger,) = scaled("keda").one("ScaledObject", "-default")["spec"]["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("external-push", "AverageValue")
    assert trigger["metadata"] == {"scalerAddress": "demo-scaler.serving.svc.cluster.local:50053"}


@pytest.mark.parametrize("mode", ["hpa", "keda"])
def test_the_autoscaler_and_the_orchestrators_have_the_same_limits(mode):
    latency = {"targetMicroseconds": 36_000, "drafterMicroseconds": 4_000, "lookahead": 2}
    release = install(
        {"autoscaling": {"mode": mode, "maxReplicas": 9}, "target": {"latency": latency}}
    )
    (scaler,) = release.of("HorizontalPodAutoscaler") or release.of("ScaledObject")
    spec = scaler["spec"]
    fewest = spec.get("minReplicas", spec.get("minReplicaCount"))
    most = spec.get("maxReplicas", spec.get("maxReplicaCount"))
    assert (fewest, most) == (5, 9)
    pod = release.pod("-orchestrator")
    settings = parse(OrchestratorSettings, pod.flags, program="test", environment={})
    assert (settings.least_verifiers, settings.most_verifiers) == (fewest, most)
    assert settings.verifier_lookahead == 2
    # Each replica answers for all of them.
    service = release.one("Service", "-scaler")
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert settings.peer_service == f"{service['metadata']['name']}:50053"


@pytest.mark.parametrize(("reserved", "fewest"), [(1, 3), (4, 1), (20, 1)])
def test_a_scaled_pool_keeps_one_target_however_many_the_other_pools_have(reserved, fewest):
    latency = {"targetMicroseconds": 36_000, "drafterMicroseconds": 4_000, "lookahead": 2}
    pools = {"reserved": {"replicas": reserved}, "spot": {}, "tiny": {"replicas": 1}}
    target = {"latency": latency, "pools": pools}  # Equation 1 asks for 5
    release = install({"autoscaling": {"mode": "hpa", "pool": "spot"}, "target": target})
    (scaler,) = release.of("HorizontalPodAutoscaler")
    assert scaler["spec"]["minReplicas"] == fewest


@pytest.mark.parametrize("mode", ["hpa", "keda"])
def test_one_of_several_pools_is_scaled_and_the_others_keep_their_number(mode):
    latency = {"targetMicroseconds": 36_000, "drafterMicroseconds": 4_000, "lookahead": 2}
    pools = {"reserved": {"replicas": 3}, "spot": {}, "tiny": {"replicas": 1}}
    release = install(
        {
            "autoscaling": {"mode": mode, "pool": "spot"},
            "target": {"latency": latency, "pools": pools},
        }
    )
    assert replicas(release, "-target-reserved") == 3
    assert replicas(release, "-target-spot") is None
    (scaler,) = release.of("HorizontalPodAutoscaler") or release.of("ScaledObject")
    assert scaler["spec"]["scaleTargetRef"]["name"] == "demo-target-spot"
    # Equation 1 asks for 5, and 4 are there.
    spec = scaler["spec"]
    assert spec.get("minReplicas", spec.get("minReplicaCount")) == 1
    flags = release.pod("-orchestrator").flags
    settings = parse(OrchestratorSettings, flags, program="test", environment={})
    assert settings.fixed_verifiers == 4
    assert (settings.least_verifiers, settings.most_verifiers) == (1, 8)
    assert f"demo-target-spot: 1 to 8, by {mode}" in release.notes
    assert "demo-target-reserved: 3" in release.notes


def test_scaling_up_takes_one_step_and_the_tolerance_is_off_where_it_can_be():
    for kube_version, tolerance in (("1.34.0", None), ("1.35.0", "0")):
        values = {"autoscaling": {"mode": "hpa", "maxReplicas": 20}}
        release = install(values, kube_version=kube_version)
        behavior = release.one("HorizontalPodAutoscaler", "-default")["spec"]["behavior"]
        (policy,) = behavior["scaleUp"]["policies"]
        assert policy == {"type": "Pods", "value": 20, "periodSeconds": 15}
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 300
        assert {each.get("tolerance") for each in behavior.values()} == {tolerance}


@pytest.mark.parametrize("mode", ["hpa", "keda"])
def test_fewer_targets_are_left_as_slowly_as_the_values_say_and_more_are_there_at_once(mode):
    release = scaled(mode, maxReplicas=20, scaleDownPerMinute=3, scaleDownStabilizationSeconds=450)
    (scaler,) = release.of("HorizontalPodAutoscaler") or release.of("ScaledObject")
    advanced = scaler["spec"].get("advanced", {}).get("horizontalPodAutoscalerConfig")
    behavior = (advanced or scaler["spec"])["behavior"]
    down, up = behavior["scaleDown"], behavior["scaleUp"]
    assert down["policies"] == [{"type": "Pods", "value": 3, "periodSeconds": 60}]
    assert down["stabilizationWindowSeconds"] == 450
    # From one to the most within one look of the HorizontalPodAutoscaler, which is 15 s.
    assert up["policies"] == [{"type": "Pods", "value": 20, "periodSeconds": 15}]
    assert up["stabilizationWindowSeconds"] == 0
    assert not {"selectPolicy"} & (down.keys() | up.keys())


def test_keda_looks_as_often_as_it_is_told_and_leaves_the_number_when_it_goes():
    release = scaled("keda", keda={"pollingIntervalSeconds": 7})
    scaler = release.one("ScaledObject", "-default")["spec"]
    assert scaler["pollingInterval"] == 7
    assert scaler["advanced"]["restoreToOriginalReplicaCount"] is False
    assert not scaler.keys() & {"fallback", "idleReplicaCount", "cooldownPeriod"}


def test_keda_is_given_the_certificates_that_the_orchestrators_demand():
    secrets = {"orchestrator": "o", "target": "t", "drafter": "d", "client": "c"}
    for mutual, parameters in (
        (False, {"caCert": "o"}),
        (True, {"caCert": "c", "tlsClientCert": "c", "tlsClientKey": "c"}),
    ):
        release = install(
            {
                "autoscaling": {"mode": "keda"},
                "tls": {"enabled": True, "mutual": mutual, "secrets": secrets},
            }
        )
        (authentication,) = release.of("TriggerAuthentication")
        found = authentication["spec"]["secretTargetRef"]
        assert {each["parameter"]: each["name"] for each in found} == parameters
        (trigger,) = release.one("ScaledObject", "-default")["spec"]["triggers"]
        assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
        assert trigger["metadata"]["enableTLS"] == "true"


def test_in_the_example_of_mutual_tls_keda_has_a_role_that_the_scaler_answers():
    release = install({**values_of("tls.yaml"), "autoscaling": {"mode": "keda"}})
    (authentication,) = release.of("TriggerAuthentication")
    (secret,) = {each["name"] for each in authentication["spec"]["secretTargetRef"]}
    (uri,) = next(
        each["spec"]["uris"]
        for each in release.of("Certificate")
        if each["spec"]["secretName"] == secret
    )
    flags = release.pod("-orchestrator").flags
    settings = parse(OrchestratorSettings, flags, program="test", environment={})
    assert settings.role_of_peer[uri] == "operator"  # and a client is refused
    for role in ("target", "drafter"):
        assert uri not in str(release.pod(f"-{role}-default").flags)


def test_a_rollout_of_a_full_gpu_pool_takes_a_pod_away_before_it_adds_one():
    gpu = {"gpu": {"count": 1}}
    release = install({"target": gpu, "drafter": gpu})
    for name in ("-target-default", "-drafter-default"):
        strategy = release.one("Deployment", name)["spec"]["strategy"]
        assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    strategy = release.one("Deployment", "-orchestrator")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_a_rollout_that_needs_a_spare_gpu_is_warned_about():
    rollout = {"maxSurge": 1, "maxUnavailable": 0}
    assert "waits for ever" not in install({"target": {"rollout": rollout}}).notes
    with_gpu = install({"target": {"rollout": rollout, "gpu": {"count": 1}}})
    assert "waits for ever" in with_gpu.notes


@pytest.mark.parametrize(
    ("target", "warned"),
    [
        ({}, False),
        ({"replicas": 1}, True),
        ({"replicas": 1, "rollout": {"maxSurge": 1}}, False),
        ({"replicas": 1, "rollout": {"maxSurge": "50%"}}, False),
        ({"replicas": 3, "rollout": {"maxUnavailable": 3}}, True),
        ({"replicas": 3, "rollout": {"maxUnavailable": "50%"}}, False),
        ({"replicas": 1, "rollout": {"maxUnavailable": "50%"}}, True),
        ({"pools": {"a": {"replicas": 1}, "b": {"replicas": 1}}}, True),
        ({"pools": {"a": {"replicas": 1}, "b": {"replicas": 2}}}, False),
    ],
)
def test_a_rollout_that_leaves_no_target_is_warned_about(target, warned):
    notes = install({"target": target}).notes
    assert ("during a rollout there is no target" in notes) == warned


def test_a_scaled_pool_is_warned_about_by_its_smallest_number():
    assert "during a rollout there is no target" in scaled("keda").notes
    assert "during a rollout there is no target" not in scaled("keda", minReplicas=2).notes


@pytest.mark.parametrize("limit", [0, 2, "25%"])
def test_an_eviction_budget_is_as_it_is_given_also_if_it_is_nothing(limit):
    release = install({"common": {"podDisruptionBudget": {"maxUnavailable": limit}}})
    budgets = release.of("PodDisruptionBudget")
    assert [each["spec"]["maxUnavailable"] for each in budgets] == [limit] * 3


def test_an_eviction_budget_counts_the_pods_of_one_deployment_each():
    release = install({"gateway": {"enabled": True}, "target": {"pools": {"a": {}, "b": {}}}})
    of_deployments = [it["spec"]["selector"] for it in release.of("Deployment")]
    of_budgets = [it["spec"]["selector"] for it in release.of("PodDisruptionBudget")]
    assert sorted(map(str, of_budgets)) == sorted(map(str, of_deployments))
    assert all(it["spec"]["maxUnavailable"] == 1 for it in release.of("PodDisruptionBudget"))


@pytest.mark.parametrize(
    ("autoscaling", "message"),
    [
        ({"mode": "both"}, "autoscaling/mode"),
        ({"mode": "hpa", "minReplicas": 0}, "minReplicas"),
        ({"mode": "hpa", "minReplicas": 9}, "raise autoscaling.maxReplicas"),
    ],
)
def test_limits_that_make_no_sense_are_refused(autoscaling, message):
    with pytest.raises(RefusedError, match=message):
        install({"autoscaling": autoscaling})
