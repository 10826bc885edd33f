"""A made-up SI request of two rounds and a made-up DSI request, taken apart."""

import pytest

from paceline import TimelineEvent, TimelineEventKind
from paceline_bench.simulated_servers import SimulatedServers
from paceline_bench.table2.trace import Breakdown, Trace, mean_breakdown
from paceline_protocol.laboratory.simulation import ServerLatency

MS = 1_000_000
SERVERS = SimulatedServers(
    target=ServerLatency(first=20 * MS, step=10 * MS),
    drafter=ServerLatency(first=3 * MS, step=2 * MS),
    acceptance_rate=0.5,
)
CLOCKS = 777 * MS  # the servers' clock, less the orchestrator's


def event(kind, server, call_id, start_ms, end_ms, tokens=()):
    return TimelineEvent(
        kind=TimelineEventKind(kind),
        server=server,
        start_ns=round(start_ms * MS),
        end_ns=round(end_ms * MS),
        position=5,
        token_ids=tuple(tokens),
        call_id=call_id,
        speculation_depth=0,
    )


def record(start_ms, end_ms, *, forward_ms, queue_ms=0.0, rows=1, method="Verify"):
    return {
        "method": method,
        "start_ns": CLOCKS + round(start_ms * MS),
        "end_ns": CLOCKS + round(end_ms * MS),
        "forward_ns": round(forward_ms * MS),
        "queue_ns": round(queue_ms * MS),
        "rows": rows,
    }


# Draft 2 tokens, verify, draft 1, verify. The client's call begins 1 ms before its arrival and ends
# 2 ms after the last verdict.
SI_TIMELINE = [
    event("drafted", "drafter-0", 1, 0.5, 4.5, [1]),
    event("drafted", "drafter-0", 1, 4.5, 6.5, [2]),
    event("verifying", "target-0", 2, 6.75, 28.75, [1, 2]),
    event("drafted", "drafter-0", 3, 29.0, 32.0, [3]),
    event("verifying", "target-0", 4, 32.25, 44.25, [3]),
]
SI_RECORDS = {
    "drafter-0": [
        record(1.0, 6.2, forward_ms=5.2, rows=2),
        record(29.5, 31.5, forward_ms=2.0, rows=1),
    ],
    "target-0": [
        record(7.25, 28.25, forward_ms=20.5, queue_ms=0.25),
        record(32.75, 43.75, forward_ms=10.5, queue_ms=0.25),
    ],
}


def test_the_parts_of_a_breakdown_add_up_and_are_what_was_put_in():
    trace = Trace(SI_TIMELINE, SI_RECORDS, elapsed_ns=round(47.25 * MS))

    parts = trace.breakdown(SERVERS, ideal_ns=37 * MS, floor_ns=39 * MS)

    assert parts == Breakdown(
        total=pytest.approx(47.25),
        ideal=37,
        bare=pytest.approx(2.0),
        path=pytest.approx(0.0),  # 3 + 2, 20, 2, 10
        overshoot=pytest.approx(0.2 + 0.5 + 0.0 + 0.5),
        queue=pytest.approx(0.5),
        transport=pytest.approx(0.8 + 1.25 + 1.0 + 1.25 - 2.0),
        orchestrator=pytest.approx(3 * 0.25),
        client=pytest.approx(3.0 + 0.5),
    )


def test_the_messages_of_a_decode_share_what_its_record_says():
    timeline = [
        event("verifying", "target-0", 1, 0.5, 22.0),
        event("verifying", "target-0", 2, 22.0, 32.5),
        event("verifying", "target-0", 3, 32.5, 42.75),
    ]
    # Forwards of 20, 10 and 10 ms; 64 rows were asked for.
    of_decode = record(1.0, 42.5, forward_ms=40.6, queue_ms=0.3, rows=64, method="Decode")
    trace = Trace(timeline, {"target-0": [of_decode]}, elapsed_ns=44 * MS)

    parts = trace.breakdown(SERVERS, ideal_ns=40 * MS, floor_ns=41 * MS)

    assert (parts.ideal, parts.path) == (40, pytest.approx(0.0))
    assert parts.overshoot == pytest.approx(0.6)
    assert parts.queue == pytest.approx(0.3)
    assert parts.transport == pytest.approx(42.25 - 40 - 0.6 - 0.3 - 1.0)
    assert parts.client == pytest.approx(0.5 + 1.25)


def test_other_calls_on_the_path_than_in_the_ideal_are_named_as_such():
    trace = Trace(SI_TIMELINE, SI_RECORDS, elapsed_ns=50 * MS)

    assert trace.breakdown(SERVERS, ideal_ns=30 * MS, floor_ns=30 * MS).path == pytest.approx(7.0)


def test_calls_whose_records_are_lost_are_all_transport():
    trace = Trace(SI_TIMELINE, {}, elapsed_ns=50 * MS)

    parts = trace.breakdown(SERVERS, ideal_ns=37 * MS, floor_ns=37 * MS)

    assert (parts.queue, parts.overshoot) == (0, 0)
    assert parts.transport == pytest.approx(6 - 5 + 22 - 20 + 3 - 2 + 12 - 10)


# Target 0 rejects what target 1 and the drafter went on with: both start anew.
DSI_TIMELINE = [
    event("verifying", "target-0", 1, 0.5, 21.5),
    event("drafted", "drafter-0", 2, 0.5, 4.5, [1]),
    event("verifying", "target-1", 3, 4.6, 21.6, [1]),
    event("cancelled", "target-1", 3, 21.6, 21.6),
    event("drafted", "drafter-0", 4, 21.6, 25.0, [7]),
    event("verifying", "target-0", 5, 21.7, 33.0),
]
DSI_RECORDS = {
    "drafter-0": [
        record(1.0, 21.9, forward_ms=20.0, rows=9),
        record(22.4, 33.0, forward_ms=10.0, rows=5),
    ],
    "target-0": [record(1.0, 21.0, forward_ms=20.0), record(22.7, 32.7, forward_ms=10.0)],
    "target-1": [record(5.1, 22.0, forward_ms=0.0)],
}


def test_a_restart_is_from_the_verdicts_arrival_to_the_new_calls_at_their_servers():
    trace = Trace(DSI_TIMELINE, DSI_RECORDS, elapsed_ns=34 * MS)

    (restart,) = trace.restarts(back_ns=round(0.3 * MS))

    assert restart.draft_ns == pytest.approx((22.4 - 21.3) * MS)
    assert restart.verify_ns == pytest.approx((22.7 - 21.3) * MS)


def test_a_stale_draft_token_between_verdict_and_new_draft_hides_no_restart():
    timeline = [
        *DSI_TIMELINE,
        event("drafted", "drafter-0", 2, 4.5, 21.55, [2]),
        event("cancelled", "drafter-0", 2, 21.6, 21.6),
    ]

    (restart,) = Trace(timeline, DSI_RECORDS, elapsed_ns=34 * MS).restarts(back_ns=0)

    assert restart.draft_ns == pytest.approx((22.4 - 21.0) * MS)


def test_a_draft_that_a_draft_token_made_start_is_no_restart():
    timeline = [*DSI_TIMELINE[:2], event("drafted", "drafter-0", 3, 4.5, 7.0, [2])]

    assert Trace(timeline, DSI_RECORDS, elapsed_ns=34 * MS).restarts(back_ns=0) == []


def test_a_withdrawn_verification_is_not_on_the_path():
    trace = Trace(DSI_TIMELINE, DSI_RECORDS, elapsed_ns=34 * MS)

    assert trace.breakdown(SERVERS, ideal_ns=30 * MS, floor_ns=30 * MS).path == pytest.approx(0)


def test_prompts_sent_before_any_answer_are_counted():
    assert Trace(DSI_TIMELINE, {}, elapsed_ns=MS).prefill_count == 1
    broadcast = [*DSI_TIMELINE, event("verifying", "target-2", 6, 0.6, 21.0)]
    assert Trace(broadcast, {}, elapsed_ns=MS).prefill_count == 2


def test_breakdowns_are_averaged_part_by_part():
    traces = [Trace(SI_TIMELINE, SI_RECORDS, elapsed_ns=ms * MS) for ms in (48, 50)]
    parts = [trace.breakdown(SERVERS, ideal_ns=37 * MS, floor_ns=37 * MS) for trace in traces]

    mean = mean_breakdown(parts)

    assert mean.total == pytest.approx(49)
    assert mean.client == pytest.approx((parts[0].client + parts[1].client) / 2)


@pytest.mark.parametrize(("start_ms", "count"), [(4.25, 2), (4.5, 1), (4.75, 1)])
def test_a_call_that_begins_with_the_first_answer_or_later_is_no_prefill(start_ms, count):
    timeline = [
        event("drafted", "drafter-0", 1, 0.5, 4.5, [1]),
        event("verifying", "target-0", 2, 0.5, 28.75),
        event("verifying", "target-1", 3, start_ms, 30.0, [1]),
    ]
    assert Trace(timeline, {}, elapsed_ns=40 * MS).prefill_count == count
