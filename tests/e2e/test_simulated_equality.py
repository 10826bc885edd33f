"""Many tokens through real processes and simulated models: every one as in plain decoding.

A simulated target's token is a hash of the whole text before it, in exact arithmetic. So there is
no near-tie to excuse, and one wrong token anywhere shows in all that follow it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from paceline import Strategy
from support.cells import ACCEPTANCE, OVERLAPS, TARGETS, Cell, Outcome, missing_evidence
from support.processes import running
from support.streams import mishaps
from support.system import System, simulated_model

# Acceptance rate, a draft token's time over a target token's, and streams for each strategy: fewer
# where a token costs more calls. The last drafter is slower than its target.
RUNS = [
    (0.0, 0.3, 4),
    (0.3, 0.3, 6),
    (0.6, 0.3, 10),
    (0.9, 0.3, 28),
    (1.0, 0.3, 48),
    (0.6, 3.0, 4),
]
STRATEGIES = (Strategy.SPECULATIVE, Strategy.DISTRIBUTED)
# A quarter of all streams is the long form, and all of them, 100,000 tokens with chains, the full
# one. In `make test` test_equality.py does the same with real models.
STREAM_TOKENS, PROMPTS, TOTAL = 500, 12, 100_000
# Width, branches, and streams for each strategy: as many tokens once more, with trees.
TREE_RUNS = [(2, 0, 17), (2, 4, 17), (2, 16, 17), (4, 0, 17), (4, 4, 16), (4, 16, 16)]
MANY_TOKENS = 400  # their acceptance rate is within 0.15 of the true one in all but 1 in 10^9 runs
TARGET_SECONDS, TARGET_COUNT, LOOKAHEAD, STREAMS_AT_ONCE = 0.001, 2, 4, 2
# Streams of a run that are decoded alone in the system, until the servers have seen all there is to
# see of the strategy. It depends on timing how many that takes.
FEWEST_ALONE, MOST_ALONE = 2, PROMPTS


def long_and_full(runs):
    """The runs for the long form, with a quarter of their streams, and for the full one."""
    quarters = [(*way, max(FEWEST_ALONE, -(-count // 4))) for *way, count in runs]
    return [
        *(pytest.param(*run, marks=pytest.mark.long) for run in quarters),
        *(pytest.param(*run, marks=pytest.mark.full) for run in runs),
    ]


def prompt(index):
    return f"stream {index % PROMPTS}:"


def decode(system, index, **options):
    with system.client() as client:
        return client.generate(prompt(index), max_tokens=STREAM_TOKENS, **options).collect()


@pytest.fixture(scope="module")
def targets():
    servers = [
        simulated_model("target", index, seconds=TARGET_SECONDS) for index in range(TARGET_COUNT)
    ]
    with running(*servers):
        yield servers


@pytest.fixture(scope="module")
def plain(targets):
    """Return a stream of plain decoding, each decoded when it is first asked for."""
    system = System(drafters=[], targets=targets)

    @cache
    def stream(index):
        return decode(system, index, strategy=Strategy.AUTOREGRESSIVE).token_ids

    with system.running():
        yield lambda index: stream(index % PROMPTS)


def test_the_runs_add_up():
    for runs in (RUNS, TREE_RUNS):
        assert sum(count for _, _, count in runs) * len(STRATEGIES) * STREAM_TOKENS == TOTAL


@pytest.mark.parametrize(
    ("acceptance_rate", "relative_latency", "stream_count"),
    long_and_full(RUNS),
)
def test_every_token_is_that_of_plain_decoding(
    acceptance_rate, relative_latency, stream_count, targets, plain
):
    drafter = simulated_model(
        "drafter",
        seconds=relative_latency * TARGET_SECONDS,
        simulated_acceptance_rate=acceptance_rate,
    )
    system = System(drafters=[drafter], targets=targets)
    with system.running():
        for strategy in STRATEGIES:
            decoded, seen = decode_some(
                system,
                strategy,
                stream_count,
                beyond=beyond_reach(strategy, acceptance_rate, relative_latency),
            )
            for index, done in enumerate(decoded):
                assert done.token_ids == plain(index)
            judged, accepted = check_happened(decoded, strategy=strategy)
            # In DSI a drafter that errs, or is overtaken, is stopped.
            if strategy is Strategy.DISTRIBUTED and acceptance_rate < 1:
                assert seen.servers_withdrawn > 0
            # In DSI the targets do not wait for a drafter that is slow, or on a busy machine, and
            # may decide most tokens themselves.
            assert strategy is Strategy.DISTRIBUTED or judged > MANY_TOKENS
            if judged > MANY_TOKENS:
                assert accepted / judged == pytest.approx(acceptance_rate, abs=0.15)


@pytest.mark.parametrize(("width", "branches", "stream_count"), long_and_full(TREE_RUNS))
def test_with_trees_too_every_token_is_that_of_plain_decoding(
    width, branches, stream_count, targets, plain
):
    drafter = simulated_model(
        "drafter", seconds=0.3 * TARGET_SECONDS, simulated_acceptance_rate=0.6
    )
    system = System(drafters=[drafter], targets=targets)
    with system.running():
        for strategy in STRATEGIES:
            decoded, _ = decode_some(system, strategy, stream_count, width=width, branches=branches)
            for index, done in enumerate(decoded):
                assert done.token_ids == plain(index)
            judged, _ = check_happened(decoded, strategy=strategy)
            assert strategy is Strategy.DISTRIBUTED or judged > MANY_TOKENS  # as above


def decode_some(system, strategy, stream_count, *, beyond=frozenset(), **shape):
    """Decode streams, the first ones alone; return all, and what servers saw of those."""
    options = {"strategy": strategy, "lookahead": LOOKAHEAD, "targets": TARGET_COUNT, **shape}
    decoded, seen = decode_alone(system, options, beyond=beyond)
    with ThreadPoolExecutor(STREAMS_AT_ONCE) as threads:
        decoded += threads.map(
            lambda index: decode(system, index, **options), range(len(decoded), stream_count)
        )
    return decoded, seen


def decode_alone(system, options, *, beyond):
    """Decode streams one by one, until the servers' own records show that the strategy happened.

    Returns:
        The streams, and what the servers saw of them.
    """
    shape = options.get("width", 1), options.get("branches", 0)
    cell = Cell(options["strategy"], LOOKAHEAD, TARGET_COUNT, "greedy", *shape)
    decoded, outcome, missing = [], Outcome(), []
    while len(decoded) < FEWEST_ALONE or (missing and len(decoded) < MOST_ALONE):
        evidence = system.watch()
        with evidence.gathered():
            decoded.append(decode(system, len(decoded), **options))
        outcome.add(decoded[-1], evidence)
        missing = set(missing_evidence(cell, outcome, undisturbed_runs=FEWEST_ALONE)) - beyond
    assert not missing, outcome
    return decoded, outcome


def beyond_reach(strategy, acceptance_rate, relative_latency):
    """Return the evidence that these models cannot be asked for."""
    if strategy is Strategy.DISTRIBUTED and relative_latency > 1:
        # A target has decided nearly every token before the drafter has drafted it.
        return {ACCEPTANCE, TARGETS, OVERLAPS}
    return set() if acceptance_rate else {ACCEPTANCE}


def check_happened(decoded, *, strategy):
    """The draft tokens that were judged, and those accepted."""
    statistics = [done.finished.statistics for done in decoded]
    assert {done.started.strategy for done in decoded} == {strategy}
    assert not mishaps(*decoded)
    accepted = sum(each.accepted_token_count for each in statistics)
    return accepted + sum(each.rejected_token_count for each in statistics), accepted
