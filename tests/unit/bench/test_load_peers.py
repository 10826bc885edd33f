"""Real models under load beside their peers: who has a turn, what is counted, how it is told."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace

import pytest

from paceline import Strategy
from paceline.errors import NoTargetError
from paceline_bench.load import peers as module
from paceline_bench.load import peers_command as bench_load_peers
from paceline_bench.load.peer_tables import peer_findings
from paceline_bench.load.peers import (
    Entry,
    Peer,
    Run,
    cut_prompts,
    insist,
    local_peer,
    measure_peers,
    peer_rows,
)
from paceline_bench.load.streams import Load, Served
from paceline_bench.pair.contest import Group
from paceline_cli.__main__ import main

A, B = (1, 2), (3, 4)
EXPECTED = {A: (5, 6), B: (7, 8)}


def text(prompt=A, *, seconds=2.0, token_ids=None, strategy=Strategy.AUTOREGRESSIVE):
    """Give a text of two tokens that come after so many seconds each, from 10 on."""
    arrivals = ((10 + seconds, 1), (10 + 2 * seconds, 1))
    return Served(prompt, 0, strategy, 10.0, arrivals, token_ids or EXPECTED[prompt])


def asked(stream_count, request_count=2):
    return Load((A, B), Strategy.AUTOREGRESSIVE, stream_count, request_count, max_tokens=2)


def run_of(*served):
    return Run([*served], orchestrator_seconds=0.004, servers_seconds=0.016, own_seconds=0.002)


def test_prompts_are_windows_of_one_length_over_all_texts():
    texts = [[1, 2, 3], [4, 5], [6, 7, 8]]
    assert cut_prompts(texts, 4, length=3) == [(1, 2, 3), (3, 4, 5), (5, 6, 7), (7, 8, 1)]


def test_a_runs_speed_is_that_of_all_its_texts_from_the_first_request_to_the_last_token():
    late = replace(text(B), sent_at=12.0)  # and so from 10 to 14
    assert run_of(text(seconds=1), late).tokens_per_second == 4 / 4


async def test_whoever_is_in_this_process_gets_as_many_texts_at_once_as_there_would_be_streams():
    widths = []

    def together(prompts, count):
        widths.append((prompts, count))
        return [text(prompt) for prompt in prompts]

    served = await local_peer(Group.ENGINE, "it", together).serve(asked(2, request_count=5))
    assert widths == [([A, B], 2), ([A, B], 2), ([A], 2)]
    assert [each.prompt for each in served] == [A, B, A, B, A]


@pytest.fixture
def never_waiting(monkeypatch):
    async def quiet(_pids):
        return True

    monkeypatch.setattr(module, "quiet", quiet)


async def test_each_round_begins_with_another_one(never_waiting):
    turns = []

    def peer(name):
        async def serve(load):
            turns.append(f"{name} x {load.stream_count}")
            return [text(A), text(B)]

        @contextmanager
        def ready():
            turns.append(f"{name} is ready")
            yield

        return Peer(Group.ENGINE, name, serve, ready)

    entries = await measure_peers(
        [peer("a"), peer("b")],
        [asked(1), asked(2)],
        rounds=2,
        orchestrator_pid=os.getpid(),
        model_pids=[os.getpid()],
    )
    assert turns[::2] == [f"{name} is ready" for name in "ababbaba"]
    assert turns[1::2] == [
        *("a x 1", "b x 1", "a x 2", "b x 2"),
        *("b x 1", "a x 1", "b x 2", "a x 2"),
    ]
    assert [(it.peer.name, it.stream_count, len(it.runs)) for it in entries] == [
        *(("a", 1, 2), ("b", 1, 2), ("a", 2, 2), ("b", 2, 2))
    ]


async def test_each_process_has_its_own_cpu_time(never_waiting, monkeypatch):
    looks = iter([[1, 1, 1, 1], [2, 11, 101, 1001]])
    monkeypatch.setattr(module, "cpu_seconds", lambda _pids: next(looks))
    peer = local_peer(Group.ENGINE, "it", lambda prompts, _: [text(it) for it in prompts])
    (entry,) = await measure_peers(
        [peer], [asked(2)], rounds=1, orchestrator_pid=5, model_pids=[6, 7]
    )
    (run,) = entry.runs
    assert (run.orchestrator_seconds, run.own_seconds, run.servers_seconds) == (1, 10, 1100)


async def test_a_run_in_which_a_request_failed_is_done_again_and_told(never_waiting):
    errors = [NoTargetError("none is left", retry_after_seconds=0.001)] * 2

    async def serve(_load):
        if errors:
            raise errors.pop()
        return [text()]

    peer = Peer(Group.SERVICES, "SI", serve)
    (entry,) = await measure_peers(
        [peer], [asked(2)], rounds=1, orchestrator_pid=os.getpid(), model_pids=[]
    )
    assert (len(entry.runs), entry.failures) == (1, ["none is left"] * 2)
    assert peer_findings(peer_rows([entry], EXPECTED))[1] == (
        "Runs in which a request failed, which were done again: SI x 2 (none is left)"
    )


async def test_what_fails_again_and_again_ends_it():
    tries = []

    async def attempt():
        tries.append(1)
        raise NoTargetError("none is left", retry_after_seconds=0.001)

    with pytest.raises(NoTargetError):
        await insist(attempt, lambda _: None)
    assert len(tries) == 5


def entries_of(*described):
    """Give entries of one text in each round: group, name, streams, seconds for each token."""
    peers = {}
    return [
        Entry(
            peers.setdefault((group, name), Peer(group, name, local_peer(group, name, list).serve)),
            streams,
            [run_of(text(seconds=each)) for each in seconds],
        )
        for group, name, streams, seconds in described
    ]


def test_ratios_are_the_medians_of_the_rounds():
    rows = peer_rows(
        entries_of(
            (Group.SERVICES, "non-SI", 1, (1, 1, 1)),
            (Group.SERVICES, "SI", 1, (8, 8, 8)),
            (Group.SERVICES, "SI", 4, (2, 4, 8)),
            (Group.ENGINE, "non-SI", 4, (1, 8, 8)),
            (Group.LIBRARY, "generate", 4, (9, 9, 9)),
            (Group.LIBRARY, "continuous batching", 4, (6, 2, 2)),
        ),
        EXPECTED,
    )
    ratios = [(row["to_one_stream"], row["to_library"], row["to_engine"]) for row in rows]
    assert ratios == [
        (1, None, None),
        (1, None, None),
        (2, 0.5, 1),  # continuous batching is the faster one, by its median
        (None, 0.25, None),
        (None, None, None),
        (None, None, None),
    ]
    assert rows[2]["tokens_per_second"] == 0.25


def test_a_row_counts_what_all_rounds_cost():
    (entry,) = entries_of((Group.SERVICES, "SI", 1, (1, 3)))
    (row,) = peer_rows([entry], EXPECTED)
    assert row["orchestrator_ms_per_token"] == pytest.approx(2 * 4 / 4)
    assert row["model_ms_per_token"] == pytest.approx(2 * 16 / 4)
    assert row["client_ms_per_token"] == pytest.approx(2 * 2 / 4)
    assert row["ttft_ms"]["p50"] == 1000
    assert row["itl_ms"]["p50"] == row["gap_ms"]["p50"] == 1000
    assert (row["text_count"], row["chosen"]) == (2, {"non-SI": 2})
    (engine,) = peer_rows(entries_of((Group.ENGINE, "non-SI", 1, (1,))), EXPECTED)
    assert engine["model_ms_per_token"] == 1
    assert engine["orchestrator_ms_per_token"] is engine["client_ms_per_token"] is None


def rows_with(group, token_ids):
    """Describe a peer of which one text of two is this."""
    peer = local_peer(group, "it", list)
    runs = [run_of(text(B), text(A, token_ids=token_ids))]
    return peer_rows([Entry(peer, 4, runs)], EXPECTED)


@pytest.mark.parametrize("group", Group)
def test_only_the_library_may_differ(group):
    for token_ids in (EXPECTED[A], (5, 9)):
        (row,) = rows_with(group, token_ids)
        is_right = token_ids == EXPECTED[A]
        assert row["different"] == (0 if is_right else 1)
        assert row["identical"] == (is_right or group is Group.LIBRARY)


@pytest.mark.parametrize(
    ("group", "code"), [(Group.SERVICES, 1), (Group.ENGINE, 1), (Group.LIBRARY, 0)]
)
def test_the_exit_code_is_that_of_our_own_outputs(monkeypatch, group, code):
    async def measured(*_, **_named):
        return [*rows_with(Group.SERVICES, (5, 6)), *rows_with(group, (5, 9))]

    monkeypatch.setattr(bench_load_peers, "_measured", measured)
    assert main(["bench", "load", "--backend=transformers"]) == code
