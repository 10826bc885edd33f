"""The rule by which a stage of a stack accepts what smaller stages drafted for it.

Letters: T draft tokens, V the tokenizer's vocabulary; here p is the reviewer's distribution, q what
a draft token was drawn from, l >= 1 the leniency (Chen et al. 2023, arXiv 2312.11462, section 3;
Leviathan's is its reciprocal).

Under EXACT and at temperature 0 a token is accepted if it is the reviewer's own choice with the
noise that all models share; with l > 1 also if p(x) > q(x) / l. A target's output does not depend
on the draft, so leniency can only cost acceptance.

Under REJECTION a token is accepted with probability min(1, l p(x) / q(x)), else replaced by a draw
from max(0, p - q). So it is drawn from

    q~ = min(q, l p) + (1 - sum min(q, l p)) norm(max(0, p - q))

Difference: the paper reports p for such a token, which is wrong for l > 1: the next judge needs q~.
A lenient review is an ordinary review with q~ in the target's place, because min(q, q~) is
min(q, l p), and q~ is above q where p is. This module computes it in that way, with q~ rounded as
it is reported.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import SparseDistribution
from paceline_engine.deciding.acceptance_rules import residual_scores
from paceline_engine.deciding.cascade import Draw, Reviewed
from paceline_engine.deciding.gumbel import add_noise
from paceline_engine.deciding.noise import Purpose, noise_bits, uniform
from paceline_engine.deciding.sampling import (
    argmax_tokens,
    choose_tokens,
    cut_distribution,
    filtered_scores,
)

if TYPE_CHECKING:
    from torch import Tensor

    from paceline_engine.deciding.cascade import ReviewTask
    from paceline_engine.terms.calls import SessionSpec

_SEED_BITS = 53


def review_by(logits: Tensor, task: ReviewTask, *, spec: SessionSpec, position: int) -> Reviewed:
    """Review a chain.

    Args:
        logits: (T + 1, V), any float dtype; row t follows the chain's first t tokens.
        position: The position of its first token.

    Invariants:
        Under REJECTION each token is drawn from its draw's distribution, given the tokens before,
        and independently of the noise of all other stages and of targets
        (tests/unit/engine/test_reviews.py::test_a_token_is_drawn_from_what_is_reported).
    """
    if spec.rule is VerificationRule.REJECTION and spec.sampling.temperature > 0:
        draws = _review_sampled(logits, task, spec=spec, position=position)
    else:
        draws = _review_chosen(logits, task, spec=spec, position=position)
    accepted_count = len(draws) - 1
    return Reviewed(tuple(range(accepted_count)), draws[-1].token_id, draws=tuple(draws))


def stage_seed(seed: int, stage: int) -> int:
    """Return the seed of a stage's noise under REJECTION, which no session and no other stage has.

    Sessions' seeds are below 2^53, and the generator takes 64 bits.
    """
    return seed + ((stage + 1) << _SEED_BITS)


def lenient_probs(own_probs: Tensor, draft_probs: Tensor, *, leniency: float) -> Tensor:
    """Return q~, the distribution of a lenient review's token.

    Args:
        own_probs: (V,) float64, sums to 1; p.
        draft_probs: (V,) float64, sums to 1; q.
    """
    if leniency == 1:
        return own_probs
    accepted = torch.minimum(draft_probs, leniency * own_probs)
    missing = (own_probs - draft_probs).clamp(min=0)
    if not bool(missing.any()):
        return own_probs
    return accepted + (1 - accepted.sum()).clamp(min=0) * missing / missing.sum()


def _review_chosen(
    logits: Tensor, task: ReviewTask, *, spec: SessionSpec, position: int
) -> list[Draw]:
    chosen = choose_tokens(
        logits, first_position=position, parameters=spec.sampling, seed=spec.seed
    )
    probs = _probs(logits, spec) if task.leniency > 1 else None
    draws: list[Draw] = []
    for index, own in enumerate(chosen):
        drafted = task.draws[index] if index < len(task.draws) else None
        accepted = drafted is not None and (
            drafted.token_id == own
            or (
                probs is not None
                and float(probs[index, drafted.token_id]) > drafted.probability / task.leniency
            )
        )
        token = drafted.token_id if drafted is not None and accepted else own
        # The noise is fixed, so after the tokens before it no other token was possible.
        certain = SparseDistribution.certain(token)
        draws.append(
            Draw(
                token,
                stage=task.stage,
                probability=1.0 if probs is None else float(probs[index, token]),
                distribution=certain if spec.rule is VerificationRule.REJECTION else None,
                is_forced=drafted is not None and accepted and drafted.is_forced,
            )
        )
        if not accepted:
            break
    return draws


def _probs(logits: Tensor, spec: SessionSpec) -> Tensor:
    if spec.sampling.temperature == 0:
        return logits.double().softmax(-1)
    return filtered_scores(logits, spec.sampling).softmax(-1)


def _review_sampled(
    logits: Tensor, task: ReviewTask, *, spec: SessionSpec, position: int
) -> list[Draw]:
    scores = filtered_scores(logits, spec.sampling)
    seed = stage_seed(spec.seed, task.stage)
    draws: list[Draw] = []
    for index, drafted in enumerate(task.draws):
        assert drafted.distribution is not None
        own = _dense(_rounded(scores[index].softmax(-1)), like=scores)
        said = _dense(drafted.distribution, like=scores)
        reported = _rounded(lenient_probs(own, said, leniency=task.leniency))
        wanted = _dense(reported, like=scores)
        token, at = drafted.token_id, position + index
        coin = uniform(noise_bits(seed, at, token_id=0, purpose=Purpose.ACCEPT))
        if coin * float(said[token]) < float(wanted[token]):
            draws.append(_drawn(token, reported, stage=task.stage, like=drafted))
            continue
        residual = residual_scores(wanted, drafted.distribution)
        token = _draw(residual, position=at, seed=seed, purpose=Purpose.RESIDUAL)
        return [*draws, _drawn(token, reported, stage=task.stage)]
    last = _rounded(scores[-1].softmax(-1))
    at = position + len(task.draws)
    token = _draw(_dense(last, like=scores).log(), position=at, seed=seed, purpose=Purpose.DRAFT)
    return [*draws, _drawn(token, last, stage=task.stage)]


def _rounded(probs: Tensor) -> SparseDistribution:
    """Cut a distribution to its likeliest tokens, and round it, as it is reported."""
    token_ids, probabilities = cut_distribution(probs.log())
    return SparseDistribution(tuple(token_ids.tolist()), tuple(probabilities.tolist()))


def _dense(distribution: SparseDistribution, *, like: Tensor) -> Tensor:
    """Return a distribution as (V,) float64 that sums to 1."""
    token_ids = torch.tensor(distribution.token_ids, device=like.device)
    probabilities = like.new_tensor(distribution.probabilities)
    probs = torch.zeros_like(like[0])
    probs[token_ids] = probabilities / math.fsum(distribution.probabilities)
    return probs


def _drawn(
    token: int, distribution: SparseDistribution, *, stage: int, like: Draw | None = None
) -> Draw:
    is_forced = like is not None and like.is_forced
    return Draw(token, stage=stage, distribution=distribution, is_forced=is_forced)


def _draw(scores: Tensor, *, position: int, seed: int, purpose: Purpose) -> int:
    noisy = add_noise(scores.unsqueeze(0), [position], seed=seed, purpose=purpose)
    return argmax_tokens(noisy)[0]
