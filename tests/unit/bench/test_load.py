"""What a load test computes from what its clients saw, and how it tells of it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline import Strategy
from paceline_bench.load import measurement as load
from paceline_bench.load.measurement import (
    LoadedSystem,
    LoadRow,
    Percentiles,
    StreamMemory,
    fairness,
    measure,
    percentiles,
    served_tokens_per_second,
    stream_memories,
)
from paceline_bench.load.streams import Load, Served, decode_plainly
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
    memory_before_mib=40.0,
    memory_peak_mib=42.5,
    orchestrator_load=0.3,
    generator_load=0.2,
    machine_load=0.6,
    began_quietly=True,
    identical=True,
)


def served(*arrivals, stream=0, sent_at=0.0):
    token_ids = tuple(range(sum(count for _, count in arrivals)))
    return Served("a prompt", stream, Strategy.SPECULATIVE, sent_at, arrivals, token_ids)


def test_a_request_is_timed_by_its_messages():
    request = served((1.5, 2), (2.0, 1), (4.0, 3), sent_at=1.0)
    assert request.ttft_seconds == 0.5
    assert list(request.itl_seconds) == [0.5, 2.0]
    assert list(request.token_seconds) == [0.5, 2 / 3, 2 / 3, 2 / 3]
    assert request.tpot_seconds == 2.5 / 4
    assert request.ended_at == 4.0


def test_a_request_of_one_message_has_no_time_between_tokens():
    request = served((1.0, 5))
    assert (list(request.itl_seconds), list(request.token_seconds)) == ([], [])
    assert request.tpot_seconds == 0.0


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
    assert percentiles([]) == Percentiles(0, None)


def test_fewer_than_a_hundred_measurements_have_no_tail():
    assert percentiles([3.0, 1.0]) == Percentiles(1.0, None)
    assert percentiles([1.0] * 99).p99 is None
    assert percentiles([1.0] * 100).p99 == 1.0


def with_memory(*peaks, strategy="AUTO"):
    return [
        replace(ROW, strategy=strategy, stream_count=count, memory_peak_mib=peak)
        for count, peak in peaks
    ]


def test_memory_of_a_stream_is_the_slope_of_a_line_through_its_loads():
    rows = with_memory((1, 40.25), (4, 41), (16, 44), (64, 56))
    several = [replace(row, orchestrator_count=2, memory_peak_mib=80.0) for row in rows]
    assert stream_memories([*rows, *several]) == [
        StreamMemory(strategy="AUTO", orchestrator_count=1, mib=pytest.approx(0.25)),
        StreamMemory(strategy="AUTO", orchestrator_count=2, mib=None),
    ]


@pytest.mark.parametrize("peaks", [(42, 40, 41), (44, 42, 40)], ids=["noise", "falling"])
def test_memory_that_cannot_be_told_from_noise_is_no_number(peaks):
    rows = with_memory(*zip((1, 8, 64), peaks, strict=True))
    assert [each.mib for each in stream_memories(rows)] == [None]


def test_two_numbers_of_streams_are_no_measure_of_memory():
    for peaks in [((1, 40), (64, 90)), ((1, 40), (64, 90), (64, 91)), ((64, 90),) * 3]:
        assert stream_memories(with_memory(*peaks)) == []


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


class FakeGeneration:
    def __init__(self, token_ids, strategy):
        self._chunks = [SimpleNamespace(token_ids=(token,)) for token in token_ids]
        self._completion = SimpleNamespace(
            started=SimpleNamespace(strategy=strategy), token_ids=token_ids
        )

    async def __aiter__(self):
        for chunk in self._chunks:
            yield chunk

    async def collect(self):
        return self._completion


class FakeClient:
    """Continues a prompt with its bytes, and wrongly with strategies that it is told of."""

    def __init__(self, *wrong):
        self._wrong = wrong

    def generate(self, prompt, *, strategy, max_tokens, **_options):
        token_ids = tuple(prompt.encode()[:max_tokens])
        return FakeGeneration(token_ids[::-1] if strategy in self._wrong else token_ids, strategy)


@pytest.fixture
def put(monkeypatch):
    forwards = {"paceline_forwards_total": 0, "paceline_forwards_interrupted_total": 0}

    def count(_address):
        forwards["paceline_forwards_total"] += 5
        forwards["paceline_forwards_interrupted_total"] += 3
        return dict(forwards)

    monkeypatch.setattr(load, "counters", count)

    async def put(client, strategy, *, plain=None, share=1.0):
        system = LoadedSystem((client,), (os.getpid(),), ("a target",), share)
        asked = Load(("abcd", "efgh"), strategy, stream_count=2, request_count=5, max_tokens=3)
        expected = {"abcd": tuple(b"abc"), "efgh": tuple(b"efg")}
        return await measure(system, asked, expected=expected, plain=plain)

    return put


async def test_the_reference_is_what_plain_decoding_makes_of_each_prompt():
    client = FakeClient(Strategy.SPECULATIVE, Strategy.DISTRIBUTED, Strategy.AUTO)
    outputs = await decode_plainly(client, ("abcd", "efgh"), max_tokens=3)
    assert outputs == {"abcd": tuple(b"abc"), "efgh": tuple(b"efg")}


async def test_a_load_is_compared_with_the_reference_and_with_plain_decodings_speed(put):
    plain = await put(FakeClient(), Strategy.AUTOREGRESSIVE)
    row = await put(FakeClient(), Strategy.SPECULATIVE, plain=plain)
    assert (plain.identical, plain.speed_up, plain.chosen) == (True, 1, {"non-SI": 5})
    assert row.identical
    assert row.speed_up == row.tokens_per_second / plain.tokens_per_second


@pytest.mark.parametrize("wrong", [Strategy.AUTOREGRESSIVE, Strategy.SPECULATIVE])
async def test_there_is_no_speed_up_where_an_output_of_either_differs(put, wrong):
    client = FakeClient(wrong)
    plain = await put(client, Strategy.AUTOREGRESSIVE)
    row = await put(client, Strategy.SPECULATIVE, plain=plain)
    assert row.speed_up is None
    assert [plain.identical, row.identical] == [
        wrong is not Strategy.AUTOREGRESSIVE,
        wrong is not Strategy.SPECULATIVE,
    ]


@pytest.mark.parametrize(("share", "told"), [(1.0, 0.2), (0.5, 0.4)])
async def test_a_throttled_orchestrators_load_is_told_of_the_time_that_it_had(
    put, share, told, monkeypatch
):
    usage = SimpleNamespace(
        cpu_seconds=(1.0,),
        base_bytes=(1,),
        peak_bytes=(2,),
        highest_load=0.2,
        own_load=0.1,
        machine_load=0.5,
    )
    shares = []

    def throttled(_pids, *, share):
        shares.append(share)
        return nullcontext()

    monkeypatch.setattr(load, "throttled", throttled)
    monkeypatch.setattr(load, "metered", lambda _pids: nullcontext(usage))
    row = await put(FakeClient(), Strategy.AUTOREGRESSIVE, share=share)
    assert row.orchestrator_load == told
    assert shares == [share] * (share < 1)


async def test_each_cost_of_a_load_is_told_in_its_own_field(put, monkeypatch):
    usage = SimpleNamespace(
        cpu_seconds=(1.0, 0.5),
        base_bytes=(1 << 20, 3 << 20),
        peak_bytes=(4 << 20, 5 << 20),
        highest_load=0.2,
        own_load=0.1,
        machine_load=0.5,
    )
    monkeypatch.setattr(load, "metered", lambda _pids: nullcontext(usage))
    row = await put(FakeClient(), Strategy.AUTOREGRESSIVE)
    token_count = 5 * 3
    assert row.forwards_per_token == (5 + 3) / token_count  # begun: those given up are among them
    assert row.given_up == 3 / (5 + 3)
    assert row.orchestrator_ms_per_token == 1500 / token_count
    assert (row.memory_before_mib, row.memory_peak_mib) == (4, 9)
    assert (row.orchestrator_load, row.generator_load, row.machine_load) == (0.2, 0.1, 0.5)


async def test_processes_are_metered():
    async with metered([os.getpid()]) as usage:
        sum(range(300_000))
    assert usage.wall_seconds > 0
    assert usage.peak_bytes[0] >= usage.base_bytes[0] > 1 << 20
    assert 0 <= usage.machine_load <= 1
    assert len(usage.cpu_seconds) == 1
    assert usage.own_load > 0
