"""A host: its start, its limits, what it tells of itself, and its end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from paceline.errors import CacheExhaustedError, DrainingError, LoadingError
from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from paceline_engine.terms.backend import DeviceLostError, ModelLoadError, TokenMemory
from paceline_engine.terms.calls import SessionSpec
from unit.engine.asking import ORACLE, SPEC, asked, drafted, entered, held_length, opened, verifying
from unit.engine.conftest import Gate, chain, instant, path, running, until


async def test_before_the_start_everything_says_loading():
    host = ModelHost(instant)
    with pytest.raises(LoadingError):
        host.open_session(SPEC)
    with pytest.raises(LoadingError):
        _ = host.description
    assert not host.ready


async def test_a_model_that_cannot_be_loaded_fails_the_start_and_leaves_no_thread():
    host = ModelHost(lambda: load_backend(LoadOptions(backend="none")))
    before = set(threading.enumerate())
    with pytest.raises(ModelLoadError, match="simulated, transformers"):
        await host.start()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()


class Remembering(SimulatedBackend):
    """An instant simulated model whose tokens take memory."""

    def __init__(self, *, free_bytes: int) -> None:
        super().__init__(SimulatedModel(ttft_seconds=0, tpot_seconds=0))
        self.free_bytes = free_bytes

    def token_memory(self) -> TokenMemory:
        return TokenMemory(free_bytes=self.free_bytes, usable_share=0.5, bytes_per_token=10)


async def test_the_token_budget_is_what_fits_into_the_memory_that_is_left(caplog):
    limits = HostLimits(warm_up_rounds=0, token_budget=1000, fits_memory=True)
    with caplog.at_level("INFO"):
        async with running(Remembering(free_bytes=8019), limits=limits) as host:
            assert host.limits.token_budget == 400
            opened(host, SessionSpec(400))
            with pytest.raises(CacheExhaustedError, match="0 of 400 free"):
                opened(host, SessionSpec(1))
    (told,) = (record for record in caplog.records if record.message == "token budget")
    assert (
        vars(told).items()
        >= {
            "token_budget": 400,
            "free_bytes": 8019,
            "usable_share": 0.5,
            "bytes_per_token": 10,
        }.items()
    )


@pytest.mark.parametrize(
    ("free_bytes", "fits_memory"), [(10**9, True), (8019, False)], ids=["plenty", "overridden"]
)
async def test_a_token_budget_is_never_raised_and_only_lowered_on_request(free_bytes, fits_memory):
    limits = HostLimits(warm_up_rounds=0, token_budget=1000, fits_memory=fits_memory)
    async with running(Remembering(free_bytes=free_bytes), limits=limits) as host:
        assert host.limits.token_budget == 1000
        opened(host, SessionSpec(1000))


async def test_where_tokens_take_no_memory_the_budget_stays():
    limits = HostLimits(warm_up_rounds=0, fits_memory=True)
    async with running(instant(), limits=limits) as host:
        assert host.limits == limits


async def test_a_model_that_leaves_no_memory_is_not_served():
    limits = HostLimits(warm_up_rounds=0, fits_memory=True)
    host = ModelHost(lambda: Remembering(free_bytes=19), limits=limits)
    with pytest.raises(ModelLoadError, match="19 bytes are free, and a token takes 10"):
        await host.start()
    assert not host.ready


async def test_the_start_measures_forwards_and_prefill():
    async with running(instant(), limits=HostLimits(warm_up_rounds=1)) as host:
        found = host.latencies()
        assert [forward.rows for forward in found.forwards] == [1, 2, 4, 8, 16]
        assert host.ready


async def test_a_model_that_hangs_is_noticed_and_forgiven(monkeypatch):
    monkeypatch.setattr("paceline_engine.scheduling.latencies._LEAST_PATIENCE_NS", 1)
    gate = Gate()
    gate.open.set()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        await host.verify(asked(session))
        assert host.overdue_seconds() == 0
        gate.open.clear()
        # The same length as the first, whose time is all that is known.
        call = verifying(group, host, asked(session, 2))
        await until(lambda: host.overdue_seconds() > 0)
        gate.open.set()
        await call
        assert host.overdue_seconds() == 0
        gate.open.clear()
        window = group.create_task(drafted(host, asked(session, 3), max_tokens=2))
        await until(lambda: host.overdue_seconds() > 0)
        gate.open.set()
        await window


async def test_forwards_and_draft_tokens_are_counted():
    async with running(instant()) as host:
        await host.verify(asked(opened(host)), chain([*ORACLE[:2], 0]))
        statistics = host.statistics()
        assert (statistics.forwards, statistics.rows) == (1, 6)
        assert (statistics.judged_tokens, statistics.accepted_tokens) == (3, 2)
        assert (statistics.verify_calls, statistics.draft_calls) == (1, 0)
        await drafted(host, asked(opened(host)), max_tokens=7, chunk_tokens=2)
        statistics = host.statistics()
        assert (statistics.verify_calls, statistics.draft_calls) == (1, 1)
        assert (statistics.draft_tokens, statistics.judged_tokens) == (7, 3)


async def test_a_call_is_told_how_long_it_waited_and_how_long_it_was_computed():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        first = verifying(group, host, asked(opened(host)))
        await entered(gate)
        second = verifying(group, host, asked(opened(host)))
        await until(lambda: host.statistics().queue_length == 1)
        queued_ns = time.monotonic_ns()
        await until(lambda: time.monotonic_ns() > queued_ns)
        least_ns = time.monotonic_ns() - queued_ns
        gate.open.set()
        assert (await first).timing.forward_ns > least_ns
        timing = (await second).timing
        assert timing.queue_ns > least_ns
        assert timing.forward_ns > 0


async def test_a_host_is_settled_when_its_last_session_is_closed():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        sessions = [opened(host), opened(host)]
        call = verifying(group, host, asked(sessions[0]))
        await entered(gate)
        settled = group.create_task(host.settled(), name="settled")
        host.close_session(sessions[1])
        gate.open.set()
        assert (await call).next_token == ORACLE[0]
        assert not settled.done()
        host.close_session(sessions[0])
        await settled
        assert host.statistics().sessions_open == 0


async def test_a_call_that_comes_after_its_session_was_cut_hears_draining():
    async with running(instant()) as host:
        session = opened(host)
        host.end_sessions()
        with pytest.raises(DrainingError):
            await host.verify(asked(session), [])
        with pytest.raises(DrainingError):
            await drafted(host, asked(session, 2), max_tokens=1)


async def test_stopping_interrupts_what_runs_and_refuses_new_calls():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        call = verifying(group, host, asked(session))
        await entered(gate)
        await host.stop()
        assert isinstance(await call, DrainingError)
        assert host.statistics().sessions_open == 0
        with pytest.raises(DrainingError):
            opened(host)
        with pytest.raises(DrainingError):
            await host.verify(asked(session, 2))


async def test_an_error_in_one_call_does_not_harm_another():
    gate = Gate()
    gate.open.set()
    async with running(gate) as host:
        sessions = [opened(host), opened(host)]
        gate.failures.append(ZeroDivisionError("a bug"))
        with pytest.raises(ZeroDivisionError):
            await host.verify(asked(sessions[0]), chain(ORACLE[:2]))
        assert (await host.verify(asked(sessions[1]), chain(ORACLE[:2]))).accepted_path == path(2)
        assert await held_length(host, sessions[0], sequence=2) == 0
        again = await host.verify(asked(sessions[0], 3), chain(ORACLE[:2]))
        assert again.accepted_path == path(2)


async def test_a_lost_device_is_told_and_ends_the_service():
    gate, told = Gate(), []
    gate.open.set()
    gate.failures.append(DeviceLostError("illegal access"))
    async with running(gate, on_device_lost=told.append) as host:
        session = opened(host)
        with pytest.raises(DrainingError):
            await host.verify(asked(session))
        await until(lambda: bool(told))
        assert not host.ready
        with pytest.raises(DrainingError):
            await host.verify(asked(session, 2))
