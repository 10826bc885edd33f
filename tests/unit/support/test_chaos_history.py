"""What a run of chaos finds: each promise that a run can break is told, and only then."""

from __future__ import annotations

import random

import pytest

from paceline import Strategy
from support.chaos.history import History, Strike
from support.chaos.workload import Order, Record, draw_order, oracle

ORDER = Order(
    prompt=b"rider:",
    strategy="distributed",
    width=1,
    branches=0,
    max_tokens=4,
    temperature=0.8,
    seed=7,
    leaves_after=None,
)


def record(*times, tokens=None, order=ORDER, is_done=True):
    """Return a stream that heard something at these times, from orchestrator 0."""
    heard = oracle(order) if tokens is None else tokens
    return Record(order, [(time, 0, "1") for time in times], heard, is_done=is_done)


def strike(begin, end, *, orchestrator=None, hit=True):
    return Strike("stall", "somebody", orchestrator, begin, end, hit)


def history(*records, strikes=None):
    strikes = [strike(1, 2)] * 6 if strikes is None else strikes
    return History(1, 0.0, 60.0, strikes=strikes, records=list(records))


def test_a_good_run_finds_nothing():
    assert history(record(0, 1, 5)).findings() == []


def test_a_wrong_token_is_found():
    tokens = oracle(ORDER)
    tokens[2] += 1
    assert "wrong tokens" in history(record(0, tokens=tokens)).findings()[0]


def test_a_missing_token_is_found():
    assert "wrong tokens" in history(record(0, tokens=oracle(ORDER)[:-1])).findings()[0]


def test_a_client_that_left_has_a_part():
    left = Order(**{**vars(ORDER), "leaves_after": 2})
    assert history(record(0, tokens=oracle(left)[:2], order=left)).findings() == []


def test_a_stream_that_never_ended_is_found():
    assert "not done" in history(record(0, is_done=False)).findings()[0]


def test_a_failure_is_found():
    broken = record(0, is_done=False)
    broken.failure = "InternalError()"
    assert "InternalError" in history(broken).findings()[0]


def test_a_gap_is_found():
    assert "nothing for 6.0 s from 1.0 s on" in history(record(0, 1, 7)).findings()[0]


def test_a_gap_has_a_reason_while_its_own_orchestrator_is_struck():
    strikes = [strike(1, 2), strike(2, 4, orchestrator=0), *[strike(9, 10)] * 5]
    assert history(record(0, 1, 7), strikes=strikes).findings() == []


@pytest.mark.parametrize("other", [None, 1])
def test_a_strike_elsewhere_is_no_reason_for_a_gap(other):
    strikes = [strike(2, 4, orchestrator=other)] * 6
    assert len(history(record(0, 1, 7), strikes=strikes).findings()) == 1


def test_a_run_whose_faults_met_nothing_is_refused():
    strikes = [*[strike(1, 2)] * 5, *[strike(1, 2, hit=False)] * 5]
    assert "proves little" in history(record(0), strikes=strikes).findings()[0]


def test_what_is_left_is_found():
    run = history(record(0))
    run.leftovers.append("target-0: sessions_active is 1")
    assert run.findings() == run.leftovers


def test_a_seed_draws_the_same_orders_again():
    first, again = (random.Random(3) for _ in range(2))
    drawn = [draw_order(first) for _ in range(50)]
    assert drawn == [draw_order(again) for _ in range(50)]
    assert {order.width for order in drawn} == {1, 4}
    assert {order.strategy for order in drawn} == {*Strategy} - {Strategy.UNKNOWN}


def test_a_history_is_written_as_json(tmp_path):
    path = tmp_path / "there" / "history.json"
    history(record(0, 1)).write(path)
    assert '"seed": 1' in path.read_text()
