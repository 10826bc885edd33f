from __future__ import annotations

from array import array

import pytest

from paceline.errors import (
    CacheExhaustedError,
    DrainingError,
    SessionNotFoundError,
    StaleCallError,
    SupersededError,
)
from paceline_engine.scheduling.jobs import Job, Outlet
from paceline_engine.sessions.session import LiveCall
from paceline_engine.sessions.session_table import SessionTable
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item
from unit.engine.conftest import call_on, instant

BACKEND = instant()


@pytest.fixture
def table(clock) -> SessionTable:
    return SessionTable(incarnation="here", session_limit=3, token_budget=100, clock=clock)


def open_session(table, reserve_length=10, **settings):
    grant = table.open(SessionSpec(reserve_length, **settings), BACKEND.new_cache)
    return table.find(grant.session_id)


def open_all(table, **settings):
    """Open sessions until one is refused; return them and the refusal."""
    sessions = []
    while True:
        try:
            sessions.append(open_session(table, **settings))
        except CacheExhaustedError as refusal:
            return sessions, refusal


def a_live_call() -> LiveCall:
    outlet = Outlet()
    item = Item(cache=None, spec=SessionSpec(1), prefix=array("I"), task=Draft())
    return LiveCall(prefix_length=0, outlet=outlet, item=item, job=Job(item, outlet, share=""))


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
        open_session(table, 41, share="another")
    open_session(table, 40, share="another")
    table.close(session.session_id)
    assert table.reserved_tokens == 40
    open_session(table, 60)


def test_one_share_leaves_sessions_and_tokens_to_others(clock):
    for limits in ({"session_limit": 20, "token_budget": 10**6}, {"session_limit": 10**6}):
        table = SessionTable(incarnation="here", clock=clock, **{"token_budget": 200, **limits})
        sessions, refusal = open_all(table, share="greedy")
        assert "16 of them" in refusal.message or "160 this client's" in refusal.message
        assert refusal.retry_after_seconds
        assert len(sessions) == 16
        open_session(table, share="modest")


def test_a_text_knows_that_its_session_is_over(table, clock):
    closed, expired, open_one = (open_session(table, lease_seconds=n) for n in (9, 5, 9))
    table.close(closed.session_id)
    clock.now += 6
    table.expire()
    assert [each.cache.has_ended for each in (closed, expired, open_one)] == [True, True, False]


def test_each_end_of_a_session_is_told_once(clock):
    told = []
    table = SessionTable(
        incarnation="here",
        session_limit=9,
        token_budget=100,
        clock=clock,
        on_end=lambda session, error: told.append((session, type(error))),
    )
    closed, expired, drained = (open_session(table, lease_seconds=n) for n in (9, 5, 9))
    table.close(closed.session_id)
    table.close(closed.session_id)
    clock.now += 6
    table.expire()
    table.close(drained.session_id, DrainingError("stop"))
    assert told == [
        (closed, SupersededError),
        (expired, SupersededError),
        (drained, DrainingError),
    ]


# --- growing ----------------------------------------------------------------------------------


@pytest.fixture
def roomy(clock) -> SessionTable:
    return SessionTable(incarnation="here", session_limit=100, token_budget=2000, clock=clock)


def test_a_session_reserves_a_step_ahead_of_its_text_up_to_its_limit(roomy):
    session = open_session(roomy, 100, limit_length=700)
    assert session.reserved_length == 100 + 256
    roomy.grow(session, 90)
    assert session.reserved_length == 356
    roomy.grow(session, 300)
    assert session.reserved_length == 300 + 256
    roomy.grow(session, 500)
    assert session.reserved_length == 700
    assert roomy.reserved_tokens == 700
    roomy.close(session.session_id)
    assert roomy.reserved_tokens == 0


def test_without_a_limit_a_session_has_what_it_asked_for(roomy):
    assert open_session(roomy, 100).reserved_length == 100


def test_no_more_is_reserved_than_a_session_may_grow_to(roomy):
    roomy.open(SessionSpec(100, limit_length=200), BACKEND.new_cache)
    assert roomy.reserved_tokens == 200


def test_a_session_alone_grows_until_nothing_is_left(roomy):
    session = open_session(roomy, 100, limit_length=5000)
    roomy.grow(session, 2000)
    assert (session.reserved_length, roomy.reserved_tokens) == (2000, 2000)


def test_a_refused_growth_changes_nothing(roomy):
    session = open_session(roomy, 100, limit_length=5000)
    open_session(roomy, 1500, share="another")
    roomy.grow(session, 400)
    before = (session.reserved_length, session.needed_length, roomy.reserved_tokens)
    with pytest.raises(CacheExhaustedError, match="tokens wanted") as caught:
        roomy.grow(session, 600)
    assert caught.value.retry_after_seconds
    assert (session.reserved_length, session.needed_length, roomy.reserved_tokens) == before
    roomy.grow(session, 500)
    assert roomy.reserved_tokens == 2000


def test_a_new_session_leaves_room_to_those_that_may_still_grow(roomy):
    running = open_session(roomy, 1800, limit_length=5000)
    roomy.grow(running, 1850)
    assert (running.missing_length, roomy.reserved_tokens) == (256, 1850)
    for share in ("", "another"):
        with pytest.raises(CacheExhaustedError):
            open_session(roomy, 1, share=share)
    roomy.token_budget = 1850 + 256 + 1
    open_session(roomy, 1, share="another")
    roomy.grow(running, 1850 + 256)


def test_a_share_with_many_growing_sessions_locks_nobody_out(roomy):
    greedy, _ = open_all(roomy, limit_length=5000, share="greedy")
    for session in greedy:
        roomy.grow(session, session.reserved_length)
    free = roomy.token_budget - roomy.reserved_tokens
    assert 256 + 50 < free < sum(session.missing_length for session in greedy)
    open_session(roomy, 50, share="modest")


def test_within_a_share_running_sessions_come_first(roomy):
    sessions = [open_session(roomy, length, limit_length=5000) for length in (800, 100)]
    roomy.grow(sessions[0], 1200)
    assert sessions[0].missing_length == 256  # the share has no more
    roomy.close(sessions[1].session_id)
    with pytest.raises(CacheExhaustedError):
        open_session(roomy, 200)
    roomy.grow(sessions[0], 1300)
    assert sessions[0].missing_length == 0


def test_a_running_session_grows_when_a_new_one_is_refused(roomy):
    sessions, _ = open_all(roomy, limit_length=5000)
    for session in sessions:
        roomy.grow(session, 10 + 128)


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
