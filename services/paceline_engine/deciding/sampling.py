"""How a token is chosen from logits: filters, position-keyed noise, argmax.

Letters: T rows, V the tokenizer's vocabulary. Row t chooses the token at position
`first_position + t`. Everything is float64 on the logits' device.

A drafter may score some tokens only. Then V is their number, and the argument `token_ids`, (V,)
int64 and ascending, says which token each column stands for. The noise is that of the tokens, so
the same token is chosen as from logits of all tokens with minus infinity for the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.errors import InternalError
from paceline_contract.proposal import SparseDistribution
from paceline_engine.deciding.gumbel import add_noise, sent
from paceline_engine.deciding.noise import Purpose
from paceline_engine.terms.validation import MOST_ENTRIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_contract.calls import LikeliestTokens
    from paceline_contract.sampling import SamplingParameters

_USUAL_NUCLEUS = 256
# How many numbers of rows are computed together. On a CPU more would not stay in its cache from one
# operation to the next. Rows of large vocabularies are then computed alone, as exactness wants it:
# with two threads torch adds up a row of more than 2^15 numbers in another order than the same row
# among several. On an accelerator, where each operation is a launch, only memory is the limit: 256
# MiB for each result, and computing noise has several results at a time.
_MOST_NUMBERS, _MOST_ON_ACCELERATOR = 1 << 16, 1 << 25


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token at a position is drawn."""

    position: int
    parameters: SamplingParameters
    seed: int


def choose_tokens(
    logits: Tensor,
    *,
    first_position: int,
    parameters: SamplingParameters,
    seed: int,
    token_ids: Tensor | None = None,
) -> list[int]:
    """Choose each row's token: a pure function of logits, parameters, seed and position.

    Args:
        logits: (T, V), any float dtype.
        first_position: The position of row 0's token.
        token_ids: What the columns stand for; see above.
    """
    positions = range(first_position, first_position + len(logits))
    scores = (
        logits
        if parameters.temperature == 0
        else noisy_scores(
            logits, positions=positions, parameters=parameters, seed=seed, token_ids=token_ids
        )
    )
    return tokens_of(argmax_tokens(scores), token_ids)


def tokens_of(columns: Sequence[int], token_ids: Tensor | None) -> list[int]:
    """Return the tokens that columns stand for."""
    return [*columns] if token_ids is None else token_ids[list(columns)].tolist()


def in_parts(logits: Tensor) -> Sequence[Tensor]:
    """Divide rows, (T, V), into parts small enough for a processor's cache."""
    return torch.split(logits, _most_rows(logits.device, logits.shape[-1]))


def noisy_scores(
    logits: Tensor,
    *,
    positions: Sequence[int],
    parameters: SamplingParameters,
    seed: int,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Return the (T, V) float64 scores whose argmax is the chosen token.

    Args:
        logits: (T, V), any float dtype.
        positions: The position of each row's token.
        token_ids: What the columns stand for; see above.
    """
    if parameters.temperature == 0:
        return logits.double()
    scores = filtered_scores(logits, parameters)
    return add_noise(scores, positions, seed=seed, purpose=Purpose.EXACT, token_ids=token_ids)


def choose_each(
    logits: Tensor, draws: Sequence[Draw], *, token_ids: Tensor | None = None
) -> list[int | None]:
    """Choose each row's token as `choose_tokens` does, with each row's own parameters.

    Args:
        logits: (T, V), any float dtype.
        draws: T of them.
        token_ids: What the columns stand for; see above.

    Returns:
        For each row its token; None if the model computed NaN or infinity.

    Cost: rows with the same parameters are computed together. All tokens come to the host at once.
    """
    alike: defaultdict[SamplingParameters, list[int]] = defaultdict(list)
    for row, draw in enumerate(draws):
        alike[draw.parameters].append(row)
    most_rows = _most_rows(logits.device, logits.shape[-1])
    parts = [
        rows[start : start + most_rows]
        for rows in alike.values()
        for start in range(0, len(rows), most_rows)
    ]
    found = [
        _choose_alike(
            _some(logits, part),
            [draws[row] for row in part],
            token_ids=token_ids,
        )
        for part in parts
    ]
    chosen = dict(zip(chain.from_iterable(parts), _finite_tokens(torch.cat(found, 1)), strict=True))
    if token_ids is None:
        return [chosen[row] for row in range(len(draws))]
    named = token_ids.tolist()
    columns = (chosen[row] for row in range(len(draws)))
    return [None if column is None else named[column] for column in columns]


def _some(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows, ascending; rows that lie side by side are not copied."""
    start, end = rows[0], rows[-1] + 1
    return logits[start:end] if end - start == len(rows) else logits[[*rows]]


def _most_rows(device: torch.device, vocabulary_size: int) -> int:
    """Return how many rows to choose for at once."""
    most_numbers = _MOST_NUMBERS if device.type == "cpu" else _MOST_ON_ACCELERATOR
    return max(1, most_numbers // vocabulary_size)


def _choose_alike(logits: Tensor, draws: Sequence[Draw], *, token_ids: Tensor | None) -> Tensor:
    """Return each row's column as `_argmax` does."""
    parameters = draws[0].parameters
    if parameters.temperature == 0:
        return _argmax(logits)
    positions, seeds = (
        sent(each, logits.device)
        for each in zip(*((draw.position, draw.seed) for draw in draws), strict=True)
    )
    scores = filtered_scores(logits, parameters)
    return _argmax(
        add_noise(scores, positions, seed=seeds, purpose=Purpose.EXACT, token_ids=token_ids)
    )


def filtered_scores(logits: Tensor, parameters: SamplingParameters) -> Tensor:
    """Apply temperature, top-k, top-p and min-p, in this order.

    Each filter keeps the logits at or above a threshold, so tokens that tie with the last one kept
    are kept too: the result depends on no sorting order.

    Args:
        logits: (T, V), any float dtype.
        parameters: With a temperature above 0.

    Returns:
        (T, V) float64 logits with the row's largest at 0, and -inf where a token is out.
    """
    scores = logits.double()
    scores = (scores - scores.amax(-1, keepdim=True)) / parameters.temperature
    if 0 < parameters.top_k < scores.shape[-1]:
        scores = _keep_from(scores, _top_values(scores, parameters.top_k)[:, -1:])
    if parameters.top_p < 1:
        scores = _keep_from(scores, _nucleus_threshold(scores, parameters.top_p))
    if parameters.min_p > 0:
        scores = _keep_from(scores, math.log(parameters.min_p))
    return scores


def _keep_from(scores: Tensor, threshold: Tensor | float) -> Tensor:
    return scores.masked_fill(scores < threshold, -math.inf)


def _top_values(scores: Tensor, count: int) -> Tensor:
    if scores.device.type != "cpu":
        return scores.topk(count).values
    # NumPy sorts 2048 numbers in 0.02 ms; torch, which also sorts their indices, needs 0.1 ms.
    values = scores.numpy()
    if count < values.shape[-1]:
        values = np.partition(values, -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=-1)).flip(-1)


def _nucleus_threshold(scores: Tensor, top_p: float) -> Tensor:
    """Return per row the score of the token with which the likeliest ones reach top_p."""
    needed = top_p * scores.exp().sum(-1, keepdim=True)
    # Usually a few tokens reach it. Sorting all would take most of the time of sampling.
    for count in (min(_USUAL_NUCLEUS, scores.shape[-1]), scores.shape[-1]):
        descending = _top_values(scores, count)
        reached = descending.exp().cumsum(-1)
        if bool((reached[:, -1:] >= needed).all()):
            break
    short = (reached < needed).sum(-1, keepdim=True)
    return descending.gather(-1, short.clamp(max=descending.shape[-1] - 1))


def argmax_tokens(scores: Tensor) -> list[int]:
    """Return each row's largest entry, ties to the smaller id.

    Raises:
        InternalError: a row has no largest number: the model computed NaN or infinity.
    """
    return [known(token) for token in _finite_tokens(_argmax(scores))]


def known(token: int | None) -> int:
    """Return a row's token.

    Raises:
        InternalError: it has none: the model computed NaN or infinity.
    """
    if token is None:
        raise InternalError("the model's scores are not finite")
    return token


def _argmax(scores: Tensor) -> Tensor:
    """Return each row's largest entry's index, and itself: (2, T) float64 on their device."""
    values, indices = scores.max(-1)
    return torch.stack((indices.double(), values.double()))


def _finite_tokens(found: Tensor) -> list[int | None]:
    """Bring the result of `_argmax` to the host; None: the row has no largest number."""
    return [
        int(token) if math.isfinite(value) else None
        for token, value in zip(*found.tolist(), strict=True)
    ]


def token_logprobs(logits: Tensor, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Return the natural log probability of one token per row under the plain softmax."""
    chosen = torch.tensor(token_ids, device=logits.device).unsqueeze(-1)
    return tuple(logits.double().log_softmax(-1).gather(-1, chosen).squeeze(-1).tolist())


def top_logprobs(logits: Tensor, count: int) -> tuple[LikeliestTokens, ...]:
    """Return each row's likeliest tokens under the plain softmax, ties by smaller id.

    Fewer than `count` if fewer tokens are possible.
    """
    found = []
    for row in logits.double().log_softmax(-1):
        least = row.topk(min(count, len(row))).values[-1]
        # `topk` takes any of the tokens that tie with the last one.
        token_ids = ((row >= least) & (row > -math.inf)).nonzero()[:, 0]
        best = row[token_ids].sort(descending=True, stable=True)
        chosen = token_ids[best.indices[:count]].tolist()
        found.append(tuple(zip(chosen, best.values[:count].tolist(), strict=True)))
    return tuple(found)


def draw_draft(
    logits: Tensor,
    *,
    position: int,
    parameters: SamplingParameters,
    seed: int,
    token_ids: Tensor | None = None,
) -> tuple[int, SparseDistribution]:
    """Draw a draft token for rejection sampling; return it and the exact distribution.

    The filtered distribution is cut to its MOST_ENTRIES likeliest tokens and rounded to float32.
    The token is drawn from the rounded numbers, which are also the numbers that are sent. At
    temperature 0 it is the token with the largest logit.

    Args:
        logits: (1, V), any float dtype.
        position: The position of the drawn token.
        token_ids: What the columns stand for; see above.

    Raises:
        InternalError: the model computed NaN or infinity.
    """
    if parameters.temperature == 0:
        (token,) = tokens_of(argmax_tokens(logits), token_ids)
        return token, SparseDistribution.certain(token)
    scores = filtered_scores(logits, parameters)
    columns, probabilities = cut_distribution(scores[0])
    drawn_from = torch.full_like(scores, -math.inf)
    drawn_from[0, columns] = probabilities.double().log()
    noisy = add_noise(drawn_from, [position], seed=seed, purpose=Purpose.DRAFT, token_ids=token_ids)
    (token,) = tokens_of(argmax_tokens(noisy), token_ids)
    said = tokens_of(columns.tolist(), token_ids)
    return token, SparseDistribution(tuple(said), tuple(probabilities.tolist()))


def cut_distribution(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Cut a distribution to its MOST_ENTRIES likeliest tokens, and round it to float32.

    Args:
        scores: (V,) float64 logits, -inf where a token is out.

    Returns:
        (N,) token ids and (N,) probabilities, all above 0.
    """
    best = scores.topk(MOST_ENTRIES) if scores.shape[-1] > MOST_ENTRIES else None
    token_ids = (scores > -math.inf).nonzero()[:, 0] if best is None else best.indices
    probabilities = scores[token_ids].softmax(-1).float()
    alive = probabilities > 0
    return token_ids[alive], probabilities[alive]
