from __future__ import annotations

import pytest
import torch

from paceline.errors import InternalError
from paceline_contract.proposal import Proposal, SparseDistribution
from paceline_contract.sampling import SamplingParameters
from paceline_engine.deciding import acceptance_rules, sampling
from paceline_engine.deciding.acceptance_rules import (
    accept_along,
    accept_exact,
    accept_sampled,
    residual_scores,
)
from paceline_engine.deciding.sampling import choose_tokens, draw_draft, filtered_scores

SAMPLING = SamplingParameters(temperature=1.0)


def random_logits(rows: int, vocabulary: int, *, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 1.5


@pytest.mark.parametrize("rows_at_once", [1, 2, 100])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_exact_is_plain_decoding(temperature, rows_at_once, monkeypatch):
    monkeypatch.setattr(sampling, "_MOST_NUMBERS", rows_at_once * 40)
    logits = random_logits(6, 40, seed=3)
    settings = {"parameters": SamplingParameters(temperature=temperature), "seed": 17}
    plain = [
        choose_tokens(logits[row : row + 1], first_position=100 + row, **settings)[0]
        for row in range(6)
    ]
    for wrong_at in range(6):
        block = plain[:5]
        if wrong_at < 5:
            block[wrong_at] = (block[wrong_at] + 1) % 40
        assert accept_exact(block, logits, first_position=100, **settings) == (
            wrong_at,
            plain[wrong_at],
        )


@pytest.mark.parametrize("rule", ["exact", "rejection"])
def test_rows_beyond_the_first_rejection_are_not_looked_at(rule, monkeypatch):
    """Of a block of 16 and 128,000 tokens they would cost more than the forward."""
    looked_at, filtered = [], sampling.filtered_scores

    def watched(logits, parameters):
        looked_at.append(len(logits))
        return filtered(logits, parameters)

    for module in (sampling, acceptance_rules):
        monkeypatch.setattr(module, "filtered_scores", watched)
    monkeypatch.setattr(sampling, "_MOST_NUMBERS", 2 * 40)
    logits = random_logits(9, 40, seed=3)
    worst = logits.argmin(-1).tolist()[:8]
    settings = {"first_position": 100, "parameters": SamplingParameters(0.1), "seed": 17}
    if rule == "exact":
        accepted, _ = accept_exact(worst, logits, **settings)
    else:
        said = [SparseDistribution((token,), (1.0,)) for token in worst]
        accepted, _ = accept_sampled(worst, logits, distributions=said, **settings)
    assert (accepted, looked_at) == (0, [2])


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_tree_is_decided_as_its_chains_are(temperature, at_once):
    logits = random_logits(5, 40, seed=3)
    settings = {"parameters": SamplingParameters(temperature=temperature), "seed": 17}
    first, second = (
        choose_tokens(logits[row : row + 1], first_position=100 + depth, **settings)[0]
        for row, depth in ((0, 0), (2, 1))
    )
    wrong = (first + 1) % 40
    # Below the wrong token and below the right one the same two follow.
    tree = Proposal((wrong, first, second, second), parents=(0, 0, 1, 2))
    path, next_token = accept_along(tree, logits, first_position=100, at_once=at_once, **settings)
    rows = logits[[0, 2, 4]]
    chain = accept_exact((first, second), rows, first_position=100, **settings)
    if path == (1,):  # what follows the right token is not what row 2 says
        assert chain[0] == 1
    else:
        assert path == (1, 3)
    assert (len(path), next_token) == chain


def test_rejection_at_temperature_zero_is_exact():
    logits = random_logits(4, 30, seed=4)
    best = logits.argmax(-1).tolist()
    point_masses = [SparseDistribution((token,), (1.0,)) for token in [*best[:2], 0]]
    settings = {"first_position": 5, "parameters": SamplingParameters(), "seed": 1}
    block = [*best[:2], (best[2] + 1) % 30]
    assert accept_sampled(block, logits, distributions=point_masses, **settings) == accept_exact(
        block, logits, **settings
    )


def test_a_draft_from_the_targets_own_distribution_is_always_accepted():
    logits = random_logits(1, 20, seed=5)
    for position in range(200):
        token, said = draw_draft(logits, position=position, parameters=SAMPLING, seed=1)
        accepted, _ = accept_sampled(
            [token],
            logits.expand(2, 20),
            distributions=[said],
            first_position=position,
            parameters=SAMPLING,
            seed=1,
        )
        assert accepted == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("row", [0, 1])
def test_scores_that_are_no_numbers_are_an_error_not_an_acceptance(bad, row):
    logits = torch.zeros(2, 4)
    logits[row, 3] = bad
    # The target's own distribution: with sound scores every coin accepts.
    said = SparseDistribution((0, 1, 2, 3), (0.25,) * 4)
    with pytest.raises(InternalError):
        accept_sampled(
            [2],
            logits,
            distributions=[said],
            first_position=0,
            parameters=SAMPLING,
            seed=1,
        )


def test_rejection_is_lossless():
    # Two positions of n = 3000 texts, 6 tokens. Hoeffding: a share of the first is off by more than
    # 0.054 with p = 2 exp(-2 n 0.054^2) = 5e-8; the second has 1700 texts or more (1950 expected,
    # acceptance is 0.65), and 0.072 has p = 5e-8. With 12 shares: false alarm below 1e-6.
    # A target's draw in place of the residual's would put the first share off by 0.11.
    n, vocabulary = 3000, 6
    target = torch.tensor([[0.4, 0.25, 0.15, 0.1, 0.06, 0.04]]).log()
    draft = torch.tensor([[0.15, 0.15, 0.3, 0.2, 0.1, 0.1]]).log()
    target_rows = target.expand(2, vocabulary)
    first, second = torch.zeros(vocabulary), torch.zeros(vocabulary)
    for text in range(n):
        position = 2 * text
        token, said = draw_draft(draft, position=position, parameters=SAMPLING, seed=21)
        accepted, decided = accept_sampled(
            [token],
            target_rows,
            distributions=[said],
            first_position=position,
            parameters=SAMPLING,
            seed=21,
        )
        first[token if accepted else decided] += 1
        if accepted:
            second[decided] += 1
    # Accepting everything would pass a test of acceptance alone, so the rate itself is checked.
    draft_probs, expected = draft[0].softmax(-1), target[0].softmax(-1)
    assert abs(second.sum() / n - torch.minimum(draft_probs, expected).sum()) < 0.054
    assert (first / n - expected).abs().max() < 0.054
    assert second.sum() > 1700
    assert (second / second.sum() - expected).abs().max() < 0.072


def test_acceptance_and_residual_make_up_the_target_exactly():
    # The algebra behind the test above, without sampling: no false alarms, rounding only.
    for seed in range(20):
        parameters = SamplingParameters(temperature=0.8, top_p=0.9)
        target_probs = filtered_scores(random_logits(1, 12, seed=seed), parameters)[0].softmax(-1)
        draft_logits = random_logits(1, 12, seed=seed + 100)
        _, said = draw_draft(draft_logits, position=0, parameters=parameters, seed=0)
        draft_probs = torch.zeros(12, dtype=torch.float64)
        draft_probs[list(said.token_ids)] = torch.tensor(said.probabilities, dtype=torch.float64)
        draft_probs /= draft_probs.sum()
        accepted = torch.minimum(target_probs, draft_probs)
        residual = residual_scores(target_probs, said).softmax(-1)
        total = accepted + (1 - accepted.sum()) * residual
        assert torch.allclose(total, target_probs, atol=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_after_a_rejected_token_the_model_need_not_compute_numbers(temperature, bad):
    """Plain decoding never asks what follows it."""
    settings = {"parameters": SamplingParameters(temperature=temperature), "seed": 17}
    logits = random_logits(4, 40, seed=3)
    (first,) = choose_tokens(logits[:1], first_position=0, **settings)
    logits[1:] = bad
    wrong = (first + 1) % 40
    assert accept_exact([wrong, 1, 2], logits, first_position=0, **settings) == (0, first)
    with pytest.raises(InternalError):
        accept_exact([first, 1, 2], logits, first_position=0, **settings)
