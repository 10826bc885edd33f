"""What a round costs: the hops between calls, whose turn it is, which texts agree, the tables."""

from __future__ import annotations

from paceline_bench.rounds.measurement import Texts, hops_between, in_turn
from paceline_bench.rounds.tables import rounds_table, streams_table
from paceline_bench.table2.echo import time_echoes

ROUNDS = {
    "target_ms": 7,
    "drafter_ms": 0.5,
    "transport": "messages",
    "plain_token_ms": [0.1, 0.3, 0.2],
    "round_ms": [3.0, 9.0, 4.0],
    "bare_ms": [0.5, 0.7],
    "gain": [1.5],
    "to_verify_ms": [1.0],
    "to_draft_ms": [],
    "is_identical": True,
}
STREAMS = {
    "transport": "RPCs",
    "strategy": "speculative",
    "stream_count": 64,
    "cpu_ms": {"orchestrator": [0.5, 0.9, 0.6], "targets": [0.4], "drafters": [0.3]},
    "tokens_per_second": [1000.0, 3000.0, 1200.0],
    "is_identical": False,
}


def record(method, start_ms, end_ms):
    return {"method": method, "start_ns": start_ms * 1e6, "end_ns": end_ms * 1e6}


def test_a_hop_leads_from_a_calls_end_to_the_next_call_at_the_other_server():
    records = [
        record("Verify", 7, 9),
        record("Draft", 1, 4),
        record("Draft", 5, 6),  # not a hop: the same server again
        record("Draft", 11, 12),
    ]
    assert hops_between(records) == ([1.0], [2.0])


def test_the_order_of_transports_turns_with_each_repeat():
    systems = {"RPCs": 1, "messages": 2}
    assert in_turn(systems, 0) == [("RPCs", 1), ("messages", 2)]
    assert in_turn(systems, 1) == [("messages", 2), ("RPCs", 1)]


def test_a_text_agrees_with_the_first_one_after_its_prompt():
    texts = Texts()
    assert texts.agree("a", (1, 2), (1, 2))
    assert texts.agree("b", (3,))
    assert not texts.agree("a", (1, 2), (1, 3))
    assert texts.agree("a", (1, 2))


def test_a_row_of_rounds_has_the_medians_with_the_bare_message_beside():
    row = rounds_table([ROUNDS]).splitlines()[-1]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *("7 and 0.5", "messages", "0.20", "4.00", "0.60", "1.00", "-", "1.50", "identical")
    ]


def test_a_row_of_streams_has_the_medians_and_tells_of_a_text_that_differs():
    row = streams_table([STREAMS]).splitlines()[-1]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *("speculative", "RPCs", "64", "0.600", "0.400", "0.300", "1200", "DIFFERENT")
    ]


async def test_a_bare_message_on_a_stream_takes_longer_than_its_pause():
    calls = await time_echoes([0, 2_000_000], on_a_stream=True)
    assert [call.sleep_ns for call in calls] == [0, 2_000_000] * (len(calls) // 2)
    assert min(min(it.overhead_ns, it.one_way_ns, it.back_ns) for it in calls) > 0
