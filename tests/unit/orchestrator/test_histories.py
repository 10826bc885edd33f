"""Requests at servers that fail at random moments: no token, no time, no server is lost by it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from support.virtual_scenario import FAULTS, Fault, Scenario, Wish, play
from support.virtual_time import StuckError, run_virtually

BATCH, LONG_BATCH = 20, 500
STRATEGIES = [pb.STRATEGY_DISTRIBUTED, pb.STRATEGY_SPECULATIVE, pb.STRATEGY_AUTOREGRESSIVE]


def draw_wish(random):
    width = random.choice([1, 1, 2, 4])
    return Wish(
        strategy=random.choice(STRATEGIES),
        max_tokens=random.randint(1, 80),
        lookahead=random.randint(1, 5),
        target_count=random.randint(1, 4),
        drafter_count=random.randint(1, 2),
        width=width,
        branches=random.choice([0, 3]) if width > 1 else 0,
        at=random.choice([0.0, 0.1, 1.0]),
        seconds=random.choice([60.0, 60.0, 60.0, 60.0, 0.4, 3.0]),
        leaves_after=random.choice([None] * 6 + [0.01, 0.3, 2.0]),
    )


def draw_scenario(seed):
    random = Random(seed)
    target_count, drafter_count = random.randint(1, 4), random.choice([0, 1, 1, 2])
    servers = [f"target-{index}" for index in range(target_count)]
    servers += [f"drafter-{index}" for index in range(drafter_count)]
    faults = [
        Fault(
            kind=random.choice(sorted(FAULTS)),
            server=random.choice(servers),
            at=random.randint(0, 40) / 20,
            seconds=random.choice([0.05, 0.5, 3.0, 8.0]),
        )
        for _ in range(random.randint(0, 6))
    ]
    return Scenario(
        wishes=tuple(draw_wish(random) for _ in range(random.randint(1, 3))),
        target_count=target_count,
        drafter_count=drafter_count,
        agreement=random.choice([0.0, 0.5, 0.8, 1.0]),
        eos_at=random.choice([None, None, None, 30]),
        faults=tuple(faults),
        seed=seed + 1,
    )


def findings(scenario):
    try:
        return run_virtually(play(scenario)).findings()
    except StuckError as stuck:
        return [str(stuck)]


def smaller(scenario):
    """Yield what is left without one of its parts."""
    for index in range(len(scenario.faults)):
        faults = scenario.faults[:index] + scenario.faults[index + 1 :]
        yield replace(scenario, faults=faults)
    for index, wish in enumerate(scenario.wishes):
        others = scenario.wishes[:index], scenario.wishes[index + 1 :]
        if len(scenario.wishes) > 1:
            yield replace(scenario, wishes=others[0] + others[1])
        if wish.max_tokens > 1:
            shorter = replace(wish, max_tokens=wish.max_tokens // 2)
            yield replace(scenario, wishes=(*others[0], shorter, *others[1]))


def shrunk(scenario):
    """Return the smallest one in which something is found; its servers are the same."""
    for candidate in smaller(scenario):
        if findings(candidate):
            return shrunk(candidate)
    return scenario


def check(seeds, *, draw=draw_scenario):
    for seed in seeds:
        scenario = draw(seed)
        if findings(scenario):
            history = run_virtually(play(shrunk(scenario)))
            pytest.fail(f"seed {seed}: {history.tell()}", pytrace=False)


@pytest.mark.parametrize("first", range(0, 80, BATCH))
def test_whatever_fails_the_promises_hold(first):
    check(range(first, first + BATCH))


def draw_auto_scenario(seed):
    """Draw one whose requests leave it to AUTO; drafters are often wrong, or of short contexts."""
    random, scenario = Random(f"auto {seed}"), draw_scenario(seed)
    open_wishes = [
        replace(
            wish,
            strategy=random.choice([pb.STRATEGY_AUTO, wish.strategy]),
            max_tokens=random.choice([wish.max_tokens, 200]),
            lookahead=0,
            target_count=0,
            width=1,
            branches=0,
        )
        for wish in scenario.wishes
    ]
    return replace(
        scenario,
        wishes=tuple(open_wishes),
        agreement=random.choice([0.0, 0.3, 0.9]),
        contexts=tuple(random.choices([20, 50, 90, 4096], k=scenario.drafter_count)),
    )


@pytest.mark.parametrize("first", [0, pytest.param(BATCH, marks=pytest.mark.long)])
def test_whatever_fails_the_promises_hold_where_auto_changes_its_mind(first):
    check(range(first, first + BATCH), draw=draw_auto_scenario)


@pytest.mark.parametrize(
    "first",
    [
        *(pytest.param(it, marks=pytest.mark.long) for it in range(1000, 1500, LONG_BATCH)),
        *(pytest.param(it, marks=pytest.mark.full) for it in range(1500, 4000, LONG_BATCH)),
    ],
)
def test_whatever_fails_the_promises_hold_in_thousands_of_histories(first):
    check(range(first, first + LONG_BATCH))
