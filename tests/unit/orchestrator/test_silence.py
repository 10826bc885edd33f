"""Calls that a server leaves unanswered are given up; on virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from paceline_contract.calls import PrefixCall
from paceline_orchestrator.decoding import deadline as deadline_module
from paceline_orchestrator.decoding.deadline import Patience, patience_seconds
from paceline_orchestrator.fleet.silence import SilenceWatch, Work
from support.virtual_system import now
from support.virtual_time import virtually

BEGIN = 1000.0  # of every virtual clock


def since_begin():
    return now() - BEGIN


async def move_to(at):
    """Let it become so many seconds since the test began, and what is due then happen."""
    await asyncio.sleep(at - since_begin())
    for _ in range(5):
        await asyncio.sleep(0)


class Rpc:
    def __init__(self):
        self.is_cancelled = False

    def cancel(self):
        self.is_cancelled = True


async def out_of_sight():
    return False


def begin(watch, patience_seconds=1.0, is_in_sight=out_of_sight):
    return watch.begin(Rpc(), patience_seconds=patience_seconds, is_in_sight=is_in_sight)


@virtually
async def test_a_call_is_given_up_when_its_patience_is_over_and_no_earlier():
    waiting = begin(SilenceWatch())
    await move_to(0.999)
    assert not waiting.is_given_up
    await move_to(1.0)
    assert waiting.is_given_up
    assert waiting.rpc.is_cancelled


@virtually
async def test_each_call_has_its_own_patience_whatever_was_begun_before():
    watch = SilenceWatch()
    patient, hasty = begin(watch, 10), begin(watch, 1)
    await move_to(5)
    assert (patient.is_given_up, hasty.is_given_up) == (False, True)
    await move_to(10)
    assert patient.is_given_up


@virtually
async def test_a_call_that_has_ended_is_left_alone():
    watch = SilenceWatch()
    waiting = begin(watch)
    watch.end(waiting, rpc=waiting.rpc)
    watch.end(waiting, rpc=waiting.rpc)
    await move_to(5)
    assert not waiting.rpc.is_cancelled


@virtually
async def test_who_takes_the_place_of_an_unanswered_call_waits_for_no_longer():
    watch = SilenceWatch()
    rpcs = []
    waiting = None
    for _ in range(5):
        rpcs.append(Rpc())
        former, waiting = (
            waiting,
            watch.begin(
                rpcs[-1], patience_seconds=1.0, is_in_sight=out_of_sight, instead_of=waiting
            ),
        )
        if former is not None:
            watch.end(former, rpc=rpcs[-2])
        await asyncio.sleep(0.21)
    assert waiting.is_given_up
    assert [it.is_cancelled for it in rpcs] == [False] * 4 + [True]


@virtually
async def test_who_takes_the_place_of_an_answered_call_waits_anew():
    watch = SilenceWatch()
    answered = begin(watch)
    await move_to(0.9)
    watch.heard(answered)
    watch.end(answered, rpc=answered.rpc)
    waiting = watch.begin(
        Rpc(), patience_seconds=1.0, is_in_sight=out_of_sight, instead_of=answered
    )
    await move_to(1.8)
    assert not waiting.is_given_up


@pytest.mark.parametrize(("rows", "newer_rows"), [(1, 100), (100, 1)])
@virtually
async def test_who_takes_the_place_of_a_call_is_endured_for_its_own_work(rows, newer_rows):
    async def in_sight():
        return True

    watch = SilenceWatch(lambda work, _waited: float(work.row_count))
    former = watch.begin(
        Rpc(), patience_seconds=1.0, is_in_sight=in_sight, work=Work(row_count=rows)
    )
    newer = watch.begin(
        Rpc(),
        patience_seconds=1.0,
        is_in_sight=in_sight,
        instead_of=former,
        work=Work(row_count=newer_rows),
    )
    await move_to(50)
    assert newer.is_neglected is (newer_rows == 1)


@virtually
async def test_a_call_that_its_server_has_in_sight_waits_on_and_is_asked_for_again():
    asked = []

    async def for_three_times():
        asked.append(since_begin())
        return len(asked) <= 3

    waiting = begin(SilenceWatch(), is_in_sight=for_three_times)
    await move_to(3.5)
    assert not waiting.is_given_up
    await move_to(4.0)
    assert waiting.is_given_up
    assert asked == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("ends_at", [1.6, 2.4], ids=["before", "after"])
@virtually
async def test_an_answer_that_comes_while_its_server_is_asked_counts(ends_at):
    """The server then says that it has the call no longer."""

    async def later():
        await asyncio.sleep(1.0)
        return False

    watch = SilenceWatch()
    waiting = begin(watch, is_in_sight=later)
    await move_to(1.5)
    watch.heard(waiting)
    await move_to(ends_at)
    assert not waiting.is_given_up
    watch.end(waiting, rpc=waiting.rpc)
    await move_to(9.0)
    assert not waiting.is_given_up
    assert not waiting.rpc.is_cancelled


@virtually
async def test_each_message_of_a_stream_begins_its_patience_anew():
    watch = SilenceWatch()
    stream = begin(watch, 3)
    await move_to(2.5)
    watch.heard(stream, patience_seconds=0.5)
    await move_to(2.9)
    assert not stream.is_given_up
    await move_to(3.0)
    assert stream.is_given_up


@virtually
async def test_requests_that_end_early_add_up_to_a_silence():
    watch = SilenceWatch()
    verdicts = []
    for _ in range(4):
        waiting = begin(watch)
        await asyncio.sleep(0.3)
        verdicts.append(watch.end_unanswered(waiting))
    assert verdicts == [False, False, False, True]


@virtually
async def test_time_in_which_many_calls_wait_counts_once():
    """Forty streams of one client that leaves are no silence."""
    watch = SilenceWatch()
    calls = [begin(watch) for _ in range(40)]
    await move_to(0.3)
    assert not any(list(map(watch.end_unanswered, calls)))


@virtually
async def test_an_answer_ends_a_silence():
    watch = SilenceWatch()
    for _ in range(3):
        unanswered, answered = begin(watch), begin(watch)
        await asyncio.sleep(0.6)
        assert not watch.end_unanswered(unanswered)
        watch.heard(answered)
        watch.end(answered, rpc=answered.rpc)


@virtually
async def test_a_call_that_was_answered_is_no_silence_when_its_request_ends():
    watch = SilenceWatch()
    answered = begin(watch)
    await move_to(0.9)
    watch.heard(answered)
    watch.end(answered, rpc=answered.rpc)
    await move_to(9.0)
    assert not watch.end_unanswered(answered)


@pytest.mark.parametrize(
    ("forward_ms", "is_cold", "seconds"),
    [
        (10, False, 1.0),  # the least, on a busy machine
        (10, True, 2.0),
        (1500, False, 6.0),
        (30_000, True, 120.0),  # a long prefill takes what it takes
        (None, True, 10.0),
    ],
)
def test_patience_follows_what_is_known_of_the_server(forward_ms, is_cold, seconds):
    forward_ns = None if forward_ms is None else forward_ms * 1_000_000
    assert patience_seconds(forward_ns, is_cold=is_cold) == seconds


async def test_a_call_is_in_sight_while_its_server_has_it_or_a_newer_one_of_its_session(
    monkeypatch,
):
    live = 0

    async def renew(*_):
        return live

    def looked_after(sequence):
        call = PrefixCall("a session", sequence, 0, b"", (1,), "it")
        return patience.begin(call, Rpc(), seconds=1.0).waiting.is_in_sight

    monkeypatch.setattr(deadline_module, "renew_session", renew)
    watched = SimpleNamespace(begin=lambda _, **watch: SimpleNamespace(**watch))
    patience = Patience(SimpleNamespace(silence=watched))
    older, newer = looked_after(3), looked_after(4)
    seen = {}
    for live in (0, 2, 3, 4, 5):
        seen[live] = await older(), await newer()
    neither, both = (False, False), (True, True)
    assert seen == {0: neither, 2: neither, 3: (True, False), 4: both, 5: neither}
