"""Branches never delay the main path: given free rows, trees are never slower than chains."""

from __future__ import annotations

import pytest

from paceline_protocol.laboratory.oracles import AgreementOracle
from paceline_protocol.laboratory.simulation import ServerLatency, simulate
from paceline_protocol.messages import CapacityChanged
from paceline_protocol.methods import Strategy, create_method
from paceline_protocol.task import DecodingTask, DispatchPolicy

TOKENS = 40
TARGET, DRAFTER = 36, 4
# With several targets at once, a verification that begins earlier may keep a target busy when a
# later one would have had it. By so much of a forward a token may be late; met was none.
TOLERANCE = 0.5


def run(seed, *, targets, lookahead, rate, width, branches=0, dispatch, latency=DRAFTER):
    oracle = AgreementOracle(rate, seed=seed, length=200)
    task = DecodingTask(
        oracle.prompt(3),
        TOKENS,
        lookahead=lookahead,
        width=width,
        branches=branches,
        dispatch=dispatch,
    )
    capacity = CapacityChanged(tuple(range(targets)), (0,))
    method = create_method(Strategy.DISTRIBUTED, task, capacity=capacity)
    result = simulate(
        method,
        oracle,
        targets=[ServerLatency(TARGET, TARGET)] * targets,
        drafters=[ServerLatency(latency, latency)],
    )
    assert result.token_ids == [2 * (3 + n) for n in range(TOKENS)]
    return result, method.statistics


@pytest.mark.parametrize("dispatch", DispatchPolicy)
@pytest.mark.parametrize(("targets", "lookahead"), [(1, 3), (2, 5), (3, 3), (7, 1)])
@pytest.mark.parametrize("branches", [0, 4])
@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_with_width_no_token_comes_later(targets, lookahead, branches, rate, dispatch):
    for seed in range(3):
        chains, _ = run(
            seed, targets=targets, lookahead=lookahead, rate=rate, width=1, dispatch=dispatch
        )
        trees, _ = run(
            seed,
            targets=targets,
            lookahead=lookahead,
            rate=rate,
            width=3,
            branches=branches,
            dispatch=dispatch,
        )
        late = (b - a for a, b in zip(chains.token_times, trees.token_times, strict=True))
        assert max(late) <= TOLERANCE * TARGET
        assert trees.total_time <= chains.total_time


def test_trees_gain_what_their_corrections_are_worth():
    """Half of the tokens are wrong; of these a width of 4 finds 0.78, and 0.4 follow at once."""
    options = {
        "targets": 3,
        "lookahead": 3,
        "rate": 0.5,
        "dispatch": DispatchPolicy.WORK_CONSERVING,
    }
    chains, plain = run(1, width=1, **options)
    trees, counts = run(1, width=4, branches=4, **options)
    assert plain.corrections_ahead == plain.branch_judged == 0
    assert counts.corrections_ahead >= 5
    assert 0 < counts.branch_accepted <= counts.branch_judged
    assert trees.total_time < 0.8 * chains.total_time
    assert trees.target_forwards < chains.target_forwards
