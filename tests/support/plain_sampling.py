"""Sampling and verification as docs/protocol.md tells them: the oracle of the engine's.

Plain Python, one row at a time. Of the engine's code only the noise is used, which has vectors.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_engine.deciding.noise import Purpose, noise_bits, uniform
from support.gumbel import gumbel

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from paceline_contract.sampling import SamplingParameters


@dataclass(frozen=True)
class Draw:
    """What chance decided: the coin that a draft token met, or a token that was drawn.

    Attributes:
        purpose: Whose noise it was.
        position: At which position.
        outcome: Whether the draft token is accepted, or the token.
    """

    purpose: str
    position: int
    outcome: bool | int


def shaped(
    logits: Sequence[float],
    parameters: SamplingParameters,
    *,
    prompt: Sequence[int],
    answer: Sequence[int],
    end_ids: Collection[int],
) -> list[float]:
    """Change the logits of the token after an answer by the tokens so far."""
    changed = [*logits]
    for token in {*prompt, *answer}:
        penalty = parameters.repetition_penalty
        changed[token] *= 1 / penalty if changed[token] > 0 else penalty
    for token, count in Counter(answer).items():
        changed[token] -= count * parameters.frequency_penalty + parameters.presence_penalty
    for token, bias in parameters.logit_bias:
        changed[token] += bias
    if len(answer) < parameters.min_tokens:
        for token in end_ids:
            changed[token] = -math.inf
    return changed


def filtered(logits: Sequence[float], parameters: SamplingParameters) -> dict[int, float]:
    """Return the weight of each token that the filters leave; the likeliest has 1."""
    best = max(logits)
    scaled = {token: (it - best) / parameters.temperature for token, it in enumerate(logits)}
    if 0 < parameters.top_k < len(scaled):
        scaled = _at_least(scaled, sorted(scaled.values())[-parameters.top_k])
    if parameters.top_p < 1:
        needed = parameters.top_p * math.fsum(map(math.exp, scaled.values()))
        reached = 0.0
        for score in sorted(scaled.values(), reverse=True):
            reached += math.exp(score)
            if reached >= needed:
                break
        scaled = _at_least(scaled, score)
    if parameters.min_p > 0:
        scaled = _at_least(scaled, math.log(parameters.min_p))
    return {token: math.exp(score) for token, score in scaled.items()}


def choose(weights: Mapping[int, float], *, position: int, seed: int, purpose: Purpose) -> int:
    """Return the token with the largest sum of score and noise, ties to the smaller id."""
    sums = {
        token: math.log(weight)
        + gumbel(noise_bits(seed, position, token_id=token, purpose=purpose))
        for token, weight in sorted(weights.items())
        if weight > 0
    }
    return max(sums, key=sums.__getitem__)


def verify(
    block: Sequence[int],
    rows: Sequence[Sequence[float]],
    *,
    drawn_from: Sequence[Mapping[int, float]],
    first_position: int,
    parameters: SamplingParameters,
    seed: int,
) -> list[Draw]:
    """Judge a block by rejection sampling, and return every draw; the last is the next token."""
    draws = []
    for position, token, row, drafted in zip(
        range(first_position, first_position + len(block)), block, rows, drawn_from, strict=False
    ):
        target, draft = _shares(filtered(row, parameters)), _shares(drafted)
        coin = uniform(noise_bits(seed, position, token_id=0, purpose=Purpose.ACCEPT))
        is_accepted = coin * draft[token] < target.get(token, 0.0)
        draws.append(Draw("ACCEPT", position, is_accepted))
        if not is_accepted:
            residual = {each: max(0.0, it - draft.get(each, 0.0)) for each, it in target.items()}
            left = residual if any(residual.values()) else target
            token = choose(left, position=position, seed=seed, purpose=Purpose.RESIDUAL)
            return [*draws, Draw("RESIDUAL", position, token)]
    position, weights = first_position + len(block), filtered(rows[len(block)], parameters)
    token = choose(weights, position=position, seed=seed, purpose=Purpose.EXACT)
    return [*draws, Draw("EXACT", position, token)]


def _at_least(scores: Mapping[int, float], threshold: float) -> dict[int, float]:
    return {token: score for token, score in scores.items() if score >= threshold}


def _shares(weights: Mapping[int, float]) -> dict[int, float]:
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}
