"""Which call of a session counts, and what becomes of one that is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.errors import (
    ModelMismatchError,
    PrefixMismatchError,
    PrefixNotHeldError,
    SessionNotFoundError,
    StaleCallError,
    SupersededError,
)
from paceline.v1 import drafter_service_pb2, target_service_pb2
from support.model_contract import PROMPT, a_host, connected, is_running, until
from support.model_servers import DRAFTER, TARGET


async def test_a_sequence_that_is_not_higher_is_stale(target):
    session = await target.open()
    await target.verify(target.call(session, 5, new=PROMPT))
    for sequence in (4, 5):
        error = await target.error_of(target.verify(target.call(session, sequence, new=PROMPT)))
        assert isinstance(error, StaleCallError)


async def test_a_base_that_is_not_held_is_refused_with_what_is(target):
    session = await target.open()
    await target.verify(target.call(session, 1, new=PROMPT))
    error = await target.error_of(target.verify(target.call(session, 2, held=(*PROMPT, 1))))
    assert isinstance(error, PrefixNotHeldError)
    assert error.metadata["held_length"] == "4"


async def test_other_tokens_than_the_digest_says_are_refused(target):
    session = await target.open()
    await target.verify(target.call(session, 1, new=PROMPT))
    error = await target.error_of(
        target.verify(target.call(session, 2, held=(5, 6, 7, 9), new=(1,)))
    )
    assert isinstance(error, PrefixMismatchError)
    answer = await target.verify(target.call(session, 3, new=PROMPT))
    assert answer.prefix_length == 4


async def test_a_call_that_is_refused_for_its_base_was_the_sessions_newest(target):
    session = await target.open()
    await target.verify(target.call(session, 1, new=PROMPT))
    for sequence, base in ((2, (*PROMPT, 1)), (3, (5, 6, 9))):
        error = await target.error_of(target.verify(target.call(session, sequence, held=base)))
        assert isinstance(error, PrefixNotHeldError | PrefixMismatchError)
        again = target.call(session, sequence, new=PROMPT)
        assert isinstance(await target.error_of(target.verify(again)), StaleCallError)
    # Of what it held, it kept the length of the base.
    error = await target.error_of(target.verify(target.call(session, 4, held=PROMPT)))
    assert isinstance(error, PrefixNotHeldError)
    assert error.metadata["held_length"] == "3"


async def test_a_newer_call_supersedes_a_running_one(stalling_target):
    target = stalling_target
    session = await target.open()
    await target.verify(target.call(session, 1, new=PROMPT))
    async with asyncio.TaskGroup() as group:
        older = group.create_task(
            target.error_of(target.verify(target.call(session, 2, held=PROMPT, new=(1,))))
        )
        newer = group.create_task(
            target.error_of(target.verify(target.call(session, 3, held=PROMPT, new=(2,))))
        )
        assert isinstance(await older, SupersededError | StaleCallError)
        await target.close(session)
        assert isinstance(await newer, SupersededError | SessionNotFoundError)


async def test_another_model_is_refused_by_every_call_of_a_target(target):
    call = target.call(await target.open(), 1, new=PROMPT)
    call.expected_model_fingerprint = "another"
    assert isinstance(await target.error_of(target.verify(call)), ModelMismatchError)
    opening = target.open(expected_model_fingerprint="another")
    assert isinstance(await target.error_of(opening), ModelMismatchError)


async def test_another_model_is_refused_by_a_drafter(drafter):
    call = drafter.call(await drafter.open(), 1, new=PROMPT)
    call.expected_model_fingerprint = "another"
    assert isinstance(await drafter.error_of(drafter.draft(call, 1)), ModelMismatchError)


@pytest.mark.parametrize("how", ["call.cancel", "task.cancel", "deadline"])
async def test_a_cancelled_verification_reaches_the_host(how):
    host = a_host(stalls=True)
    async with connected(TARGET, host) as target:
        session = await target.open()
        await target.verify(target.call(session, 1, new=PROMPT))
        # On a busy machine a short deadline may be over before the call has come.
        deadlines = (0.05, 0.5, 5.0) if how == "deadline" else (60.0,)
        for sequence, seconds in enumerate(deadlines, start=2):
            request = target_service_pb2.VerifyRequest(
                call=target.call(session, sequence, held=PROMPT, new=(1,))
            )
            call = target.stub.Verify(request, timeout=seconds)
            task = asyncio.create_task(awaited(call))
            await until(lambda: is_running(host) or task.done())  # noqa: B023
            if not task.done():
                break
        if how == "call.cancel":
            call.cancel()
        elif how == "task.cancel":
            task.cancel()
        await asyncio.wait([task])
        await until(lambda: host.statistics().calls_cancelled >= 1)
        # The session still holds its base, and answers.
        error = await target.error_of(
            target.verify(target.call(session, sequence + 1, held=(*PROMPT, 1), new=(2,)))
        )
        assert isinstance(error, PrefixNotHeldError)


async def awaited(call: Any) -> None:
    await call


async def test_a_cancelled_draft_reaches_the_host():
    host = a_host(stalls=True)
    async with connected(DRAFTER, host) as drafter:
        session = await drafter.open()
        request = drafter_service_pb2.DraftRequest(
            call=drafter.call(session, 1, new=PROMPT), max_tokens=9
        )
        stream = drafter.stub.Draft(request, timeout=60)
        await anext(aiter(stream))
        await until(lambda: is_running(host))
        stream.cancel()
        await until(lambda: host.statistics().calls_cancelled == 1)
