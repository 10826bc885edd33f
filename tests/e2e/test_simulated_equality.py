"""100,000 tokens through real processes and simulated models: every one as in plain decoding.

A simulated target's token is a hash of the whole text before it, in exact arithmetic. So there is
no near-tie to excuse, and one wrong token anywhere shows in all that follow it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline import Strategy
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
STREAM_TOKENS, PROMPTS, TOTAL = 500, 12, 100_000
MANY_TOKENS = 400  # their acceptance rate is within 0.15 of the true one in all but 1 in 10^9 runs
TARGET_SECONDS, TARGET_COUNT, LOOKAHEAD, STREAMS_AT_ONCE = 0.001, 2, 4, 2


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
    """The streams of plain decoding."""
    system = System(drafters=[], targets=targets)
    with running(*system.orchestrators), ThreadPoolExecutor(STREAMS_AT_ONCE) as threads:
        streams = threads.map(
            lambda index: decode(system, index, strategy=Strategy.AUTOREGRESSIVE),
            range(PROMPTS),
        )
        return [done.token_ids for done in streams]


def test_the_runs_add_up():
    assert sum(count for _, _, count in RUNS) * len(STRATEGIES) * STREAM_TOKENS == TOTAL


@pytest.mark.parametrize(("acceptance_rate", "relative_latency", "stream_count"), RUNS)
def test_every_token_is_that_of_plain_decoding(
    acceptance_rate, relative_latency, stream_count, targets, plain
):
    drafter = simulated_model(
        "drafter",
        seconds=relative_latency * TARGET_SECONDS,
        simulated_acceptance_rate=acceptance_rate,
    )
    system = System(drafters=[drafter], targets=targets)
    with running(drafter, *system.orchestrators), ThreadPoolExecutor(STREAMS_AT_ONCE) as threads:
        for strategy in STRATEGIES:
            options = {"strategy": strategy, "lookahead": LOOKAHEAD, "targets": TARGET_COUNT}
            decoded = list(
                threads.map(
                    lambda index, options=options: decode(system, index, **options),
                    range(stream_count),
                )
            )
            for index, done in enumerate(decoded):
                assert done.token_ids == plain[index % PROMPTS]
            judged, accepted = check_happened(decoded, strategy=strategy)
            # In DSI a drafter that is slower than its target seldom drafts a token before the
            # target has decided it, so there is next to nothing to estimate a rate from.
            if strategy is Strategy.SPECULATIVE or relative_latency < 1:
                assert judged > MANY_TOKENS
                assert accepted / judged == pytest.approx(acceptance_rate, abs=0.15)


def check_happened(decoded, *, strategy):
    """The draft tokens that were judged, and those accepted."""
    statistics = [done.finished.statistics for done in decoded]
    assert {done.started.strategy for done in decoded} == {strategy}
    assert not any(map(mishaps, decoded))
    accepted = sum(each.accepted_token_count for each in statistics)
    return accepted + sum(each.rejected_token_count for each in statistics), accepted
