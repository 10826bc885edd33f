"""SIGTERM under load: what runs is finished, what comes is refused, the exit code is 0."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier, Event

import grpc
import pytest

from paceline import Client
from paceline.errors import DrainingError, TryAgainError
from paceline.v1.orchestrator_service_pb2 import GenerateRequest, GetSystemInfoRequest
from paceline.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from support.connection_relay import ConnectionRelay
from support.on_a_thread import relaying
from support.processes import ServerProcess, running
from support.streams import PROMPT, disturbed, mishaps
from support.system import simulated_system
from support.waiting import eventually

TOKENS, STREAMS, SERVED_STREAMS = 400, 4, 3
LATE_REQUESTS, LATE_SECONDS = 20, 60
DISTURBED_TOKENS = 160  # the server's end comes after five; the more, the more slowness, too
LONG = 1200  # six seconds at least
# A fallback that a server's end causes comes each time. One by slowness does not; or on a machine
# so busy that it does, it comes in peace, too.
ATTEMPTS = 8
BEGUN_WITHIN_SECONDS = 120


@pytest.mark.parametrize("role", ["target", "drafter", "orchestrator"])
def test_running_streams_end_well_and_the_process_too(role, whole, text):
    servers = {
        "target": whole.targets,
        "drafter": whole.drafters,
        "orchestrator": whole.orchestrators,
    }
    victim = servers[role][0]
    for _ in range(ATTEMPTS):
        streams = streams_while(whole, victim.terminate)
        assert [done.token_ids for done in streams] == [text[:DISTURBED_TOKENS]] * STREAMS
        assert victim.wait() == 0
        assert not mishaps(*streams)
        if not any(done.finished.statistics.fallbacks for done in streams):
            return
        whole.mend()
    in_peace = [streams_while(whole, lambda: None) for _ in range(ATTEMPTS)]
    assert any(done.finished.statistics.fallbacks for streams in in_peace for done in streams), (
        f"no attempt of {ATTEMPTS} was without a fallback, and slowness is not why"
    )


def streams_while(whole, action):
    """Decode with DSI several times at once, and do something once all have begun."""
    under_way = Barrier(STREAMS, action=action, timeout=BEGUN_WITHIN_SECONDS)

    def stream(_):
        with whole.client() as client:
            generation = client.generate(
                PROMPT, strategy="distributed", targets=2, lookahead=4, max_tokens=DISTURBED_TOKENS
            )
            return disturbed(generation, under_way.wait, after=5)

    with ThreadPoolExecutor(STREAMS) as threads:
        return list(threads.map(stream, range(STREAMS)))


def test_a_draining_orchestrator_refuses_what_comes(whole, text):
    orchestrator = whole.orchestrators[0]
    with whole.client() as client, whole.client() as other:
        running = client.generate(PROMPT, strategy="autoregressive", max_tokens=TOKENS)
        client.info()
        drained_before = orchestrator.log.count("draining")

        def come_late():
            orchestrator.terminate()
            eventually(
                lambda: orchestrator.log.count("draining") > drained_before, what="it drains"
            )
            with pytest.raises(TryAgainError):
                other.generate(PROMPT, max_tokens=4, timeout=LATE_SECONDS).collect()

        done = disturbed(running, come_late, after=5)
    assert done.token_ids == text
    assert orchestrator.wait() == 0


def test_while_an_orchestrator_drains_its_clients_find_another_and_no_request_fails(text):
    """The relay stands for a Service: new connections lead to those that it still lists."""
    with simulated_system(orchestrator_count=2, target_count=2).running() as system:
        leaving, staying = system.orchestrators
        service = ConnectionRelay(leaving.address)
        with (
            relaying(service),
            Client(service.address) as client,
            grpc.insecure_channel(service.address) as plain,
        ):
            stub = OrchestratorServiceStub(plain)
            stub.GetSystemInfo(GetSystemInfoRequest(), timeout=60)  # so that it is connected
            under_way, drained = Barrier(SERVED_STREAMS + 1, timeout=BEGUN_WITHIN_SECONDS), Event()

            def stream(_):
                options = {"strategy": "autoregressive", "max_tokens": LONG}
                with client.generate(PROMPT, **options) as generation:
                    return disturbed(
                        generation, lambda: (under_way.wait(), drained.wait(60)), after=5
                    )

            with ThreadPoolExecutor(SERVED_STREAMS) as threads:
                streams = [threads.submit(stream, index) for index in range(SERVED_STREAMS)]
                under_way.wait()
                service.upstream = staying.address
                leaving.terminate()
                eventually(lambda: "draining" in leaving.log, what="it drains")
                late = [
                    client.generate(PROMPT, max_tokens=4).collect() for _ in range(LATE_REQUESTS)
                ]
                # Without our client's help: a connection is sent away while its streams go on.
                eventually(
                    partial(_generates, stub), what="another client finds another orchestrator, too"
                )
                drained.set()
            assert [done.token_ids for done in late] == [text[:4]] * LATE_REQUESTS
            received = {it.result().token_ids for it in streams}
            assert {len(it) for it in received} == {LONG}
            assert {it[: len(text)] for it in received} == {text}
            assert len(received) == 1
        assert leaving.wait() == 0


def _generates(stub):
    try:
        list(stub.Generate(GenerateRequest(text=PROMPT, max_tokens=1), timeout=60))
    except grpc.RpcError:
        return False
    return True


def test_a_stream_that_is_cut_at_the_end_of_a_drain_says_why(system, text):
    flags = [f"--targets={system.targets[0].address}", "--drain-seconds=0.2"]
    hasty = ServerProcess("orchestrator", *flags, name="hasty")
    with running(hasty), Client(hasty.address) as client:
        generation = client.generate(PROMPT, strategy="autoregressive", max_tokens=LONG)
        with pytest.raises(DrainingError):
            disturbed(generation, hasty.terminate, after=5)
        assert hasty.wait() == 0
    with system.client() as client, client.resume(generation) as resumed:
        for _ in resumed:
            received = [it for chunk in resumed.transcript.chunks for it in chunk.token_ids]
            if len(received) >= TOKENS:
                break
    assert tuple(received[:TOKENS]) == text
