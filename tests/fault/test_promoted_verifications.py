"""A verification that waits in a queue while it comes closer to the front moves up in the queue."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from paceline.v1.target_service_pb2 import VerifyRequest
from paceline_contract.calls import CallTiming
from paceline_orchestrator.fleet.latency import ObservedLatency
from support.gated import Gate, gated_host
from support.in_process import in_process_system
from support.model_servers import TARGET, ModelClient
from support.streams import PROMPT
from support.waiting import until

TOKENS = 16
HOUR_NS = 3_600_000_000_000


def crowded():
    """Return the measurements of a server whose queue takes an hour, and does so for ever."""
    meter = ObservedLatency(clock=lambda: 0.0)
    timing = CallTiming(queue_ns=8 * HOUR_NS, forward_ns=1_000_000, forward_count=1, row_count=1)
    meter.observe(timing, elapsed_ns=8 * HOUR_NS)
    return meter


@asynccontextmanager
async def occupied(address):
    """Keep a target busy with a foreign call; wait for its answer in the end."""
    client = await ModelClient(TARGET, address).learn()
    session = await client.open()
    request = VerifyRequest(call=client.call(session, 1, new=(1, 2, 3)))
    call = client.stub.Verify(request, timeout=120)
    yield
    await call
    await client.close(session)
    await client.channel.close()


async def test_a_queued_verification_whose_depth_falls_is_sent_again_and_adopted():
    drafting, front, back = Gate(), Gate(), Gate()
    targets = [gated_host(front), gated_host(back)]
    async with in_process_system(drafters=[gated_host(drafting)], targets=targets) as system:
        # So the request's primary target is the other one, and what waits here is worth moving up.
        system.server("target-1").latency = crowded()
        async with occupied(system.server("target-1").endpoint.address):
            await until(lambda: targets[1].statistics().forwards_running, what="it is busy")
            generation = system.client.generate(
                PROMPT, max_tokens=TOKENS, strategy="distributed", lookahead=1, targets=2
            )
            running = asyncio.create_task(generation.collect())
            await until(lambda: targets[0].statistics().forwards_running, what="depth 0 runs")
            drafting.open()
            await until(lambda: targets[1].statistics().queue_length, what="depth 1 waits")
            front.let_pass(1)
            await until(lambda: targets[1].statistics().calls_adopted, what="it moved up")
            front.open()
            back.open()
        done = await running
        plain = system.client.generate(PROMPT, max_tokens=TOKENS, strategy="autoregressive")
        assert done.token_ids == (await plain.collect()).token_ids
        assert len(done.token_ids) == TOKENS
        await system.settled()
