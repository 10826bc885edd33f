"""What pods run, and how: the command line, probes, drains, limits, security, volumes."""

import json
import re

import pytest
import yaml

from paceline_cli.generate import GenerateSettings
from paceline_gateway.settings import GatewaySettings
from paceline_model_server.settings import ModelServerSettings
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_serving.command_line import parse
from support.helm import CHART, RefusedError
from support.manifests import VALUES_FILES, install, values_of

SETTINGS = {
    "orchestrator": OrchestratorSettings,
    "gateway": GatewaySettings,
    "drafter": ModelServerSettings,
    "target": ModelServerSettings,
}
STRICT = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
}
# No server: nothing monitors it.
HIDDEN = {"part", "test"}
EVERYTHING = "everything-else-values.yaml"
DIGEST = "sha256:" + "0123456789abcdef" * 4


def releases():
    return [install(values_of(file.name)) for file in VALUES_FILES]


def servers():
    return [pod for release in releases() for pod in release.pods if pod.role in SETTINGS]


def settings_of(pod):
    """Read a server's command line as the server does."""
    flags = [flag.replace("$(LWS_WORKER_INDEX)", "0") for flag in pod.flags]
    return parse(SETTINGS[pod.role], flags, program="test", environment=pod.environment)


# --- the command line -----------------------------------------------------------------------------


def test_every_server_takes_its_command_line_and_environment():
    for pod in servers():
        settings = settings_of(pod)
        assert pod.server["command"] == ["paceline", "serve", pod.role]
        ports = {port["name"]: port["containerPort"] for port in pod.server["ports"]}
        addresses = {
            "http" if pod.role == "gateway" else "grpc": settings.listen,
            "health": getattr(settings, "health_listen", ""),
            "metrics": settings.metrics_listen,
            "scaler": getattr(settings, "scaler_listen", ""),
        }
        assert ports == {
            name: int(address.rpartition(":")[2]) for name, address in addresses.items() if address
        }


def test_settings_reach_the_server_as_they_are():
    values = {
        "common": {"settings": {"log_level": "debug", "reflection": True}},
        "orchestrator": {"settings": {"request_limit": 1_000, "default_deadline_seconds": 0.5}},
        "target": {
            "settings": {"token_budget": 123_456_789, "dtype": "bfloat16", "reflection": False},
            "pools": {"fast": {"settings": {"log_level": "error", "threads": 8}}},
        },
    }
    release = install(values)
    orchestrator = settings_of(release.pod("-orchestrator"))
    assert (orchestrator.request_limit, orchestrator.default_deadline_seconds) == (1_000, 0.5)
    assert (orchestrator.log_level, orchestrator.reflection) == ("debug", True)
    target = settings_of(release.pod("-target-fast"))
    assert (target.token_budget, target.dtype, target.threads) == (123_456_789, "bfloat16", 8)
    assert (target.log_level, target.reflection) == ("error", False)


def test_a_drafter_drafts_with_a_stack_and_a_target_for_itself():
    then = ["/models/small", "max-gram"]
    pools = {"drafter": {"settings": {"then": then}}, "target": {"settings": {"adapter": "/a"}}}
    release = install(pools)
    assert settings_of(release.pod("-drafter-default")).then == tuple(then)
    assert str(settings_of(release.pod("-target-default")).adapter) == "/a"


def test_a_setting_that_another_role_has_is_refused():
    with pytest.raises(RefusedError, match="request_limit"):
        install({"target": {"settings": {"request_limit": 3}}})


def test_an_orchestrator_looks_for_every_pool():
    release = install({"target": {"pools": {"a": {}, "b": {}}}, "drafter": {"pools": {"c": {}}}})
    found = [flag for flag in release.pod("-orchestrator").flags if "-service=" in flag]
    assert found == [
        "--target-service=demo-target-a:50051",
        "--target-service=demo-target-b:50051",
        "--drafter-service=demo-drafter-c:50051",
    ]
    services = {each["metadata"]["name"] for each in release.of("Service")}
    assert {flag.partition("=")[2].partition(":")[0] for flag in found} <= services


def test_dns_is_asked_for_whole_names():
    release = install({"orchestrator": {"discovery": "dns"}, "drafter": {"enabled": False}})
    pod = release.pod("-orchestrator")
    assert pod.flag("target-service") == "demo-target-default.serving.svc.cluster.local:50051"
    assert not any(flag.startswith("--drafter-service") for flag in pod.flags)


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({}, "/opt/paceline/models/python-target"),
        ({"path": "/models/large"}, "/models/large"),
        ({"source": "claim", "claim": {"name": "models"}}, "/models"),
        ({"source": "claim", "claim": {"name": "models"}, "path": "/a/b/"}, "/models/a/b"),
        ({"source": "download", "download": {"repository": "a/b"}}, "/models"),
        ({"source": "image", "image": {"reference": "a:1"}, "path": "large"}, "/models/large"),
    ],
)
def test_the_model_is_where_it_was_put(model, path):
    pod = install({"target": {"model": model}}).pod("-target-default")
    assert settings_of(pod).model == path
    mounted = [each["mountPath"] for each in pod.server["volumeMounts"] if each["name"] == "model"]
    assert mounted == ([] if model.get("source", "bundled") == "bundled" else ["/models"])


def test_a_download_has_the_environment_and_the_mounts_of_its_server():
    pod = install(values_of("every-model-source-values.yaml")).pod("-target-fetched")
    (download,) = pod.spec["initContainers"]
    for name in ("env", "volumeMounts"):
        own = [each for each in pod.server[name] if each["name"] not in {"tmp", "model"}]
        assert own
        assert all(each in download[name] for each in own)


def test_a_download_says_which_revision_and_keeps_the_token_out_of_the_manifest():
    pod = install(values_of("every-model-source-values.yaml")).pod("-target-fetched")
    (download,) = pod.spec["initContainers"]
    assert download["args"][1:] == ["example/large", "0123456789abcdef", "/models"]
    assert {"name": "HF_TOKEN_PATH", "value": "/hub/token"} in download["env"]
    assert "/hub" in {mount["mountPath"] for mount in download["volumeMounts"]}
    assert "/hub" not in {mount["mountPath"] for mount in pod.server["volumeMounts"]}
    volumes = {each["name"]: each for each in pod.spec["volumes"]}
    assert volumes["model"] == {"name": "model", "emptyDir": {"sizeLimit": "40Gi"}}
    assert volumes["hub"]["secret"]["secretName"] == "hub"


# --- life -----------------------------------------------------------------------------------------


def test_every_server_has_native_probes_of_its_plaintext_health_port():
    for pod in servers():
        if pod.role == "gateway":
            continue
        ports = {port["name"]: port["containerPort"] for port in pod.server["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert pod.server[kind]["grpc"]["port"] == ports["health"]
        # Only this one outlives a lost target.
        assert pod.server["livenessProbe"]["grpc"]["service"] == "liveness"
        assert "service" not in pod.server["readinessProbe"]["grpc"]


@pytest.mark.parametrize(("values", "scheme"), [("http.yaml", "HTTP"), (EVERYTHING, "HTTPS")])
def test_a_gateway_has_probes_of_its_own_port_and_waits_for_no_orchestrator(values, scheme):
    server = install(values_of(values)).pod("-gateway").server
    probes = {
        kind: server[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")
    }
    paths = {kind: probe["path"] for kind, probe in probes.items()}
    ready, live = "/health/ready", "/health/live"
    assert paths == {"startup": live, "readiness": ready, "liveness": live}
    assert all((it["port"], it["scheme"]) == ("http", scheme) for it in probes.values())


def test_a_gateway_calls_all_orchestrators_and_is_behind_a_service_of_its_own():
    values = {"orchestrator": {"service": {"port": 80}}}
    gateway = {"gateway": {"enabled": True, "service": {"port": 81}}}
    release = install({**values, **gateway}, release="a")
    pod = release.pod("-gateway")
    # A name that is each pod's, and not a balancer's that gives it one of them.
    assert pod.flag("orchestrators") == "a-orchestrator-pods.serving.svc.cluster.local:50050"
    spread = release.one("Service", "-orchestrator-pods")["spec"]
    assert (spread["clusterIP"], spread["publishNotReadyAddresses"]) == ("None", False)
    assert [port["port"] for port in spread["ports"]] == [50050]
    public = release.one("Service", "-orchestrator")["spec"]
    assert "clusterIP" not in public
    assert public["selector"] == spread["selector"]
    assert pod.spec["automountServiceAccountToken"] is False
    service = release.one("Service", "-gateway")["spec"]
    assert service["selector"].items() <= pod.labels.items()
    assert [(port["port"], port["targetPort"]) for port in service["ports"]] == [(81, "http")]
    budget = release.one("PodDisruptionBudget", "-gateway")["spec"]
    assert budget["selector"]["matchLabels"] == service["selector"]


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("keys", ["", "keys"])
def test_a_gateway_without_keys_or_without_tls_is_told_so_and_no_other(tls, keys):
    secrets = dict.fromkeys(("orchestrator", "gateway", "target", "drafter"), "s")
    values = {
        "gateway": {"enabled": True, "keysSecret": keys},
        "tls": {"enabled": tls, "secrets": secrets},
    }
    pod = install(values).pod("-gateway")
    settings = settings_of(pod)  # which refuses what is exposed unasked
    assert settings.insecure == (not tls or not keys)
    assert str(settings.api_keys) == ("/keys/keys" if keys else "None")
    assert (settings.orchestrator_tls is not None) == tls
    mounted = {mount["name"]: mount["readOnly"] for mount in pod.server["volumeMounts"][1:]}
    assert mounted == {**({"tls": True} if tls else {}), **({"keys": True} if keys else {})}


def entries_of(pod, secret):
    """Return which of a secret's entries a pod gets, and where."""
    volumes = {
        volume["name"]: [item["key"] for item in volume["secret"]["items"]]
        for volume in pod.spec["volumes"]
        if volume.get("secret", {}).get("secretName") == secret
    }
    mounts = pod.server["volumeMounts"]
    return {it["mountPath"]: volumes[it["name"]] for it in mounts if it["name"] in volumes}


def test_orchestrators_get_the_hashes_of_keys_and_who_calls_them_the_key_alone():
    values = {
        "orchestrator": {"keysSecret": "locks"},
        "gateway": {"enabled": True, "keysSecret": "locks"},
    }
    release = install(values)
    orchestrator, gateway = release.pod("-orchestrator"), release.pod("-gateway")
    assert entries_of(orchestrator, "locks") == {"/keys": ["keys"]}
    assert str(settings_of(orchestrator).api_keys) == "/keys/keys"
    assert entries_of(gateway, "locks") == {"/keys": ["keys"], "/own-key": ["key"]}
    assert str(settings_of(gateway).orchestrator_key_file) == "/own-key/key"
    test = release.pod("-test")
    assert entries_of(test, "locks") == {"/own-key": ["key"]}
    assert test.environment["PACELINE_API_KEY_FILE"] == "/own-key/key"
    assert not entries_of(release.pod("-target-default"), "locks")


def test_without_keys_nobody_is_asked_for_one():
    release = install({"gateway": {"enabled": True}})
    assert settings_of(release.pod("-orchestrator")).api_keys is None
    assert settings_of(release.pod("-gateway")).orchestrator_key_file is None
    assert "own-key" not in str(release.pod("-test"))


def test_what_only_grpc_servers_know_does_not_reach_a_gateway():
    unknown = {"reflection": True, "max_gram_tie": "latest", "max_gram_bigrams": "/bigrams"}
    common = {"settings": {**unknown, "log_level": "debug"}}
    pod = install({"common": common, "gateway": {"enabled": True}}).pod("-gateway")
    assert settings_of(pod).log_level == "debug"
    for name in unknown:
        assert not any(name.replace("_", "-") in flag for flag in pod.flags)


def test_an_ingress_is_there_if_it_has_a_name():
    release = install(values_of("http.yaml"))
    spec = release.one("Ingress", "-gateway")["spec"]
    (rule,) = spec["rules"]
    (path,) = rule["http"]["paths"]
    assert rule["host"] == "paceline.example.org"
    assert spec["tls"] == [{"hosts": [rule["host"]], "secretName": "paceline-http-tls"}]
    assert path["backend"]["service"] == {"name": "demo-gateway", "port": {"name": "http"}}
    assert "ingressClassName" not in spec
    assert install({"gateway": {"enabled": True}}).of("Ingress") == []


def test_nginx_speaks_to_gateways_as_they_do():
    key = "nginx.ingress.kubernetes.io/backend-protocol"

    def told(own=None, **more):
        ingress = {"host": "paceline.example.org", "annotations": own or {}}
        values = {"gateway": {"enabled": True, "ingress": ingress}, **more}
        return install(values).one("Ingress", "-gateway")["metadata"]["annotations"].get(key)

    secrets = dict.fromkeys(("orchestrator", "gateway", "target", "drafter"), "s")
    tls = {"enabled": True, "secrets": secrets}
    assert told() is None
    assert told(tls=tls) == "HTTPS"
    assert told({key: "AUTO_HTTP"}, tls=tls) == "AUTO_HTTP"


def test_an_orchestrator_that_leaves_serves_until_dns_tells_of_it_no_more():
    pods = {pod.role: pod for pod in install({"gateway": {"enabled": True}}).pods}
    assert pods["orchestrator"].server["lifecycle"]["preStop"]["sleep"]["seconds"] > 30
    assert pods["target"].server["lifecycle"]["preStop"]["sleep"]["seconds"] == 5


def test_a_model_server_has_its_start_up_time_and_an_orchestrator_waits_for_no_target():
    release = install({"target": {"startupSeconds": 3_601}})
    startup = release.pod("-target-default").server["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] == 3_602
    assert "service" not in startup["grpc"]
    startup = release.pod("-orchestrator").server["startupProbe"]
    assert startup["grpc"]["service"] == "liveness"


@pytest.mark.parametrize(("seconds", "expected"), [(60, 60), (65, 60), (120, 120), (10, 10)])
def test_a_hung_process_is_started_anew_after_the_seconds_that_are_said(seconds, expected):
    values = {"common": {"livenessSeconds": seconds}, "gateway": {"enabled": True}}
    for pod in install(values).pods:
        if pod.role == "test":
            continue
        probe = pod.server["livenessProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == expected
        assert probe["timeoutSeconds"] <= probe["periodSeconds"]


def test_a_pod_that_is_not_ready_gets_no_work_within_seconds_and_starts_in_two_minutes():
    for pod in install({"gateway": {"enabled": True}}).pods:
        if pod.role == "test":
            continue
        ready, start = pod.server["readinessProbe"], pod.server["startupProbe"]
        # Sooner than the pods of a Service that leave have to serve on (preStopSleepSeconds, 5).
        assert ready["periodSeconds"] * ready["failureThreshold"] <= 4
        expected = 1800 if pod.role in {"target", "drafter"} else 120
        assert start["periodSeconds"] * start["failureThreshold"] == expected
        for probe in (ready, start):
            assert probe["timeoutSeconds"] <= probe["periodSeconds"]
            assert "initialDelaySeconds" not in probe


@pytest.mark.parametrize(("sleep", "drain"), [(0, 0), (1, 0), (5, 25), (60, 3_600)])
def test_a_pod_is_killed_only_after_its_preparation_and_its_drain(sleep, drain):
    values = {
        "common": {"preStopSleepSeconds": sleep},
        **{role: {"drainSeconds": drain} for role in SETTINGS},
        "orchestrator": {"drainSeconds": drain, "preStopSleepSeconds": sleep},
    }
    for pod in install(values).pods:
        if pod.role == "test":
            continue
        before = pod.server.get("lifecycle", {}).get("preStop", {}).get("sleep", {"seconds": 0})
        assert before["seconds"] == sleep
        settings = settings_of(pod)
        assert (settings.drain_seconds, settings.drain_delay_seconds) == (drain, 0)
        assert pod.spec["terminationGracePeriodSeconds"] > sleep + drain + 10


def test_a_rollout_is_not_given_up_while_a_model_may_still_load():
    deployment = install({"target": {"startupSeconds": 7_200}}).one("Deployment", "-target-default")
    pod = deployment["spec"]["template"]["spec"]
    deadline = deployment["spec"]["progressDeadlineSeconds"]
    assert deadline > 7_200 + pod["terminationGracePeriodSeconds"]


def test_scaling_changes_nothing_but_the_number_of_pods():
    one, seven = (install({"target": {"replicas": count}}) for count in (1, 7))
    different = [
        (before, after)
        for before, after in zip(one.objects, seven.objects, strict=True)
        if before != after
    ]
    ((before, after),) = different
    assert (before["spec"].pop("replicas"), after["spec"].pop("replicas")) == (1, 7)
    assert before == after


def test_a_new_version_of_the_chart_restarts_no_pod_by_itself():
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    for pod in install({"common": {"image": {"tag": "x"}}}).pods:
        assert version not in str(pod)


# --- what operators add ---------------------------------------------------------------------------


def test_containers_of_the_operators_own_run_beside_the_server_and_before_the_download():
    sidecar, proxy = {"name": "logs", "image": "logs:1"}, {"name": "proxy", "image": "proxy:1"}
    values = {"extraContainers": [sidecar], "extraInitContainers": [proxy]}
    model = {"source": "download", "download": {"repository": "a/b"}}
    release = install({"common": values, "target": {"model": model}})
    for pod in release.pods:
        if pod.role != "test":
            assert [each["name"] for each in pod.spec["containers"]] == [pod.role, "logs"]
            assert pod.spec["containers"][1] == sidecar
            assert pod.spec["initContainers"][0] == proxy
    target = release.pod("-target-default")
    assert [each["name"] for each in target.spec["initContainers"]] == ["proxy", "download"]


def test_annotations_are_where_they_were_meant_to_be():
    values = {"deploymentAnnotations": {"a": "1"}, "podAnnotations": {"b": "2"}}
    release = install({"common": values})
    for deployment in release.of("Deployment"):
        assert deployment["metadata"]["annotations"] == {"a": "1"}
    for pod in release.pods:
        assert pod.metadata["annotations"]["b"] == "2"
        assert "a" not in pod.metadata["annotations"]


@pytest.mark.parametrize("keep", [False, True])
def test_the_pod_of_a_test_that_succeeded_goes_unless_it_shall_stay(keep):
    annotations = install({"test": {"keepPod": keep}}).pod("-test").metadata["annotations"]
    policies = annotations["helm.sh/hook-delete-policy"].split(",")
    assert policies == ["before-hook-creation", *([] if keep else ["hook-succeeded"])]


def test_a_containers_security_is_added_to_and_can_be_overruled():
    context = {"runAsUser": 1234, "readOnlyRootFilesystem": False}
    model = {"source": "download", "download": {"repository": "a/b"}}
    release = install({"common": {"containerSecurityContext": context}, "target": {"model": model}})
    for pod in release.pods:
        for container in pod.containers:
            assert container["securityContext"] == STRICT | context


def test_a_directory_of_a_pod_has_the_room_that_was_said():
    release = install({"common": {"temporarySizeLimit": "1Gi"}})
    for pod in release.pods:
        (volume,) = (each for each in pod.spec["volumes"] if each["name"] == "tmp")
        assert volume["emptyDir"] == {"sizeLimit": "1Gi"}


def test_the_view_that_the_readme_starts_in_a_pod_is_let_in_at_the_level_restricted():
    readme = (CHART / "README.md").read_text()
    (text,) = re.findall(r"--overrides='(.*?)'", readme, re.DOTALL)
    spec = json.loads(text)["spec"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (container,) = spec["containers"]
    assert f"run {container['name']} " in readme
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


# --- limits and security --------------------------------------------------------------------------


def test_every_container_says_what_it_needs_and_what_it_may_take():
    for release in releases():
        for pod in release.pods:
            for container in pod.containers:
                assert {"cpu", "memory"} <= set(container["resources"]["requests"])
                assert "memory" in container["resources"]["limits"]


def test_the_pod_security_level_restricted_accepts_every_pod_hooks_included():
    for release in releases():
        for pod in release.pods:
            context = pod.spec["securityContext"]
            assert context["runAsNonRoot"] is True
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec)
            for container in pod.containers:
                assert container["securityContext"].items() >= STRICT.items()
                assert not any("hostPort" in port for port in container.get("ports", ()))
            allowed = {"configMap", "emptyDir", "image", "persistentVolumeClaim", "secret"}
            for volume in pod.spec["volumes"]:
                assert set(volume) - {"name"} <= allowed


def test_volumes_and_mounts_belong_together_and_a_model_is_only_read():
    for release in releases():
        for pod in release.pods:
            volumes = [volume["name"] for volume in pod.spec["volumes"]]
            assert len(set(volumes)) == len(volumes)
            for container in pod.containers:
                mounts = container["volumeMounts"]
                assert {mount["name"] for mount in mounts} <= set(volumes)
                assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
            for mount in pod.server["volumeMounts"]:
                assert mount.get("readOnly", False) or mount["name"] in {"tmp", "scratch", "shm"}


def test_vllm_divides_a_model_over_the_gpus_of_a_pod_and_has_shared_memory():
    target, drafter = (
        next(it for it in install(values_of("vllm.yaml")).pods if it.role == role)
        for role in ("target", "drafter")
    )
    settings = settings_of(target)
    assert settings.backend == "vllm"
    assert set(settings.engine_option) == {
        *("tensor_parallel_size=4", "max_model_len=32768", "gpu_memory_utilization=0.9"),
    }
    assert target.server["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert target.server["image"].partition(":")[0].endswith("paceline-vllm")
    assert "/dev/shm" in {it["mountPath"] for it in target.server["volumeMounts"]}
    assert settings_of(drafter).device == "cuda"
    assert "/dev/shm" not in {it["mountPath"] for it in drafter.server["volumeMounts"]}
    divided = {"engine_option": ["pipeline_parallel_size=4"], "backend": "vllm"}
    values = {"image": {"repository": "paceline-vllm"}, "gpu": {"count": 4}, "settings": divided}
    other = next(it for it in install({"target": values}).pods if it.role == "target")
    assert settings_of(other).engine_option == ("pipeline_parallel_size=4",)


def test_a_pools_lora_adapters_are_given_one_by_one():
    adapters = ["law=/models/lora/law", "verse=/models/a, b"]
    pool = {"settings": {"lora": adapters}}
    release = install({"target": pool, "drafter": pool})
    for role in ("target", "drafter"):
        pod = next(it for it in release.pods if it.role == role)
        assert settings_of(pod).lora == tuple(adapters)


def test_a_gpu_is_a_text_in_requests_and_limits_and_the_model_is_put_on_it():
    release = install(values_of("gpu.yaml"))
    target, drafter = release.pod("-target-default"), release.pod("-drafter-default")
    for pod, resource in ((target, "nvidia.com/gpu"), (drafter, "nvidia.com/mig-1g.10gb")):
        for quantities in pod.server["resources"].values():
            assert quantities[resource] == "1"
        assert settings_of(pod).device == "cuda"
        assert settings_of(pod).dtype == "bfloat16"
        assert pod.spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert target.spec["priorityClassName"] == "serving"
    # Nothing lets it onto a node with GPUs.
    assert "nvidia" not in str(release.pod("-orchestrator").spec)


def test_a_digest_wins_over_a_tag_and_a_global_registry_over_every_other():
    values = {
        "common": {"image": {"registry": "one.example.org", "tag": "1.2"}},
        "target": {"image": {"digest": DIGEST}, "pools": {"a": {}, "b": {"image": {"digest": ""}}}},
    }
    release = install(values)
    assert release.pod("-target-a").server["image"] == (
        f"one.example.org/paceline-model-server@{DIGEST}"
    )
    assert release.pod("-target-b").server["image"] == "one.example.org/paceline-model-server:1.2"
    release = install({**values, "global": {"imageRegistry": "two.example.org/team"}})
    for pod in release.pods:
        assert pod.server["image"].startswith("two.example.org/team/paceline-")


def test_the_default_tag_is_the_version_that_the_chart_was_made_for():
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    for pod in install().pods:
        assert re.fullmatch(rf"paceline-[a-z-]+:{re.escape(version)}", pod.server["image"])


# --- pools and services ---------------------------------------------------------------------------


def test_what_is_common_gives_way_to_a_role_and_that_to_a_pool_also_for_zero_and_false():
    values = {
        "common": {"podDisruptionBudget": {"maxUnavailable": 3}, "nodeSelector": {"a": "1"}},
        "target": {
            "podDisruptionBudget": {"maxUnavailable": 2},
            "nodeSelector": {"b": "2"},
            "pools": {"x": {"podDisruptionBudget": {"maxUnavailable": 0}, "replicas": 0}, "y": {}},
        },
        "drafter": {"podDisruptionBudget": {"enabled": False}},
    }
    release = install(values)
    budgets = {
        each["metadata"]["name"]: each["spec"]["maxUnavailable"]
        for each in release.of("PodDisruptionBudget")
    }
    assert budgets == {"demo-orchestrator": 3, "demo-target-x": 0, "demo-target-y": 2}
    assert release.one("Deployment", "-target-x")["spec"]["replicas"] == 0
    assert release.pod("-target-x").spec["nodeSelector"] == {"a": "1", "b": "2"}


def test_every_selector_finds_the_pods_of_its_own_deployment_and_no_others():
    for release in releases():
        by_name = {pod.name: pod for pod in release.pods}
        for kind in ("Deployment", "Service", "PodDisruptionBudget"):
            for each in release.of(kind):
                selector = each["spec"]["selector"]
                wanted = selector.get("matchLabels", selector).items()
                found = {pod.name for pod in release.pods if wanted <= pod.labels.items()}
                name = each["metadata"]["name"]
                if name.endswith("-metrics"):
                    assert found == {it.name for it in release.pods if it.role not in HIDDEN}
                elif name.endswith(("-scaler", "-orchestrator-pods")):
                    assert {by_name[each].role for each in found} == {"orchestrator"}
                else:
                    groups = {it for it in by_name if it.startswith(f"{name}-2-nodes")}
                    if kind == "Service":  # a budget counts all pods of a group
                        groups = {it for it in groups if by_name[it].role != "part"}
                    assert found == (groups or {name})


def test_every_service_leads_to_a_port_that_its_pods_have():
    for release in releases():
        for service in release.of("Service"):
            selector = service["spec"]["selector"].items()
            for pod in release.pods:
                if selector <= pod.labels.items():
                    names = {port["name"] for port in pod.server["ports"]}
                    assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_model_servers_are_called_pod_by_pod_and_not_before_they_are_ready():
    for name in ("-target-default", "-drafter-default"):
        spec = install().one("Service", name)["spec"]
        assert spec["clusterIP"] == "None"
        assert spec["publishNotReadyAddresses"] is False
        assert [port["name"] for port in spec["ports"]] == ["grpc"]


def test_pods_of_a_pool_are_spread_apart_from_each_other():
    (constraint,) = install().pod("-target-default").spec["topologySpreadConstraints"]
    assert constraint["labelSelector"]["matchLabels"].items() <= (
        install().pod("-target-default").labels.items()
    )
    own = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    own["labelSelector"] = {"matchLabels": {"mine": "yes"}}
    release = install({"common": {"topologySpread": [own]}})
    assert release.pod("-orchestrator").spec["topologySpreadConstraints"] == [own]


# --- transport security ---------------------------------------------------------------------------


def test_without_tls_every_server_says_aloud_that_it_speaks_plaintext():
    for pod in install().pods:
        if pod.role in SETTINGS:
            assert settings_of(pod).insecure
            assert "tls" not in str(pod.spec["volumes"])


def test_single_calls_are_shown_with_tls_too():
    values = {**values_of("tls.yaml"), "target": {"settings": {"debug_calls": True}}}
    target = settings_of(install(values).pod("-target-default"))
    assert target.debug_calls
    assert target.tls_certificate is not None


def test_mutual_tls_gives_each_role_its_own_secret_and_demands_certificates_everywhere():
    release = install(values_of("tls.yaml"))
    for role in ("orchestrator", "target", "drafter"):
        pod = next(pod for pod in release.pods if pod.role == role)
        settings = settings_of(pod)
        assert not settings.insecure
        assert settings.server_tls.authority is not None
        assert settings.role_of_peer
        volumes = {each["name"]: each for each in pod.spec["volumes"]}
        assert volumes["tls"]["secret"]["secretName"] == f"paceline-{role}-tls"
    orchestrator = settings_of(release.pod("-orchestrator"))
    assert orchestrator.pool_tls is not None
    assert orchestrator.pool_tls.certificate is not None


def test_a_gateway_shows_orchestrators_its_own_certificate_where_they_demand_one():
    tls = values_of("tls.yaml")["tls"]
    tls["secrets"]["gateway"] = "paceline-gateway-tls"
    pod = install({"tls": tls, "gateway": {"enabled": True}}).pod("-gateway")
    settings = settings_of(pod)
    assert str(settings.tls_certificate) == "/tls/tls.crt"
    assert str(settings.orchestrator_tls.ca_file) == "/tls/ca.crt"
    assert str(settings.orchestrator_tls.certificate_file) == "/tls/tls.crt"
    # The name that the certificate is for.
    assert settings.orchestrator_tls.server_name == "demo-orchestrator.serving.svc.cluster.local"
    (volume,) = (each for each in pod.spec["volumes"] if each["name"] == "tls")
    assert volume["secret"]["secretName"] == "paceline-gateway-tls"
    del tls["secrets"]["gateway"]
    with pytest.raises(RefusedError, match=r"tls\.secrets\.gateway is empty"):
        install({"tls": tls, "gateway": {"enabled": True}})


def test_one_sided_tls_gives_the_test_nobody_elses_key():
    values = {"enabled": True, "secrets": {"orchestrator": "o", "target": "t", "drafter": "d"}}
    pod = install({"tls": values}).pod("-test")
    (volume,) = (each for each in pod.spec["volumes"] if each["name"] == "tls")
    assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]


@pytest.mark.parametrize("name", ["empty-values.yaml", "tls.yaml", "everything-else-values.yaml"])
def test_the_test_knows_the_variables_that_it_is_given(name):
    environment = install(values_of(name)).pod("-test").environment
    own = {key: value for key, value in environment.items() if key.startswith("PACELINE_")}
    settings = parse(GenerateSettings, ["prompt"], program="test", environment=own)
    assert "-orchestrator.serving.svc." in settings.address
    assert settings.insecure is (name == "empty-values.yaml")
    assert (settings.tls_certificate is not None) is (name == "tls.yaml")


@pytest.mark.parametrize("name", ["demo", "production-with-a-name-for-which-there-is-no-room"])
@pytest.mark.parametrize("own", [{}, {"pools": {"one": {"replicas": 2}, "two": {}}}])
def test_the_certificates_of_the_example_have_the_names_that_are_called(name, own):
    values = values_of("tls.yaml")
    scaling = {"mode": "keda", "pool": "two" if own else ""}
    more = {"target": values["target"] | own, "gateway": {"enabled": True}, "autoscaling": scaling}
    release = install(values | more, release=name)
    certificates = release.of("Certificate")
    names = {each["spec"]["secretName"]: each["spec"].get("dnsNames") for each in certificates}
    assert set(names) == set(values["tls"]["secrets"].values())
    pods = {pod.role: pod for pod in release.pods}
    (scaled,) = release.of("ScaledObject")
    called = [
        pods["test"].environment["PACELINE_ADDRESS"],
        pods["gateway"].flag("orchestrator-tls-server-name"),
        scaled["spec"]["triggers"][0]["metadata"]["scalerAddress"],
    ]
    assert {it.partition(":")[0] for it in called} <= set(names["paceline-orchestrator-tls"])
    services = [
        flag.split("-service=") for flag in pods["orchestrator"].flags if "-service=" in flag
    ]
    assert len(services) == 2 + len(own.get("pools", ["default"]))
    for flag, address in services:
        role = flag.removeprefix("--").replace("peer", "orchestrator")
        assert f"{address.partition(':')[0]}.serving.svc" in names[f"paceline-{role}-tls"]


def test_a_second_release_in_the_namespace_has_certificates_of_its_own():
    values = values_of("tls.yaml")
    other = {"secrets": {role: f"other-{role}" for role in values["tls"]["secrets"]}}
    one, two = (install(it) for it in (values, values | {"tls": values["tls"] | other}))

    def certificates(release):
        return {each["metadata"]["name"] for each in release.of("Certificate")}

    assert len(certificates(one)) == len(certificates(two)) == len(values["tls"]["secrets"])
    assert not certificates(one) & certificates(two)
