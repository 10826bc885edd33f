"""A cancel reaches a real model in the middle of a forward, and its session stays usable."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from paceline.errors import SupersededError
from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.model_servers import TARGET, ModelClient, serving
from support.oracle import Oracle, Sampling
from support.waiting import until

PROMPT = [5, 6, 7, 8, 9, 10]
STOPPED_AT = 1  # the layer, of four, in which a forward is caught


class Gate:
    """Holds forwards in a layer, once it is shut, until it is opened."""

    def __init__(self, layer):
        layer.register_forward_pre_hook(self._pass)
        self.reached = threading.Event()
        self._open = threading.Event()
        self._open.set()

    def shut(self):
        self.reached.clear()
        self._open.clear()

    def open(self):
        self._open.set()

    def _pass(self, *_):
        self.reached.set()
        assert self._open.wait(30)


@asynccontextmanager
async def gated_target(directory):
    """Serve a model; yield its client, its host, and the gate in one of its layers."""
    backend = TransformersBackend(str(directory))
    gate = Gate(backend.decoder.layers[STOPPED_AT])
    host = ModelHost(lambda: backend, limits=HostLimits(warm_up_rounds=0))
    async with serving(TARGET, host) as process:
        client = await ModelClient(TARGET, process.addresses["address"]).learn()
        try:
            yield client, host, gate
        finally:
            gate.open()
            await client.channel.close()


@pytest.mark.parametrize("ending", ["cancelled", "superseded"])
async def test_a_cancelled_forward_stops_between_layers_and_the_next_answer_is_right(
    ending, tiny_pair
):
    oracle = list(Oracle(tiny_pair.target).decode(PROMPT, Sampling(), 3))
    async with gated_target(tiny_pair.target) as (client, host, gate):
        layer_count = host.description.layer_count
        session_id = await client.open()
        first = await client.verify(client.call(session_id, 1, new=PROMPT))
        assert first.next_token_id == oracle[0]
        before = host.statistics()

        gate.shut()
        wrong = client.call(session_id, 2, held=PROMPT, new=[11, 12, 13, 14])
        doomed = asyncio.create_task(client.verify(wrong))
        await asyncio.to_thread(gate.reached.wait, 30)
        if ending == "cancelled":
            doomed.cancel()
            await until(
                lambda: host.statistics().calls_cancelled == 1,
                what="the cancel arrives",
            )
        right = client.call(session_id, 3, held=PROMPT, new=oracle[:1])
        next_answer = asyncio.create_task(client.verify(right, oracle[1:2]))
        await until(lambda: host.statistics().verify_calls == 3, what="the next call is there")
        gate.open()

        answer = await next_answer
        assert (answer.accepted_path, answer.next_token_id) == ([0], oracle[2])
        assert answer.held_length == len(PROMPT) + 2
        with pytest.raises(asyncio.CancelledError if ending == "cancelled" else SupersededError):
            await doomed
        after = host.statistics()
        assert after.forwards_interrupted == before.forwards_interrupted + 1
        assert after.forwards == before.forwards + 1, "the interrupted forward counts as one"
        ran = after.layers_run - before.layers_run - layer_count
        assert STOPPED_AT < ran < layer_count
        assert getattr(after, f"calls_{ending}") == 1
        await client.close(session_id)
        assert host.statistics().sessions_open == 0


async def test_a_cancelled_call_in_the_queue_never_runs(tiny_pair):
    async with gated_target(tiny_pair.target) as (client, host, gate):
        running_session, waiting_session = await client.open(), await client.open()
        gate.shut()
        running = asyncio.create_task(client.verify(client.call(running_session, 1, new=PROMPT)))
        await asyncio.to_thread(gate.reached.wait, 30)
        waiting = asyncio.create_task(client.verify(client.call(waiting_session, 1, new=PROMPT)))
        await until(lambda: host.statistics().queue_length == 1, what="the call waits")
        waiting.cancel()
        await until(lambda: host.statistics().calls_cancelled == 1, what="the cancel arrives")
        assert host.statistics().queue_length == 0
        gate.open()
        await running
        statistics = host.statistics()
        assert (statistics.forwards, statistics.layers_run) == (1, host.description.layer_count)
