"""One target, three, one again, while streams run: real processes, found as pods in a cluster."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event

import pytest

from paceline import Client
from support.fake_kubernetes import FakeKubernetes, Pod
from support.processes import ServerProcess, running
from support.streams import PROMPT, mishaps
from support.system import simulated_model
from support.waiting import eventually

STREAMS = 4
# More than any stream comes to: each is left when the test has seen what it waits for.
ENDLESS = 3500


class Cluster:
    """Model servers as pods of two Services, and an orchestrator that watches them."""

    def __init__(self, api):
        self.api = api
        self.drafter = simulated_model("drafter", seconds=0.001, simulated_acceptance_rate=0.8)
        self.targets = [simulated_model("target", index, seconds=0.008) for index in range(3)]
        self.orchestrator = ServerProcess(
            "orchestrator",
            "--discovery=kubernetes",
            "--target-service=targets",
            "--drafter-service=drafters",
            "--insecure",  # pods are not on this machine, as far as it knows
        )
        self.pods = {
            server: Pod(server.name, "127.0.0.1", int(server.address.rpartition(":")[2]))
            for server in (self.drafter, *self.targets)
        }

    def publish(self, *servers, **state):
        """Say of servers that they are pods, and in which state; each has a slice of its own."""
        for server in servers:
            pod = self.pods[server]
            for name, value in state.items():
                setattr(pod, name, value)
            self.api.publish(f"{server.role}s", [pod], name=pod.name)

    def remove(self, *servers):
        for server in servers:
            self.api.delete(self.pods[server].name)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with ExitStack() as stack:
        api = stack.enter_context(FakeKubernetes())
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "kubeconfig")))
        cluster = Cluster(api)
        cluster.publish(cluster.drafter, cluster.targets[0])
        stack.enter_context(running(cluster.drafter, *cluster.targets, cluster.orchestrator))
        yield cluster


def test_one_target_three_and_one_again_while_streams_run(cluster):
    first, *others = cluster.targets
    under_way, enough = set(), Event()

    def stream(number):
        token_ids = []
        with (
            Client(cluster.orchestrator.address) as client,
            client.generate(
                PROMPT, strategy="distributed", max_tokens=ENDLESS, timeout=300
            ) as chunks,
        ):
            for chunk in chunks:
                token_ids += chunk.token_ids
                under_way.add(number)
                if enough.is_set():
                    return token_ids
        raise AssertionError("a stream came to its end")

    with ThreadPoolExecutor(STREAMS) as threads:
        streams = [threads.submit(stream, number) for number in range(STREAMS)]
        try:
            eventually(lambda: len(under_way) == STREAMS, what="the streams run")
            cluster.publish(*others)
            for target in others:
                eventually(lambda it=target: answered(it) > 5, what=f"{target} verifies")
            cluster.publish(*others, terminating=True)
            for target in others:
                eventually(
                    lambda it=target: not it.metric("paceline_sessions_active"),
                    what=f"the sessions have left {target}",
                )
                target.terminate()
            assert [target.wait() for target in others] == [0, 0]
            cluster.remove(*others)
            before = answered(first)
            eventually(lambda: answered(first) > before + 20, what="the streams go on")
            assert not any(it.done() for it in streams)
        finally:
            enough.set()
        received = [it.result() for it in streams]

    with Client(cluster.orchestrator.address) as client:
        longest = max(map(len, received))
        plain = client.generate(
            PROMPT, strategy="autoregressive", max_tokens=longest, timeout=300
        ).collect()
    assert not mishaps(plain)
    for token_ids in received:
        assert token_ids == list(plain.token_ids[: len(token_ids)])
    # Not target_lost: a busy machine may miss a ping. ../contract/test_live_scaling.py has that.
    for kind in ("session_lost", "session_refused"):
        assert not cluster.orchestrator.metric("paceline_fallbacks_total", kind=kind)


def answered(target):
    """Return how many calls have had a part in a target's forwards, by its own counting."""
    return target.metric("paceline_forward_calls_total", role="target")
