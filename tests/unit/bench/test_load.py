"""What a load test computes from what its clients saw, and how it tells of it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from paceline import Strategy
from paceline_bench.load import (
    LoadRow,
    Percentiles,
    Served,
    fairness,
    percentiles,
    served_tokens_per_second,
)
from paceline_bench.load_report import draw, findings, tables
from paceline_bench.processes import metered

ROW = LoadRow(
    strategy="AUTO",
    chosen={"SI": 3, "DSI": 1},
    stream_count=4,
    orchestrator_count=1,
    tokens_per_second=150.0,
    speed_up=1.5,
    ttft_ms=Percentiles(60.4, 99.6),
    itl_ms=Percentiles(40, 80),
    tpot_ms=Percentiles(20, 30),
    fairness=0.98765,
    forwards_per_token=0.4,
    given_up=0.25,
    orchestrator_ms_per_token=1.25,
    stream_mib=0.5,
    orchestrator_load=0.3,
    generator_load=0.2,
    machine_load=0.6,
    identical=True,
)


def served(*arrivals, stream=0, sent_at=0.0):
    token_ids = tuple(range(sum(count for _, count in arrivals)))
    return Served(0, stream, Strategy.SPECULATIVE, sent_at, arrivals, token_ids)


def test_a_request_is_timed_by_its_messages():
    request = served((1.5, 2), (2.0, 1), (4.0, 3), sent_at=1.0)
    assert request.ttft_seconds == 0.5
    assert list(request.itl_seconds) == [0.5, 2.0]
    assert request.tpot_seconds == 2.5 / 4
    assert request.ended_at == 4.0


def test_a_request_of_one_message_has_no_time_between_tokens():
    request = served((1.0, 5))
    assert (list(request.itl_seconds), request.tpot_seconds) == ([], 0.0)


def test_tokens_are_counted_while_every_stream_has_work():
    requests = [
        served((1.0, 2), (2.0, 2), stream=0),
        served((3.0, 2), (4.0, 2), stream=0, sent_at=2.0),
        served((1.0, 1), (2.5, 1), stream=1),
    ]
    # Stream 1 ends at 2.5: until then there were 4 + 2 tokens.
    assert served_tokens_per_second(requests) == 6 / 2.5


def test_percentiles_are_values_that_were_measured():
    assert percentiles([float(value) for value in range(100, 0, -1)]) == Percentiles(50, 99)
    assert percentiles([3.0, 1.0]) == Percentiles(1.0, 3.0)
    assert percentiles([]) == Percentiles(0, 0)


@pytest.mark.parametrize(
    ("rates", "index"), [([5.0], 1), ([2.0] * 7, 1), ([8.0, 0, 0, 0], 1 / 4), ([1.0, 3.0], 0.8)]
)
def test_fairness_is_jains_index(rates, index):
    assert fairness(rates) == pytest.approx(index)


@pytest.mark.parametrize(
    ("loads", "limit"),
    [
        ({}, ""),
        ({"machine_load": 0.9}, "machine"),
        ({"orchestrator_load": 0.99}, "orchestrator"),
        ({"generator_load": 0.9, "machine_load": 1.0}, "machine, load generator"),
    ],
)
def test_a_row_says_what_was_short_of_cpu(loads, limit):
    assert replace(ROW, **loads).limit == limit


def test_tables_have_a_row_for_each_load_by_number_of_orchestrators():
    text = tables([ROW, replace(ROW, orchestrator_count=2, strategy="SI", machine_load=0.95)])
    latency, cost, _, latency_of_two, cost_of_two = text.split("\n\n")[1:6]
    assert latency.splitlines()[2] == (
        "| 4 | AUTO | 150.0 | 1.50x | 60 / 100 | 40 / 80 | 20 / 30 | 0.988 | identical |"
    )
    assert cost.splitlines()[2] == (
        "| 4 | AUTO | 1 DSI, 3 SI | 0.40 | 25% | 1.25 | 30% | 0.50 | 60% | - |"
    )
    assert latency_of_two.splitlines()[2].startswith("| 4 | SI |")
    assert cost_of_two.rstrip().splitlines()[2].endswith("| 95% | machine |")
    assert "1 orchestrator; times in ms" in text
    assert "2 orchestrators; times in ms" in text


def test_no_speed_up_is_told_of_an_output_that_differs():
    row = replace(ROW, identical=False)
    assert "1.50x" not in tables([row])
    assert "DIFFERENT" in tables([row])
    assert findings([ROW, row]) == ["AN OUTPUT DIFFERED from plain decoding: AUTO x 4"]


def test_findings_say_whether_auto_kept_up_with_plain_decoding():
    slow = replace(ROW, speed_up=0.9, stream_count=8, orchestrator_count=2)
    assert "AUTO served fewer tokens/s than plain decoding: AUTO x 8 on 2 orchestrators" in (
        findings([ROW, slow])
    )
    told = "\n".join(findings([ROW, replace(ROW, speed_up=0.99)]))
    assert "AUTO never served fewer tokens/s than plain decoding" in told
    assert "at least 0.99x, AUTO x 4" in told
    assert "AUTO" not in findings([replace(ROW, strategy="SI")])[0]


def test_findings_name_what_was_short_of_cpu_and_what_a_core_would_do_for():
    lines = findings([ROW, replace(ROW, stream_count=8, generator_load=1.0)])
    assert "An orchestrator's core would do for 800 tokens/s, by AUTO x 8" in lines
    assert lines[-1] == (
        "1 of 2 loads were short of CPU, and so no measure of the strategy: AUTO x 8"
    )


def test_the_picture_has_a_line_for_each_strategy():
    rows = [
        replace(ROW, strategy=strategy, stream_count=count)
        for strategy in ("non-SI", "AUTO")
        for count in (1, 4)
    ]
    figure = draw([*rows, replace(ROW, orchestrator_count=2)], title="4 targets")
    assert figure.get_suptitle() == "4 targets"
    for axes in figure.axes:
        assert [line.get_label() for line in axes.lines] == ["non-SI", "AUTO"]
        assert all(list(line.get_xdata()) == [1, 4] for line in axes.lines)
    assert list(figure.axes[0].lines[0].get_ydata()) == [150, 150]
    assert list(figure.axes[1].lines[0].get_ydata()) == [20, 20]


def test_what_was_short_of_cpu_is_hollow_in_the_picture():
    rows = [ROW, replace(ROW, stream_count=8, tokens_per_second=90, machine_load=1.0)]
    together, _ = draw(rows, title="").axes
    (hollow,) = together.collections
    assert hollow.get_offsets().tolist() == [[8, 90]]
    assert "hollow" in together.get_xlabel()


async def test_processes_are_metered():
    async with metered([os.getpid()]) as usage:
        sum(range(300_000))
    assert usage.wall_seconds > 0
    assert usage.peak_bytes[0] > 1 << 20
    assert 0 <= usage.machine_load <= 1
    assert len(usage.cpu_seconds) == 1
    assert usage.own_load > 0
