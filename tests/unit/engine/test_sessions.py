from __future__ import annotations

import pytest

from paceline.errors import (
    CacheExhaustedError,
    PrefixMismatchError,
    PrefixNotHeldError,
    SessionNotFoundError,
    StaleCallError,
)
from paceline_engine.calls import SessionSpec
from paceline_engine.live_calls import LiveCall
from paceline_engine.sessions import SessionTable
from paceline_engine.worker import Job, Outlet
from unit.engine.conftest import call_on, instant

BACKEND = instant()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock) -> SessionTable:
    return SessionTable(incarnation="here", session_limit=3, token_budget=100, clock=clock)


def open_session(table, reserve_length=10, **settings):
    grant = table.open(SessionSpec(reserve_length, **settings), BACKEND.new_cache)
    return table.find(grant.session_id)


def a_live_call() -> LiveCall:
    outlet = Outlet()
    return LiveCall(0, outlet, Job(lambda _: None, 1, 0, outlet))


def test_handles_are_unguessable_and_name_the_incarnation(table):
    handles = {open_session(table).session_id for _ in range(3)}
    assert len(handles) == 3
    for handle in handles:
        incarnation, secret = handle.split(".")
        assert incarnation == "here"
        assert len(secret) == 43  # 32 bytes in base64


@pytest.mark.parametrize("handle", ["", "here.x", "there.x", "here", "\x00"])
def test_unknown_handles_are_not_found(table, handle):
    with pytest.raises(SessionNotFoundError):
        table.find(handle)


def test_the_session_limit_holds_until_one_is_closed(table):
    sessions = [open_session(table) for _ in range(3)]
    with pytest.raises(CacheExhaustedError) as caught:
        open_session(table)
    assert caught.value.retry_after_seconds
    table.close(sessions[0].session_id)
    open_session(table)


def test_the_token_budget_holds_until_one_is_closed(table):
    session = open_session(table, 60)
    with pytest.raises(CacheExhaustedError):
        open_session(table, 41)
    open_session(table, 40)
    table.close(session.session_id)
    assert table.reserved_tokens == 40
    open_session(table, 60)


def test_closing_twice_releases_once(table):
    session = open_session(table)
    assert table.close(session.session_id) is session
    assert table.close(session.session_id) is None
    assert (table.opened_count, table.released_count, table.reserved_tokens) == (1, 1, 0)


def test_a_lease_ends_unless_renewed(table, clock):
    session = open_session(table, lease_seconds=15.0)
    clock.now += 14.9
    assert table.expire() == 0
    table.renew(session)
    clock.now += 15
    with pytest.raises(SessionNotFoundError):
        table.find(session.session_id)
    assert (table.expired_count, table.released_count, table.reserved_tokens) == (1, 1, 0)
    assert table.expire() == 0


def test_an_expired_session_makes_room_for_a_new_one(table, clock):
    for _ in range(3):
        open_session(table, lease_seconds=1.0)
    clock.now += 1
    open_session(table)
    assert len(table) == 1


def test_a_session_with_a_live_call_never_expires(table, clock):
    session = open_session(table, lease_seconds=1.0)
    session.live_call = a_live_call()
    clock.now += 1000
    assert table.expire() == 0
    assert table.find(session.session_id) is session
    session.live_call = None
    assert table.expire() == 1


def test_sequences_must_rise(table):
    session = open_session(table)
    session.fence(5)
    for stale in (5, 4, 1):
        with pytest.raises(StaleCallError):
            session.fence(stale)
    session.fence(6)


def test_the_one_rule_is_prefill_catch_up_and_rollback(table):
    session = open_session(table)
    assert session.rebase(call_on("", 1, base=[], append=[1, 2, 3])).tolist() == [1, 2, 3]
    session.hold([1, 2, 3, 4, 5])
    assert session.rebase(call_on("", 2, base=[1, 2, 3, 4], append=[9])).tolist() == [1, 2, 3, 4, 9]
    assert session.held_length == 4


def test_a_longer_base_than_held_says_what_is_held(table):
    session = open_session(table)
    session.hold([1, 2, 3])
    with pytest.raises(PrefixNotHeldError) as caught:
        session.rebase(call_on("", 1, base=[1, 2, 3, 4], append=[]))
    assert caught.value.metadata == {"held_length": "3"}
    assert session.held_length == 3


def test_another_base_is_a_mismatch(table):
    session = open_session(table)
    session.hold([1, 2, 3])
    with pytest.raises(PrefixMismatchError):
        session.rebase(call_on("", 1, base=[1, 7], append=[4]))
    # The whole prefix again, as the caller is told to.
    assert session.rebase(call_on("", 2, base=[], append=[1, 7, 4])).tolist() == [1, 7, 4]
