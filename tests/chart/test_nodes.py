"""A target whose model is on several nodes: a LeaderWorkerSet, of whose groups one pod serves."""

import pytest

from paceline_model_server.settings import ModelServerSettings
from paceline_serving.command_line import parse
from support.api_schemas import violations
from support.helm import RefusedError
from support.manifests import install, values_of

EXAMPLE = "vllm-nodes.yaml"
VLLM = {"image": {"repository": "paceline-vllm"}, "settings": {"backend": "vllm"}}
TWO = {**VLLM, "nodes": 2, "gpu": {"count": 4}}
GROUP = {"leaderworkerset.sigs.k8s.io/name": "demo-target-default-2-nodes"}


def target(values=TWO, **more):
    return install({"target": values, **more})


def groups(release):
    (found,) = release.of("LeaderWorkerSet")
    return found["spec"]["leaderWorkerTemplate"]


def settings_of(pod, *, index):
    """Read a pod's command line as its server does, after Kubernetes has put variables in."""
    variables = {"$(LWS_WORKER_INDEX)": str(index), "$(LWS_LEADER_ADDRESS)": "demo-0.demo"}
    flags = pod.flags
    for name, value in variables.items():
        flags = [flag.replace(name, value) for flag in flags]
    return parse(ModelServerSettings, flags, program="test", environment=pod.environment)


def test_a_group_has_a_pod_for_each_node_and_is_made_anew_as_a_whole():
    release = install(values_of(EXAMPLE))
    assert groups(release)["size"] == 2
    assert groups(release)["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert "demo-target-default" not in {it["metadata"]["name"] for it in release.of("Deployment")}
    # The first pod cannot be ready before the others are there.
    assert release.of("LeaderWorkerSet")[0]["spec"]["startupPolicy"] == "LeaderCreated"


def test_one_command_line_makes_the_first_pod_serve_and_the_others_help():
    release = install(values_of(EXAMPLE))
    leader, part = release.pod("-2-nodes"), release.pod("-part")
    assert leader.flags == part.flags
    assert not settings_of(leader, index=0).is_node_part
    assert settings_of(part, index=1).is_node_part
    told = settings_of(part, index=1).engine_option
    assert told[:5] == (
        "tensor_parallel_size=8",
        "pipeline_parallel_size=2",
        "nnodes=2",
        "node_rank=1",
        "master_addr=demo-0.demo",
    )
    assert {it["name"] for it in leader.server["env"]} == {"VLLM_HOST_IP"}


def test_only_first_pods_are_found_called_and_counted_as_targets():
    monitored = {"monitoring": {"serviceMonitor": {"enabled": True}}}
    release = target(**monitored)
    leader, part = release.pod("-2-nodes"), release.pod("-part")
    for service in release.of("Service"):
        assert not service["spec"]["selector"].items() <= part.labels.items()
    own = release.one("Service", "-target-default")
    assert own["spec"]["selector"].items() <= leader.labels.items()
    assert release.pod("-orchestrator").flag("target-service") == "demo-target-default:50051"
    # The controller makes a Service of the set's name, which leads to pods that are not ready.
    names = {service["metadata"]["name"] for service in release.of("Service")}
    assert release.of("LeaderWorkerSet")[0]["metadata"]["name"] not in names


def test_a_pod_that_helps_listens_nowhere_and_is_otherwise_like_the_first():
    release = target()
    leader, part = release.pod("-2-nodes"), release.pod("-part")
    left_out = {"ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}
    server = {key: value for key, value in leader.server.items() if key not in left_out}
    assert part.server == server
    for key in ("volumes", "securityContext", "terminationGracePeriodSeconds"):
        assert part.spec[key] == leader.spec[key]
    limits = part.server["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "4"
    assert "shm" in {volume["name"] for volume in part.spec["volumes"]}


def test_a_pod_that_helps_may_stay_for_the_sleep_and_the_drain_of_the_first_but_need_not():
    values = {**TWO, "preStopSleepSeconds": 7, "drainSeconds": 40}
    part = target(values).pod("-part")
    assert part.spec["terminationGracePeriodSeconds"] > 47
    assert "lifecycle" not in part.server


def test_an_eviction_takes_one_group_at_most_whichever_of_its_pods_it_asks_for():
    budget = target().one("PodDisruptionBudget", "-target-default")["spec"]
    assert budget["selector"] == {"matchLabels": GROUP}
    assert budget["maxUnavailable"] == 1


def test_the_pods_of_a_group_may_speak_to_each_other_and_those_that_help_to_nobody_else():
    release = target()
    policy = release.one("NetworkPolicy", "-target-default-nodes")["spec"]
    peers = [{"podSelector": {"matchLabels": GROUP}}]
    assert policy["podSelector"] == {"matchLabels": GROUP}
    assert sorted(policy["policyTypes"]) == ["Egress", "Ingress"]
    assert policy["ingress"] == [{"from": peers}]
    assert policy["egress"][0] == {"to": peers}
    (dns,) = policy["egress"][1:]
    assert {port["port"] for port in dns["ports"]} == {53}
    part = release.pod("-part")
    for other in release.of("NetworkPolicy"):
        selector = other["spec"]["podSelector"]["matchLabels"]
        assert selector == GROUP or not selector.items() <= part.labels.items()


def test_all_pods_of_a_group_may_download_the_model():
    model = {"source": "download", "download": {"repository": "a/b"}}
    release = target({**TWO, "model": model})
    policy = release.one("NetworkPolicy", "-target-default-download")["spec"]
    assert policy["podSelector"] == {"matchLabels": GROUP}
    for pod in (release.pod("-2-nodes"), release.pod("-part")):
        assert [each["name"] for each in pod.spec["initContainers"]] == ["download"]


@pytest.mark.parametrize(
    ("mode", "kind"), [("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")]
)
def test_an_autoscaler_scales_groups(mode, kind):
    release = target(autoscaling={"mode": mode})
    (scaler,) = release.of(kind)
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "name": "demo-target-default-2-nodes",
    }
    (groups,) = release.of("LeaderWorkerSet")
    assert "replicas" not in groups["spec"]


def test_pools_with_and_without_nodes_stand_side_by_side():
    release = target({"pools": {"large": TWO, "small": {}}})
    assert [it["metadata"]["name"] for it in release.of("LeaderWorkerSet")] == [
        "demo-target-large-2-nodes"
    ]
    assert release.one("Deployment", "-target-small")
    assert "demo-target-large-2-nodes" in release.notes


def test_a_typo_in_a_pod_of_a_group_is_seen():
    release = target()
    (found,) = release.of("LeaderWorkerSet")
    groups(release)["workerTemplate"]["spec"]["containers"][0]["lifecycles"] = {}
    (violation,) = violations(found, kube_version="1.34.0")
    assert "was unexpected" in violation


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": 2}, "target.nodes=2: a server has its model on one device, unless vLLM"),
        ({**VLLM, "nodes": 2}, "target.nodes=2 without a device: set target.gpu.count"),
        ({**TWO, "nodes": 0}, "nodes"),
        ({**TWO, "nodes": 65}, "nodes"),
    ],
)
def test_nodes_that_cannot_be_are_refused(values, message):
    with pytest.raises(RefusedError, match=message):
        target(values)
    assert target({**VLLM, "gpu": {"count": 4}}).pod("-target-default")


def divided(*options, nodes=1, count=4):
    settings = {"backend": "vllm", "engine_option": list(options)}
    return target({**VLLM, "nodes": nodes, "gpu": {"count": count}, "settings": settings})


@pytest.mark.parametrize(
    ("options", "nodes", "count"),
    [
        (("tensor_parallel_size=4",), 1, 4),
        (("tensor-parallel-size=2", "--pipeline_parallel_size=2"), 1, 4),
        (("pipeline-parallel-size=4",), 1, 4),
        (("tensor_parallel_size=8",), 2, 4),
        (("tensor_parallel_size=2", "pipeline_parallel_size=4"), 2, 4),
        (("tensor_parallel_size=$(PARTS)",), 2, 4),
        (("tensor_parallel_size=2",), 1, 0),  # processes of a CPU
    ],
)
def test_a_model_may_be_divided_otherwise_over_the_same_devices(options, nodes, count):
    flags = divided(*options, nodes=nodes, count=count).pods
    assert any(
        f"--engine-option={options[0]}" in pod.flags for pod in flags if pod.role == "target"
    )


@pytest.mark.parametrize(
    ("options", "nodes", "parts"),
    [
        (("tensor_parallel_size=2",), 1, "2 x 1 parts .* 4 devices"),
        (("tensor_parallel_size=8",), 1, "8 x 1 parts .* 4 devices"),
        (("tensor-parallel-size=4",), 2, "4 x 1 parts .* 8 devices"),
        (("--pipeline-parallel-size=2",), 2, "1 x 2 parts .* 8 devices"),
        (("tensor_parallel_size=4", "pipeline_parallel_size=2"), 1, "4 x 2 parts .* 4 devices"),
    ],
)
def test_parts_that_are_not_as_many_as_devices_are_refused(options, nodes, parts):
    with pytest.raises(RefusedError, match=parts):
        divided(*options, nodes=nodes)


def test_as_one_text_an_engine_option_is_checked_as_well():
    values = {**TWO, "settings": {"backend": "vllm", "engine_option": "tensor_parallel_size=4"}}
    with pytest.raises(RefusedError, match="4 x 1 parts"):
        target(values)


@pytest.mark.parametrize("option", ["nnodes=2", "node-rank=0", "--master-addr=a"])
def test_what_the_chart_says_about_nodes_nobody_else_says(option):
    for nodes in (1, 2):
        with pytest.raises(RefusedError, match=r"which the chart says itself.*target\.nodes"):
            divided(option, nodes=nodes)
