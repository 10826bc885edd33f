from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import Proposal, SparseDistribution
from paceline_contract.sampling import SamplingParameters
from paceline_engine.deciding.acceptance_rules import accept_sampled
from paceline_engine.deciding.cascade import Draw, ReviewTask
from paceline_engine.deciding.reviews import lenient_probs, review_by, stage_seed
from paceline_engine.deciding.sampling import choose_tokens
from paceline_engine.terms.calls import SessionSpec

OWN, SAID, TARGET = (0.5, 0.3, 0.2), (0.1, 0.6, 0.3), (0.2, 0.3, 0.5)
RUNS = 1000
# Hoeffding: a share of 1000 draws is off by more with p = 2 exp(-2 n 0.095^2) = 3e-8. Reporting the
# reviewer's own distribution in place of what the token was drawn from is off by 0.3.
BOUND = 0.095


def probs(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def task(draws: list[Draw], *, leniency: float, stage: int = 0) -> ReviewTask:
    said = tuple(draw.distribution for draw in draws if draw.distribution)
    proposal = Proposal(tuple(draw.token_id for draw in draws), (), said)
    return ReviewTask(proposal, draws=tuple(draws), stage=stage, leniency=leniency)


def spec(rule: VerificationRule, seed: int = 0, temperature: float = 1.0) -> SessionSpec:
    return SessionSpec(99, SamplingParameters(temperature), seed=seed, rule=rule)


@pytest.mark.parametrize(
    ("leniency", "expected"),
    [(1, OWN), (1.5, (0.25, 0.45, 0.30)), (2, SAID), (7, SAID)],
)
def test_what_a_lenient_token_is_drawn_from(leniency, expected):
    mixed = lenient_probs(probs(*OWN), probs(*SAID), leniency=leniency)
    assert mixed.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("leniency", [1, 1.5, 3])
def test_a_token_is_drawn_from_what_is_reported(leniency):
    """And the target that is told so gives its own distribution, whatever the leniency."""
    chance = random.Random(5)
    reviewed, output = Counter(), Counter()
    reported = None
    for seed in range(RUNS):
        drafted = chance.choices(range(3), SAID)[0]
        draw = Draw(drafted, stage=1, distribution=SparseDistribution((0, 1, 2), SAID))
        given = review_by(
            torch.stack([probs(*OWN)] * 2).log(),
            task([draw], leniency=leniency),
            spec=spec(VerificationRule.REJECTION, seed),
            position=4,
        )
        first = given.draws[0]
        reported = first.distribution
        reviewed[first.token_id] += 1
        accepted, next_token = accept_sampled(
            (first.token_id,),
            torch.stack([probs(*TARGET)] * 2).log(),
            distributions=[reported],
            first_position=4,
            parameters=SamplingParameters(1.0),
            seed=seed,
        )
        output[first.token_id if accepted else next_token] += 1
    mixed = lenient_probs(probs(*OWN), probs(*SAID), leniency=leniency).tolist()
    said = dict(zip(reported.token_ids, reported.probabilities, strict=True))
    assert [said[token] for token in range(3)] == pytest.approx(mixed, rel=1e-6)
    for token in range(3):
        assert reviewed[token] / RUNS == pytest.approx(mixed[token], abs=BOUND)
        assert output[token] / RUNS == pytest.approx(TARGET[token], abs=BOUND)


def test_after_a_chain_accepted_whole_the_stage_draws_one_itself():
    certain = SparseDistribution((1,), (1.0,))
    counts = Counter()
    logits = torch.tensor([[-40.0, 0.0, -40.0], [*probs(*OWN).log().tolist()]])
    for seed in range(RUNS):
        given = review_by(
            logits,
            task([Draw(1, stage=1, distribution=certain)], leniency=1),
            spec=spec(VerificationRule.REJECTION, seed),
            position=4,
        )
        assert given.accepted_path == (0,)
        counts[given.next_token] += 1
    for token in range(3):
        assert counts[token] / RUNS == pytest.approx(OWN[token], abs=BOUND)


def test_under_exact_the_stage_accepts_what_it_would_have_drafted():
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for seed in range(20):
        own = choose_tokens(logits, first_position=4, parameters=SamplingParameters(1.0), seed=seed)
        drafted = [*own[:2], (own[2] + 1) % 8]
        given = review_by(
            logits,
            task([Draw(token) for token in drafted], leniency=1),
            spec=spec(VerificationRule.EXACT, seed),
            position=4,
        )
        assert [draw.token_id for draw in given.draws] == own[:3]
        assert given.accepted_path == (0, 1)
        assert all(draw.distribution is None for draw in given.draws)


@pytest.mark.parametrize(("leniency", "accepted"), [(1, 0), (1.9, 0), (2.1, 1)])
def test_a_lenient_stage_accepts_what_is_not_much_too_likely(leniency, accepted):
    logits = torch.stack([probs(0.6, 0.4)] * 2).log()
    drafted = Draw(1, probability=0.8)
    given = review_by(
        logits,
        task([drafted], leniency=leniency, stage=1),
        spec=spec(VerificationRule.EXACT, temperature=0),
        position=4,
    )
    assert len(given.accepted_path) == accepted
    assert given.draws[0].token_id == (1 if accepted else 0)
    assert given.draws[0].stage == 1
    if accepted:
        assert given.draws[0].probability == pytest.approx(0.4)


def test_at_temperature_0_under_rejection_a_token_is_certain():
    given = review_by(
        torch.stack([probs(0.6, 0.4)] * 2).log(),
        task([Draw(1, distribution=SparseDistribution((1,), (1.0,)))], leniency=3),
        spec=spec(VerificationRule.REJECTION, temperature=0),
        position=4,
    )
    assert [draw.distribution for draw in given.draws] == [
        SparseDistribution((1,), (1.0,)),
        SparseDistribution((0,), (1.0,)),
    ]


def test_no_session_has_the_seed_of_a_stage():
    assert stage_seed(0, 0) >= 1 << 53
    seeds = {stage_seed(seed, stage) for seed in (0, (1 << 53) - 1) for stage in range(8)}
    assert len(seeds) == 16
    assert max(seeds) < 1 << 64
