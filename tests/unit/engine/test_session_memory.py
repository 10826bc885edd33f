"""Sessions that come and go leave nothing behind: no tokens, no buffers, no bytes."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import aclosing
from typing import TYPE_CHECKING

import psutil
import pytest

from paceline_contract.calls import DraftOptions, VerifyOptions
from paceline_contract.max_gram import MaxGram
from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.stack_backend.stack import StackBackend
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.torch_backend.transformers import TransformersBackend
from support import native_memory
from support.clock import Clock
from support.tiny_adapters import write_adapter
from support.waiting import until
from unit.engine.conftest import call_on, chain, instant, running

if TYPE_CHECKING:
    from paceline_engine.terms.backend import Backend
    from paceline_engine.terms.model_cache import ModelCache

SESSIONS = 64
LIMITS = HostLimits(warm_up_rounds=0, session_limit=100, token_budget=1 << 20)
# What one round's sessions take is several times that; pages come and go in larger pieces.
NOISE_BYTES, RESIDENT_NOISE_BYTES = 400_000, 8_000_000


class Caches:
    """Those that a backend made and that are not gone."""

    def __init__(self, backend: Backend, patch: pytest.MonkeyPatch) -> None:
        self._all: weakref.WeakSet[ModelCache] = weakref.WeakSet()
        self._made_by = backend.new_cache
        patch.setattr(backend, "new_cache", self._make)

    def _make(self, spec: SessionSpec) -> ModelCache:
        cache = self._made_by(spec)
        self._all.add(cache)
        return cache

    @property
    def living(self) -> int:
        return len(self._all)


async def use(
    host: ModelHost, n: int, *, spec: SessionSpec, length: int, leaves_open: bool
) -> None:
    """Open a session; verify, verify again, draft, break off; and close it, or leave that."""
    session = host.open_session(spec).session_id
    prompt = [(n + each) % 300 for each in range(length)]
    options = VerifyOptions(propose=host.description.self_draft_depth > 0)
    first = call_on(session, 1, base=[], append=prompt)
    await host.verify(first, chain([1, 2, 3]), options=options)
    draft = host.draft(call_on(session, 2, base=[], append=prompt), DraftOptions(max_tokens=4))
    async with aclosing(draft) as drafts:
        async for _ in drafts:
            if n % 3 == 0:
                break
    verify = host.verify(call_on(session, 3, base=[], append=[*prompt, n]), chain([4]))
    last = asyncio.create_task(verify, name="last")
    if n % 4 == 1:
        await asyncio.sleep(0)
        last.cancel()
    await asyncio.wait([last])
    if not leaves_open:
        host.close_session(session)


async def a_round(host: ModelHost, clock: Clock, *, length: int) -> None:
    """64 sessions at once; the last ones are not closed, and their lease ends."""
    spec = SessionSpec(length + 10, limit_length=200)
    async with asyncio.TaskGroup() as group:
        for n in range(SESSIONS):
            group.create_task(
                use(host, n, spec=spec, length=length, leaves_open=n > 60), name=f"use {n}"
            )
    clock.now += 2 * spec.lease_seconds
    # It is the next session that finds out.
    host.close_session(host.open_session(spec).session_id)
    statistics = host.statistics()
    assert (statistics.sessions_open, statistics.tokens_reserved) == (0, 0)
    assert (statistics.calls_live, statistics.queue_length) == (0, 0)


async def check_nothing_grows(backend, patch, *, length: int, rounds: int) -> None:
    clock, caches = Clock(), Caches(backend, patch)
    async with running(backend, limits=LIMITS, clock=clock) as host:
        # What is made once, and what the allocator learns, comes in the first rounds.
        for _ in range(max(2, rounds // 10)):
            await a_round(host, clock, length=length)
        before, resident = native_memory.native_bytes(), psutil.Process().memory_info().rss
        for _ in range(rounds):
            await a_round(host, clock, length=length)
        # The thread's last forward holds on to its texts until the next one.
        await host._worker.run(lambda _: None)
        # And it goes on for a moment after a call that was withdrawn has been answered.
        await until(
            lambda: caches.living == 0 and not host._worker._turns._clocks,
            what="nothing is left of the sessions",
            within_seconds=20,
        )
        assert native_memory.native_bytes() - before < NOISE_BYTES
        assert psutil.Process().memory_info().rss - resident < RESIDENT_NOISE_BYTES


@pytest.mark.skipif(not native_memory.KNOWN, reason="glibc's allocator alone can be asked")
@pytest.mark.parametrize(
    "rounds",
    [8, pytest.param(300, marks=pytest.mark.long), pytest.param(1000, marks=pytest.mark.full)],
)
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("no_collector")
async def test_sessions_of_a_simulated_model_leave_nothing(rounds, monkeypatch):
    await check_nothing_grows(instant(), monkeypatch, length=20, rounds=rounds)


def a_model(pair, _) -> Backend:
    return TransformersBackend(str(pair.target))


def a_model_that_drafts_for_itself(pair, directory) -> Backend:
    write_adapter(directory, pair.target, kind="streams", tree=((0,), (1,), (0, 0)), rank=2)
    return TransformersBackend(str(pair.target), adapter=str(directory))


def a_stack(pair, _) -> Backend:
    models = [TransformersBackend(str(each)) for each in (pair.target, pair.drafter)]
    matrix = ((2, 2, 2), (0, 1, 2), (0, 0, 2))
    return StackBackend(models, matrix=matrix, new_max_gram=MaxGram)


@pytest.mark.skipif(not native_memory.KNOWN, reason="glibc's allocator alone can be asked")
@pytest.mark.parametrize("make", [a_model, a_model_that_drafts_for_itself, a_stack])
@pytest.mark.parametrize("rounds", [4, pytest.param(30, marks=pytest.mark.long)])
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("no_collector")
async def test_sessions_of_a_real_model_leave_no_buffers(
    tiny_pair, make, rounds, monkeypatch, tmp_path
):
    backend = make(tiny_pair, tmp_path / "adapter")
    await check_nothing_grows(backend, monkeypatch, length=100, rounds=rounds)
