"""Sessions: their leases, how far they grow, and who gets room."""

from __future__ import annotations

import pytest

from paceline.errors import (
    CacheExhaustedError,
    InvalidFieldError,
    OverloadedError,
    SessionNotFoundError,
)
from paceline.v1 import target_service_pb2
from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from support.model_contract import NEVER_SECONDS, PROMPT, a_host, connected, until
from support.model_servers import DRAFTER, TARGET


@pytest.mark.parametrize("role", [TARGET, DRAFTER], ids=lambda role: role.name)
async def test_closing_is_idempotent_and_frees_the_session(role):
    host = a_host()
    async with connected(role, host) as client:
        session = await client.open()
        assert host.statistics().sessions_open == 1
        await client.close(session)
        await client.close(session)
        await client.close("never opened")
        assert host.statistics().sessions_open == 0
        assert isinstance(await client.error_of(client.renew(session)), SessionNotFoundError)


async def test_the_lease_is_granted_and_renewed(target):
    spec = target.spec()
    spec.lease.FromMilliseconds(2500)
    grant = await target.open_with(spec)
    assert grant.lease.ToTimedelta().total_seconds() == 2.5
    assert await target.renew(grant.session_id) == 2.5
    assert (await target.open_with(target.spec())).lease.seconds == 15


@pytest.mark.parametrize("handle", ["", "unknown", "fake.999", "x" * 5000, "../..\x00"])
async def test_an_unknown_handle_is_not_found(target, handle):
    error = await target.error_of(target.verify(target.call(handle, 1, new=PROMPT)))
    assert isinstance(error, SessionNotFoundError)
    assert not handle or handle not in error.message


async def test_a_full_server_says_when_to_come_back():
    async with connected(TARGET, a_host(session_limit=2)) as target:
        await target.open()
        await target.open()
        error = await target.error_of(target.open())
        assert isinstance(error, CacheExhaustedError)
        assert error.retry_after_seconds > 0


async def test_a_session_grows_with_its_text_up_to_its_limit(target):
    session = await target.open(reserve_length=4, limit_length=40)
    await target.verify(target.call(session, 1, new=PROMPT), [1] * 36)
    call = target.call(session, 2, new=PROMPT)
    error = await target.error_of(target.verify(call, [1] * 37))
    assert isinstance(error, InvalidFieldError)
    assert "may have 40" in error.violations[0].description


async def test_a_window_grows_its_session(drafter):
    session = await drafter.open(reserve_length=4, limit_length=40)
    assert len(await drafter.draft(drafter.call(session, 1, new=PROMPT), 36)) == 36


async def test_without_a_limit_a_session_has_what_it_reserved(target):
    session = await target.open(reserve_length=40)
    error = await target.error_of(target.verify(target.call(session, 1, new=PROMPT), [1] * 37))
    assert isinstance(error, InvalidFieldError)


async def test_a_session_that_finds_no_room_is_as_it_was():
    async with connected(TARGET, a_host(token_budget=100)) as target:
        # The other's limit is what it has, so no room is kept for it.
        other = await target.open(reserve_length=50, share="another")
        session = await target.open(reserve_length=30, limit_length=90)
        first = await target.verify(target.call(session, 1, new=PROMPT))
        call = target.call(session, 2, held=PROMPT)
        error = await target.error_of(target.verify(call, [1] * 60))
        assert isinstance(error, CacheExhaustedError)
        assert error.retry_after_seconds > 0
        # Its sequence was not taken, and its tokens are held.
        assert (await target.verify(call)).next_token_id == first.next_token_id
        await target.close(other)
        await target.verify(target.call(session, 3, held=PROMPT), [1] * 60)


@pytest.mark.parametrize("limits", [{"session_limit": 20}, {"token_budget": 20 * 64}])
async def test_a_share_that_takes_all_it_can_leaves_a_session_to_another(limits):
    async with connected(TARGET, a_host(**limits)) as target:
        error = None
        while error is None:
            try:
                await target.open(share="greedy")
            except CacheExhaustedError as refusal:
                error = refusal
        assert len(target.opened) == 16
        assert error.retry_after_seconds > 0
        session = await target.open(share="modest")
        await target.verify(target.call(session, 1, new=PROMPT))


async def test_a_full_queue_says_when_to_come_back():
    model = SimulatedModel(ttft_seconds=NEVER_SECONDS, tpot_seconds=0)
    limits = HostLimits(warm_up_rounds=0, queue_limit=1)
    host = ModelHost(lambda: SimulatedBackend(model), limits=limits)
    async with connected(TARGET, host) as target:
        stalled = []
        for waiting in (0, 1):
            call = target.call(await target.open(), 1, new=PROMPT)
            request = target_service_pb2.VerifyRequest(call=call)
            stalled.append(target.stub.Verify(request, timeout=60))
            await until(lambda: host.statistics().calls_live == waiting + 1)  # noqa: B023
            await until(lambda: host.statistics().queue_length == waiting)  # noqa: B023
        error = await target.error_of(
            target.verify(target.call(await target.open(), 1, new=PROMPT))
        )
        assert isinstance(error, OverloadedError)
        assert error.retry_after_seconds
        for each in stalled:
            each.cancel()
