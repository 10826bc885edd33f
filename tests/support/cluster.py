"""What a cluster does with a rendered release, with processes for pods.

A pod is its server's process: the rendered command, arguments and environment, at a loopback
address of its own. The kubelet's part is done here too: fields and `$(VARIABLES)` are filled in,
probes decide what is ready, a pod that goes is taken from its Service first, then sleeps, then gets
SIGTERM and its grace. A fake API server tells orchestrators what is behind a Service.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support import fake_kubernetes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from support.fake_kubernetes import FakeKubernetes
    from support.manifests import Pod, Release

# Values with which every pod listens at its own address, as in a cluster.
POD_ADDRESS = {
    "listenHost": "$(POD_IP)",
    "common": {
        "extraEnv": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    },
}
_BIN = Path(sys.executable).parent
_READY_SECONDS = 120.0
# Probes are a contract of what and not of when: asking more often than every 2 s tests the same.
_PROBE_SECONDS = 0.05


class RunningPod:
    """A pod of a Deployment, as one process.

    Attributes:
        name: Unique in its cluster.
        host: Its address.
        exit_code: None while it runs.
        stopped_in_time: Whether SIGTERM was enough, within the grace period.
    """

    def __init__(self, pod: Pod, *, name: str, host: str, kubeconfig: Path) -> None:
        self.name = name
        self.host = host
        self.exit_code: int | None = None
        self.stopped_in_time = False
        self._pod = pod
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the pod
        environment = {key: self._filled_in(value) for key, value in self._variables().items()}
        command = [*pod.server["command"], *pod.server["args"]]
        self._process = subprocess.Popen(
            [_expanded(word, environment) for word in command],
            env={
                "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
                "HOME": tempfile.gettempdir(),
                # Stands in for the service account that the kubelet mounts.
                **({"KUBECONFIG": str(kubeconfig)} if self._has_token else {}),
                **{key: value for key, value in os.environ.items() if key.startswith("TEST_RUN")},
                **environment,
            },
            stdout=self._log,
            stderr=self._log,
        )

    @property
    def _has_token(self) -> bool:
        return bool(self._pod.spec["automountServiceAccountToken"])

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def address(self, port: str) -> str:
        """Return where a named port is."""
        (number,) = (
            each["containerPort"] for each in self._pod.server["ports"] if each["name"] == port
        )
        return f"{self.host}:{number}"

    def wait_until_ready(self) -> None:
        """Wait until the start-up probe and then the others succeed."""
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            ends = time.monotonic() + _READY_SECONDS
            while not self._passes(kind):
                assert self._process.poll() is None, f"{self.name} ended:\n{self.log}"
                assert time.monotonic() < ends, f"{self.name} fails its {kind}:\n{self.log}"
                time.sleep(_PROBE_SECONDS)

    def metric(self, name: str) -> float:
        """Add up a metric's samples; 0 where there is none."""
        with urllib.request.urlopen(
            f"http://{self.address('metrics')}/metrics", timeout=60
        ) as answer:
            page = answer.read().decode()
        return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)))

    def terminate(self) -> None:
        """Do what the kubelet does with a pod that is deleted, to its end."""
        sleep = self._pod.server.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        time.sleep(sleep.get("seconds", 0))
        grace = self._pod.spec["terminationGracePeriodSeconds"] - sleep.get("seconds", 0)
        self._process.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self._process.wait(grace)
            self.stopped_in_time = True
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
        self.exit_code = self._process.wait()

    def _passes(self, kind: str) -> bool:
        probe = self._pod.server[kind]
        request = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
        with grpc.insecure_channel(f"{self.host}:{probe['grpc']['port']}") as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    request, timeout=probe["timeoutSeconds"]
                )
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _variables(self) -> Mapping[str, Mapping[str, object]]:
        return {each["name"]: each for each in self._pod.server.get("env", ())}

    def _filled_in(self, variable: Mapping[str, object]) -> str:
        if "value" in variable:
            return str(variable["value"])
        assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        return self.host


class Cluster:
    """Runs a release's Deployments. A context manager: at its end no pod is left.

    Args:
        api: Where orchestrators ask for endpoints.
        kubeconfig: How they reach it.
    """

    def __init__(self, api: FakeKubernetes, *, kubeconfig: Path) -> None:
        self._api = api
        self._kubeconfig = kubeconfig
        self._numbers = itertools.count(1)
        self._pods: dict[str, list[RunningPod]] = {}
        self._published: dict[str, dict[str, fake_kubernetes.Pod]] = {}
        self._lock = threading.Lock()
        # 127.0.0.0/8 has room for every test run of this machine.
        self._network = f"127.{1 + os.getpid() // 256 % 254}.{os.getpid() % 256}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for pod in itertools.chain.from_iterable(self._pods.values()):
            pod.kill()

    def pods(self, deployment: str) -> list[RunningPod]:
        """Return a Deployment's running pods, the oldest first."""
        return list(self._pods.get(deployment, ()))

    def apply(self, release: Release) -> list[RunningPod]:
        """Start and stop pods until there are as many as a release says; return those stopped.

        Pods are started all at once, and each is published when its probes say so; then what is
        too much is stopped, all at once.
        """
        started, stopped = [], []
        for deployment in release.of("Deployment"):
            name, wanted = deployment["metadata"]["name"], deployment["spec"]["replicas"]
            running = self._pods.setdefault(name, [])
            for _ in range(wanted - len(running)):
                running.append(self._start(release.pod(name), name))
                started.append((name, running[-1]))
            for pod in running[wanted:]:
                running.remove(pod)
                stopped.append((name, pod))
        _at_once(self._publish_when_ready, started)
        _at_once(self._stop, stopped)
        return [pod for _, pod in stopped]

    def _start(self, pod: Pod, deployment: str) -> RunningPod:
        number = next(self._numbers)
        return RunningPod(
            pod,
            name=f"{deployment}-{number}",
            host=f"{self._network}.{number}",
            kubeconfig=self._kubeconfig,
        )

    def _publish_when_ready(self, deployment: str, pod: RunningPod) -> None:
        pod.wait_until_ready()
        host, _, port = pod.address("grpc").rpartition(":")
        self._publish(deployment, **{pod.name: fake_kubernetes.Pod(pod.name, host, int(port))})

    def _stop(self, deployment: str, pod: RunningPod) -> None:
        known = self._published[deployment][pod.name]
        self._publish(deployment, **{pod.name: replace(known, terminating=True)})
        pod.terminate()
        self._publish(deployment, **{pod.name: None})

    def _publish(self, deployment: str, **changes: fake_kubernetes.Pod | None) -> None:
        """Tell the API server what changed; a Deployment and its Service have one name."""
        with self._lock:
            known = self._published.get(deployment, {}) | changes
            self._published[deployment] = {name: each for name, each in known.items() if each}
            self._api.publish(deployment, list(self._published[deployment].values()))


def _at_once(
    action: Callable[[str, RunningPod], None], each: Sequence[tuple[str, RunningPod]]
) -> None:
    """Run an action for all pods in parallel, and raise what one of them raised."""
    failures: list[BaseException] = []

    def act(deployment: str, pod: RunningPod) -> None:
        try:
            action(deployment, pod)
        except BaseException as error:  # noqa: BLE001 - raised below, on the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=act, args=arguments) for arguments in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """Fill in `$(NAME)`, as the kubelet does with commands and arguments."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], text)
