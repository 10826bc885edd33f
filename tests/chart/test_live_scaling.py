"""The release with real processes, as rendered: scaled, drained and stopped while streams run."""

import sys
import threading
from contextlib import contextmanager
from functools import partial

import pytest

from paceline import Client, Strategy
from support.cluster import POD_ADDRESS, Cluster
from support.fake_kubernetes import FakeKubernetes
from support.manifests import install
from support.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs the whole of 127.0.0.0/8")

PROMPTS = [f"def function_{number}(" for number in range(8)]
STRATEGIES = [Strategy.DISTRIBUTED, Strategy.AUTO, Strategy.DISTRIBUTED, Strategy.SPECULATIVE] * 2
MAX_TOKENS = 48
TARGETS, DRAFTERS, ORCHESTRATORS = (
    "demo-target-default",
    "demo-drafter-default",
    "demo-orchestrator",
)


def release(*, targets, drafters=1):
    simulated = {"backend": "simulated", "simulated_ttft_seconds": 0.005}
    return install(
        {
            **POD_ADDRESS,
            "common": {**POD_ADDRESS["common"], "preStopSleepSeconds": 1},
            "orchestrator": {"replicas": 1},
            "target": {
                "replicas": targets,
                "settings": {**simulated, "simulated_tpot_seconds": 0.005},
            },
            "drafter": {
                "replicas": drafters,
                "settings": {**simulated, "simulated_tpot_seconds": 0.001},
            },
        }
    )


class Stream:
    """Decodes one prompt again and again, and compares each text with plain decoding's.

    Attributes:
        expected: The tokens of plain decoding.
        count: Completions so far.
        failures: What was raised, or differed.
    """

    def __init__(self, client, prompt, strategy):
        self._client = client
        self._options = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.0}
        self._prompt = prompt
        self._strategy = strategy
        self.expected = self._decode(Strategy.AUTOREGRESSIVE)
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.count = 0
        self.failures = []

    def start(self):
        self._thread.start()

    def end(self):
        """Let the last one come to its end."""
        self._enough.set()

    def join(self):
        self._thread.join()

    def _run(self):
        while not self._enough.is_set() and not self.failures:
            try:
                found = self._decode(self._strategy)
                if found != self.expected:
                    self.failures.append((self._strategy, found, self.expected))
                self.count += 1
            except Exception as error:  # noqa: BLE001 - whatever it is, the stream failed
                self.failures.append(error)

    def _decode(self, strategy):
        stream = self._client.generate(self._prompt, strategy=strategy, **self._options)
        return tuple(stream.collect().token_ids)


@contextmanager
def streams(cluster):
    (orchestrator,) = cluster.pods(ORCHESTRATORS)
    with Client(orchestrator.address("grpc"), insecure=True) as client:
        running = [Stream(client, *each) for each in zip(PROMPTS, STRATEGIES, strict=True)]
        assert len({stream.expected for stream in running}) == len(PROMPTS)
        for stream in running:
            stream.start()
        try:
            yield running
        finally:
            for stream in running:
                stream.end()
            for stream in running:
                stream.join()


def failures(running):
    return [failure for stream in running for failure in stream.failures]


def all_go_on(running):
    """Wait until every stream that runs now has ended, and another one after it."""
    before = [stream.count for stream in running]

    def has_gone_on():
        assert failures(running) == []
        return all(stream.count > old + 1 for stream, old in zip(running, before, strict=True))

    eventually(has_gone_on, what="every stream goes on", within_seconds=120)


def used(pod):
    forwards = partial(pod.metric, "paceline_forwards_total")
    eventually(forwards, what=f"{pod.name} is used", within_seconds=120)


def idle(pod):
    def has_no_session():
        return pod.metric("paceline_sessions_active") == 0

    eventually(has_no_session, what=f"{pod.name} has no session", within_seconds=60)


@pytest.fixture
def cluster(tmp_path):
    with (
        FakeKubernetes(namespace="serving") as api,
        Cluster(api, kubeconfig=api.kubeconfig(tmp_path / "kubeconfig")) as running,
    ):
        yield running


def test_from_one_target_to_seven_and_to_two_no_stream_notices(cluster):
    cluster.apply(release(targets=1))
    with streams(cluster) as running:
        all_go_on(running)
        cluster.apply(release(targets=7))
        for pod in cluster.pods(TARGETS):
            used(pod)
        all_go_on(running)
        stopped = cluster.apply(release(targets=2))
        all_go_on(running)
    assert failures(running) == []
    assert [(pod.stopped_in_time, pod.exit_code) for pod in stopped] == [(True, 0)] * 5
    for pod in cluster.pods(TARGETS):
        idle(pod)


def test_a_drafter_and_an_orchestrator_that_go_cut_no_stream(cluster):
    cluster.apply(release(targets=2))
    with streams(cluster) as running:
        all_go_on(running)
        (drafter,) = cluster.apply(release(targets=2, drafters=0))
        all_go_on(running)
        (orchestrator,) = cluster.pods(ORCHESTRATORS)
        for stream in running:
            stream.end()
        orchestrator.terminate()
    assert failures(running) == []
    for pod in (drafter, orchestrator):
        assert (pod.stopped_in_time, pod.exit_code) == (True, 0)
