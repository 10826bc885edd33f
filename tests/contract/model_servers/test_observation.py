"""What can be seen from outside: metrics, and the last calls."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from paceline.errors import PacelineError, SupersededError
from paceline.v1 import target_service_pb2
from paceline_engine.sessions.host import HostLimits, HostStatistics, ModelHost
from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from support.model_servers import DRAFTER, TARGET, ModelClient, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

from support.model_contract import NEVER_SECONDS, PROMPT, a_host, is_running, until


@asynccontextmanager
async def observed(role: Any, host: Any) -> AsyncIterator[tuple[ModelClient, Callable[..., Any]]]:
    async with serving(role, host, metrics_listen="127.0.0.1:0") as process:
        client = await ModelClient(role, process.addresses["address"]).learn()

        def page(path: str) -> str:
            url = f"http://{process.addresses['metrics_address']}{path}"
            with urllib.request.urlopen(url, timeout=60) as answer:
                text: str = answer.read().decode()
                return text

        try:
            yield client, lambda path: asyncio.to_thread(page, path)
        finally:
            await client.channel.close()


async def test_what_a_target_did_with_its_calls_can_be_seen():
    host = a_host(stalls=True)
    async with observed(TARGET, host) as (target, page):
        session = await target.open()
        first = await target.verify(target.call(session, 1, new=PROMPT), [1, 2])
        superseded = asyncio.create_task(
            target.error_of(target.verify(target.call(session, 2, held=PROMPT, new=(1,))))
        )
        await until(lambda: is_running(host))
        cancelled = target.stub.Verify(
            target_service_pb2.VerifyRequest(
                call=target.call(session, 3, held=PROMPT, new=(2,)), speculation_depth=4
            ),
            timeout=60,
        )
        assert isinstance(await superseded, SupersededError)
        await until(lambda: is_running(host))
        cancelled.cancel()
        await until(lambda: host.statistics().calls_cancelled == 1)
        with pytest.raises(PacelineError):
            await target.verify(target.call(session, 3, new=PROMPT))

        calls = json.loads(await page("/debug/calls"))
        assert [call["outcome"] for call in calls] == ["ok", "superseded", "cancelled", "failed"]
        assert [call["sequence"] for call in calls] == [1, 2, 3, 3]
        assert calls[0]["accepted"] == len(first.accepted_path)
        assert calls[0]["rows"] == 6
        assert calls[2]["depth"] == 4
        assert len({call["session"] for call in calls}) == 1
        rejected = 2 - len(first.accepted_path)
        metrics = await page("/metrics")
        for line in (
            'paceline_sessions_active{role="target"} 1.0',
            'paceline_cancelled_rpcs_total{reason="client_cancel"} 1.0',
            'paceline_cancelled_rpcs_total{reason="superseded"} 1.0',
            'paceline_forward_seconds_count{phase="prefill",role="target"} 1.0',
            'paceline_wasted_tokens_total{reason="superseded",role="target"} 1.0',
            f'paceline_wasted_tokens_total{{reason="rejected",role="target"}} {rejected:.1f}',
        ):
            assert line in metrics


async def test_accepted_tokens_are_counted_by_position():
    async with observed(TARGET, a_host()) as (target, page):
        session = await target.open()
        first = await target.verify(target.call(session, 1, new=PROMPT))
        block = [first.next_token_id, 0, 0]
        second = await target.verify(target.call(session, 2, held=PROMPT), block)
        assert second.accepted_path == [0]
        metrics = await page("/metrics")
        name = "paceline_spec_decode_num_accepted_tokens_per_pos_total"
        assert f'{name}{{position="0",role="target"}} 1.0' in metrics
        assert f'{name}{{position="1",role="target"}}' not in metrics
        assert 'paceline_wasted_tokens_total{reason="rejected",role="target"} 2.0' in metrics


async def test_what_becomes_of_a_targets_own_guesses_is_counted():
    host = a_host()
    async with observed(TARGET, host) as (_, page):
        counts = HostStatistics(
            guesses_proposed=9, guesses_judged=7, guesses_pruned=3, guesses_accepted=2
        )
        host.statistics = lambda: counts
        metrics = await page("/metrics")
        for what, count in (("proposed", 9), ("judged", 7), ("pruned", 3), ("accepted", 2)):
            line = f'paceline_self_draft_num_{what}_tokens_total{{role="target"}} {count:.1f}'
            assert line in metrics


async def test_sessions_whose_lease_ran_out_are_counted_as_evicted():
    host = a_host()
    async with observed(TARGET, host) as (_, page):
        evicted = 'paceline_sessions_evicted_total{reason="lease",role="target"}'
        assert f"{evicted} 0.0" in await page("/metrics")
        host.statistics = lambda: HostStatistics(sessions_expired=2)
        assert f"{evicted} 2.0" in await page("/metrics")


async def test_a_call_whose_work_the_same_call_took_over_wasted_nothing():
    model = SimulatedModel(ttft_seconds=NEVER_SECONDS, tpot_seconds=0)
    host = ModelHost(lambda: SimulatedBackend(model), limits=HostLimits(warm_up_rounds=0))
    async with observed(TARGET, host) as (target, page):
        session = await target.open()

        def verify(sequence: int) -> Any:
            call = target.call(session, sequence, new=PROMPT)
            return target.stub.Verify(target_service_pb2.VerifyRequest(call=call), timeout=60)

        older = verify(1)
        await until(lambda: is_running(host))
        newer = verify(2)
        await until(lambda: host.statistics().calls_adopted == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await older
        assert caught.value.code() is grpc.StatusCode.ABORTED
        wasted = 'paceline_wasted_tokens_total{reason="%s",role="target"} 4.0'
        assert wasted % "superseded" not in await page("/metrics")
        newer.cancel()
        await until(lambda: host.statistics().calls_cancelled == 1)
        assert wasted % "cancelled" in await page("/metrics")


async def test_what_a_drafter_did_with_its_calls_can_be_seen():
    async with observed(DRAFTER, a_host()) as (drafter, page):
        session = await drafter.open()
        await drafter.draft(drafter.call(session, 1, new=PROMPT), 5)
        (call,) = json.loads(await page("/debug/calls"))
        assert (call["method"], call["outcome"], call["rows"]) == ("Draft", "ok", 5)
        metrics = await page("/metrics")
        assert 'paceline_forward_seconds_count{phase="prefill",role="drafter"} 1.0' in metrics
        assert 'paceline_forward_seconds_count{phase="draft",role="drafter"} 4.0' in metrics
