"""Targets' own guesses in SI and DSI: rows beside what is verified anyway, and nothing later."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_contract.proposal import NOTHING, Proposal
from paceline_protocol.laboratory.guesses import OwnGuesses
from paceline_protocol.laboratory.oracles import AgreementOracle
from paceline_protocol.laboratory.simulation import ServerLatency, simulate
from paceline_protocol.messages import CapacityChanged, StartVerify
from paceline_protocol.methods import Strategy, create_method
from paceline_protocol.task import DecodingTask
from support.examples import examples
from unit.protocol.world import Models, Weather, run_world

STRATEGIES = (Strategy.SPECULATIVE, Strategy.DISTRIBUTED)
TOKENS = 40
TARGET = 36
CHAIN = ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
TREE = tuple(path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth))


def run(seed, *, drafter, rate, rates, paths=TREE, targets=1, target=TARGET, call=0, **options):
    oracle = AgreementOracle(rate, seed=seed, length=200, guesses=OwnGuesses(rates, paths))
    strategy = options.pop("strategy", Strategy.DISTRIBUTED)
    task = DecodingTask(oracle.prompt(3), TOKENS, **options)
    capacity = CapacityChanged(tuple(range(targets)), (0,))
    result = simulate(
        create_method(strategy, task, capacity=capacity),
        oracle,
        targets=[ServerLatency(target, target, call=call)] * targets,
        drafters=[ServerLatency(drafter, drafter, call=call)],
    )
    assert result.token_ids == [2 * (3 + n) for n in range(TOKENS)]
    return result


def lateness(seed, **options):
    """How much later the latest token comes with guesses, and that they save forwards or none."""
    without, with_guesses = (run(seed, own_guesses=ride, **options) for ride in (False, True))
    assert with_guesses.target_forwards <= without.target_forwards
    return max(map(int.__sub__, with_guesses.token_times, without.token_times))


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
        assert lateness(seed, rate=rate, rates=rates, **options) <= 0


# With calls, a draft that begins anew where guesses have led is later by its call.
@settings(max_examples=examples(60), deadline=None)
@given(
    lookahead=st.integers(1, 8),
    window=st.sampled_from([1, 3, 64]),
    drafts_ahead=st.sampled_from([True, True, False]),
    rate=st.sampled_from([0.0, 0.4, 0.8, 0.97, 1.0]),
    rates=st.tuples(*[st.sampled_from([0.1, 0.3, 0.6, 0.9, 1.0])] * 4),
    paths=st.sampled_from([TREE, CHAIN]),
    seed=st.integers(0, 10**6),
    target=st.integers(1, 60),
    drafter=st.integers(1, 60),
    call=st.sampled_from([0, 0, 1, 5]),
)
def test_no_token_of_si_comes_later(window, call, seed, **options):
    options |= {"strategy": Strategy.SPECULATIVE, "draft_window": window, "call": call}
    assert lateness(seed, **options) <= call


@pytest.mark.parametrize(("rate", "rates"), [(0.97, (0.9, 0.1, 0.6, 0.6)), (1.0, (0.5,) * 4)])
def test_what_guesses_lead_over_keeps_no_block_of_si_waiting(rate, rates):
    """The drafter is about as quick as the target, so a block that began later would be later."""
    options = {"strategy": Strategy.SPECULATIVE, "drafts_ahead": True, "paths": CHAIN}
    for seed, (lookahead, drafter) in enumerate([(2, 28), (2, 26), (4, 9), (3, 12)] * 3):
        options |= {"lookahead": lookahead, "drafter": drafter}
        assert lateness(seed, rate=rate, rates=rates, **options) <= 0


@pytest.mark.parametrize("drafts_ahead", [False, True])
def test_guesses_gain_in_si_what_they_are_worth(drafts_ahead):
    options = {"strategy": Strategy.SPECULATIVE, "drafts_ahead": drafts_ahead, "lookahead": 3}
    times = [
        sum(
            run(n, own_guesses=ride, drafter=6, rate=0.5, rates=(0.6,) * 3, **options).total_time
            for n in range(4)
        )
        for ride in (False, True)
    ]
    assert times[1] < 0.8 * times[0]


def test_guesses_gain_what_they_are_worth():
    options = {"targets": 3, "lookahead": 3, "drafter": 4, "rate": 0.5}
    without, half, all_right = (
        run(1, own_guesses=ride, rates=rates, **options)
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_them_nobody_is_asked_to_guess(strategy):
    for ride in (False, True):
        task = DecodingTask((1,), 20, own_guesses=ride)
        # Without a drafter both begin with a verification.
        method = create_method(strategy, task, capacity=CapacityChanged((0,), ()))
        (asked,) = (each for each in method.start() if isinstance(each, StartVerify))
        assert asked.propose == ride


def world(*, strategy=Strategy.DISTRIBUTED, tree_tokens=64, seed, **options):
    task = DecodingTask((1,), 30, lookahead=2, own_guesses=True, tree_tokens=tree_tokens)
    weather = Weather(drafter_weight=0.3, failure=0.05)
    return run_world(
        strategy, task, models=Models(seed, 0.8), weather=weather, seed=seed, **options
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tree_tokens", [0, 2, 64])
def test_a_target_gets_trees_within_its_limit_if_it_knows_any(tree_tokens, strategy):
    # The checker looks at each of them.
    worlds = [world(strategy=strategy, tree_tokens=tree_tokens, seed=n) for n in range(20)]
    assert (max(max(each.widths) for each in worlds) > 1) == (tree_tokens > 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_drafter_it_is_self_speculation(strategy):
    worlds = [world(strategy=strategy, seed=seed, drafter_count=0) for seed in range(20)]
    counts = [each.method.command_counts for each in worlds]
    assert sum(each[StartVerify] for each in counts) < 0.7 * 20 * 30
