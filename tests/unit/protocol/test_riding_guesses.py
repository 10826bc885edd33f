"""Targets' own guesses in DSI: rows beside what is verified anyway, never later than without."""

from __future__ import annotations

import itertools

import pytest

from paceline_protocol.guesses import OwnGuesses
from paceline_protocol.messages import CapacityChanged, StartVerify
from paceline_protocol.methods import Strategy, create_method
from paceline_protocol.oracles import AgreementOracle
from paceline_protocol.proposal import NOTHING, Proposal
from paceline_protocol.simulation import ServerLatency, simulate
from paceline_protocol.task import DecodingTask
from unit.protocol.world import Models, Weather, run_world

TOKENS = 40
TARGET = 36
TREE = tuple(path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth))


def run(seed, *, ride, targets, lookahead, drafter, rate, rates, paths=TREE):
    oracle = AgreementOracle(rate, seed=seed, length=200, guesses=OwnGuesses(rates, paths))
    task = DecodingTask(oracle.prompt(3), TOKENS, lookahead=lookahead, own_guesses=ride)
    capacity = CapacityChanged(tuple(range(targets)), (0,))
    result = simulate(
        create_method(Strategy.DISTRIBUTED, task, capacity=capacity),
        oracle,
        targets=[ServerLatency(TARGET, TARGET)] * targets,
        drafters=[ServerLatency(drafter, drafter)],
    )
    assert result.token_ids == [2 * (3 + n) for n in range(TOKENS)]
    return result


# A block is drafted while a target decides one token: what the planner asks for.
@pytest.mark.parametrize(
    ("targets", "lookahead", "drafter"),
    [(1, 3, 12), (1, 8, 4), (2, 1, 25), (2, 5, 4), (3, 2, 17), (4, 4, 9), (7, 1, 4), (7, 1, 36)],
)
@pytest.mark.parametrize("rate", [0.4, 0.8])
@pytest.mark.parametrize("rates", [(0.3, 0.2, 0.2), (0.8, 0.7, 0.6)])
def test_no_token_comes_later(targets, lookahead, drafter, rate, rates):
    options = {"targets": targets, "lookahead": lookahead, "drafter": drafter}
    for seed in range(2):
        without, with_guesses = (
            run(seed, ride=ride, rate=rate, rates=rates, **options) for ride in (False, True)
        )
        late = map(int.__sub__, with_guesses.token_times, without.token_times)
        assert max(late) <= 0
        assert with_guesses.target_forwards <= without.target_forwards


def test_guesses_gain_what_they_are_worth():
    options = {"targets": 3, "lookahead": 3, "drafter": 4, "rate": 0.5}
    without, half, all_right = (
        run(1, ride=ride, rates=rates, **options)
        for ride, rates in [(False, (0.5,) * 3), (True, (0.5,) * 3), (True, (1.0,) * 3)]
    )
    assert half.total_time < 0.8 * without.total_time
    # A forward gives its own token and three guesses, if nothing is decided meanwhile.
    assert all_right.total_time <= TARGET * (2 + TOKENS // 4)


@pytest.mark.parametrize(
    ("own", "guessed", "both"),
    [
        (Proposal((5, 6)), Proposal((5, 7, 6), (0, 0, 1)), Proposal((5, 6, 7), (0, 1, 0))),
        (Proposal((5, 6)), Proposal((5, 6, 7)), Proposal((5, 6, 7))),
        (Proposal((5, 6)), Proposal((8, 6)), Proposal((5, 6, 8, 6), (0, 1, 0, 3))),
        (NOTHING, Proposal((4, 5), (0, 0)), Proposal((4, 5), (0, 0))),
    ],
)
def test_a_guess_that_is_drafted_too_is_judged_once(own, guessed, both):
    assert own.beside(guessed) == both


def test_without_them_nobody_is_asked_to_guess():
    for ride in (False, True):
        task = DecodingTask((1,), 20, own_guesses=ride)
        method = create_method(Strategy.DISTRIBUTED, task, capacity=CapacityChanged((0,), (0,)))
        (asked,) = (each for each in method.start() if isinstance(each, StartVerify))
        assert asked.propose == ride


def world(*, tree_tokens=64, seed, **options):
    task = DecodingTask((1,), 30, lookahead=2, own_guesses=True, tree_tokens=tree_tokens)
    weather = Weather(drafter_weight=0.3, failure=0.05)
    return run_world(
        Strategy.DISTRIBUTED, task, models=Models(seed, 0.8), weather=weather, seed=seed, **options
    )


@pytest.mark.parametrize("tree_tokens", [0, 2, 64])
def test_a_target_gets_trees_within_its_limit_if_it_knows_any(tree_tokens):
    # The checker looks at each of them.
    worlds = [world(tree_tokens=tree_tokens, seed=seed) for seed in range(20)]
    assert (max(max(each.widths) for each in worlds) > 1) == (tree_tokens > 0)


def test_without_a_drafter_it_is_self_speculation():
    counts = [world(seed=seed, drafter_count=0).method.command_counts for seed in range(20)]
    assert sum(each[StartVerify] for each in counts) < 0.7 * 20 * 30
