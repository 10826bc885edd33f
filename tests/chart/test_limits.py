"""Limits in several places follow from one, or are compared: a front hop outlives its streams."""

import re

import pytest

from paceline_gateway.settings import GatewaySettings
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_serving.server_settings import RunSettings
from support.helm import RefusedError
from support.manifests import GROUPS_LABEL, VALUES_FILES, install, values_of

CALL_SECONDS = RunSettings.model_fields["call_limit_seconds"].default
KEPT_SECONDS = GatewaySettings.model_fields["keep_alive_seconds"].default
BODY_BYTES = GatewaySettings.model_fields["body_limit_bytes"].default
BODIES_BYTES = GatewaySettings.model_fields["bodies_limit_bytes"].default
MESSAGE_BYTES = OrchestratorSettings.model_fields["message_limit_bytes"].default
QUEUE_BYTES = OrchestratorSettings.model_fields["queue_limit_bytes"].default
NGINX = "nginx.ingress.kubernetes.io/proxy-read-timeout"
NGINX_BODY = "nginx.ingress.kubernetes.io/proxy-body-size"
ALB = "alb.ingress.kubernetes.io/load-balancer-attributes"


def gateway(**values):
    return {"gateway": {"enabled": True, **values}}


def settings(seconds):
    return {"settings": {"call_limit_seconds": seconds}}


def behind(**annotations):
    return gateway(ingress={"host": "paceline.example.org", "annotations": annotations})


def patience(release):
    (ingress,) = release.of("Ingress")
    return int(ingress["metadata"]["annotations"][NGINX])


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        (behind(), CALL_SECONDS),
        ({**behind(), "common": settings(1200)}, 1200),
        ({**behind(), "common": settings("90")}, 90),
        (gateway(ingress={"host": "a"}, **settings(44.5)), 45),
    ],
    ids=["default", "common", "text", "own"],
)
def test_gateways_outlive_their_streams_and_all_in_front_outlives_gateways(values, seconds):
    release = install(values)
    pod = release.pod("-gateway")
    assert pod.flag("drain-seconds") == str(seconds)
    assert pod.spec["terminationGracePeriodSeconds"] > seconds + 5
    assert patience(release) > seconds


def test_a_wish_that_is_long_enough_stands():
    release = install({**behind(**{NGINX: "3600"})})
    assert patience(release) == 3600
    assert install(gateway(drainSeconds=900)).pod("-gateway").flag("drain-seconds") == "900"
    (ingress,) = install(behind(**{ALB: "idle_timeout.timeout_seconds=610"})).of("Ingress")
    assert ingress["metadata"]["annotations"][ALB] == "idle_timeout.timeout_seconds=610"


@pytest.mark.parametrize(
    ("settings", "annotations", "size"),
    [
        ({}, {}, str(BODY_BYTES)),
        ({"body_limit_bytes": 1 << 25}, {}, str(1 << 25)),
        ({"body_limit_bytes": "800000"}, {}, "800000"),
        ({"body_limit_bytes": "$(ONE)"}, {}, "0"),
        ({}, {NGINX_BODY: "16m"}, "16m"),
        ({}, {NGINX_BODY: "1g"}, "1g"),
        ({}, {NGINX_BODY: "0"}, "0"),
        ({"body_limit_bytes": 1024}, {NGINX_BODY: "1K"}, "1K"),
    ],
)
def test_nginx_takes_as_large_a_body_as_gateways_do(settings, annotations, size):
    ingress = {"host": "paceline.example.org", "annotations": annotations}
    (made,) = install(gateway(settings=settings, ingress=ingress)).of("Ingress")
    assert made["metadata"]["annotations"][NGINX_BODY] == size


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"orchestrator": {"settings": {"default_deadline_seconds": 900}}},
            "orchestrator.settings.default_deadline_seconds=900 is more than a call may take",
        ),
        (
            gateway(
                ingress={"host": "a", "className": "nginx"}, settings={"keep_alive_seconds": 60}
            ),
            "gateway.settings.keep_alive_seconds=60 is not more than the 60 s for which nginx",
        ),
        (behind(**{NGINX_BODY: "15m"}), f"{NGINX_BODY}=15m is less than a body may have (167772"),
        (behind(**{NGINX_BODY: "2k"}), "or set gateway.settings.body_limit_bytes=2048"),
        (gateway(drainSeconds=CALL_SECONDS - 1), "gateway.drainSeconds=599 is less than a call"),
        ({**gateway(drainSeconds=900), "common": settings(901)}, "gateway.drainSeconds=900 is"),
        (gateway(**settings(700)), "call_limit_seconds=700 is more than orchestrators let a call"),
        (
            {"orchestrator": settings(700)},
            "target.settings.call_limit_seconds=600 is less than a call may take at orchestrators",
        ),
        (
            {"drafter": {"pools": {"a": settings(60)}}},
            "drafter.pools.a.settings.call_limit_seconds=60 is less than",
        ),
        ({"common": settings("$(LIMIT)")}, "common.settings.call_limit_seconds=$(LIMIT) is no"),
        (
            {"target": {"pools": {"a": settings("$(LIMIT)")}}},
            "target.pools.a.settings.call_limit_seconds=$(LIMIT) is no number",
        ),
        (
            {"orchestrator": {"settings": {"queue_limit_bytes": 2**30}}},
            "queue_limit_bytes=1073741824 does not fit into orchestrator.resources.limits.memory",
        ),
        (
            gateway(settings={"bodies_limit_bytes": 2**30}),
            "bodies_limit_bytes=1073741824 does not fit into gateway.resources.limits.memory",
        ),
        (
            gateway(resources={"requests": {"memory": "32Mi"}, "limits": {"memory": "64Mi"}}),
            f"bodies_limit_bytes={BODIES_BYTES} does not fit into gateway.resources.limits.memory",
        ),
        (
            gateway(settings={"body_limit_bytes": 900_000, "bodies_limit_bytes": 1_000_000}),
            "gateway.settings.body_limit_bytes=900000 is more than 800000, what one client",
        ),
        (
            gateway(settings={"bodies_limit_bytes": BODY_BYTES}),
            f"gateway.settings.body_limit_bytes={BODY_BYTES} is more than {BODY_BYTES * 4 // 5}",
        ),
        (
            gateway(settings={"body_limit_bytes": BODIES_BYTES}),
            f"is more than {BODIES_BYTES * 4 // 5}, what one client may have",
        ),
        (
            {"orchestrator": {"settings": {"queue_limit_bytes": MESSAGE_BYTES - 1}}},
            f"orchestrator.settings.message_limit_bytes={MESSAGE_BYTES} is more than",
        ),
        (
            {"orchestrator": {"settings": {"message_limit_bytes": QUEUE_BYTES + 1}}},
            f"is more than {QUEUE_BYTES}, what one client may have of",
        ),
        (behind(**{NGINX: "60"}), f"{NGINX}=60 is less than a call may take (600)"),
        (behind(**{ALB: "x=y,idle_timeout.timeout_seconds=60"}), "is less than a call may take"),
        (
            behind(**{ALB: f"idle_timeout.timeout_seconds={KEPT_SECONDS}"}),
            f"set gateway.settings.keep_alive_seconds to more than {KEPT_SECONDS}",
        ),
    ],
)
def test_limits_that_do_not_fit_each_other_are_refused(values, message):
    with pytest.raises(RefusedError, match=re.escape(message)):
        install(values)


@pytest.mark.parametrize(
    "values",
    [
        gateway(settings={"body_limit_bytes": 800_000, "bodies_limit_bytes": 1_000_000}),
        gateway(settings={"body_limit_bytes": "$(ONE)", "bodies_limit_bytes": "$(ALL)"}),
        {"orchestrator": {"settings": {"queue_limit_bytes": MESSAGE_BYTES}}},
    ],
    ids=["four fifths", "variables", "all"],
)
def test_one_request_may_be_as_large_as_its_clients_share_of_the_room(values):
    install(values)


@pytest.mark.parametrize(
    "values",
    [
        gateway(settings={"keep_alive_seconds": 5}),
        gateway(ingress={"host": "a"}, settings={"keep_alive_seconds": 61}),
        gateway(ingress={"host": "a"}, settings={"keep_alive_seconds": "$(KEPT)"}),
        gateway(
            ingress={"host": "a", "annotations": {ALB: "idle_timeout.timeout_seconds=610"}},
            settings={"keep_alive_seconds": 611},
        ),
    ],
    ids=["no balancer", "61", "variable", "said"],
)
def test_a_connection_may_be_idle_for_as_long_as_no_balancer_keeps_it(values):
    install(values)


@pytest.mark.parametrize("name", [file.name for file in VALUES_FILES])
def test_no_pod_is_killed_at_work(name):
    for pod in install(values_of(name)).pods:
        if pod.role == "test":
            continue
        sleep = pod.server.get("lifecycle", {}).get("preStop", {}).get("sleep", {"seconds": 0})
        drain = 0 if pod.role == "part" else int(pod.flag("drain-seconds"))
        work = drain + sleep["seconds"]
        assert pod.spec["terminationGracePeriodSeconds"] >= work + 15
        if GROUPS_LABEL in pod.labels:  # whose rollouts have no deadline
            continue
        rollout = {it["metadata"]["name"]: it for it in install(values_of(name)).of("Deployment")}
        deadline = rollout[pod.name]["spec"]["progressDeadlineSeconds"]
        assert deadline > pod.spec["terminationGracePeriodSeconds"]
