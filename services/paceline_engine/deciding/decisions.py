"""Decisions from logits: which tokens of a proposal are accepted, and which token is drafted next.

For every backend that computes logits. Letters: T draft tokens, V the tokenizer's vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import Proposal
from paceline_engine.deciding.acceptance_rules import accept_along, accept_exact, accept_sampled
from paceline_engine.deciding.cascade import ReviewTask
from paceline_engine.deciding.reviews import review_by
from paceline_engine.deciding.row_reading import RowsRead, RowsTask
from paceline_engine.deciding.sampling import (
    Draw,
    argmax_tokens,
    choose_each,
    choose_tokens,
    draw_draft,
    noisy_scores,
    token_logprobs,
    tokens_of,
    top_logprobs,
)
from paceline_engine.terms.items import Judgement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline_contract.calls import LikeliestTokens
    from paceline_engine.terms.calls import SessionSpec
    from paceline_engine.terms.draft_tree import Ranked
    from paceline_engine.terms.items import Item, Judge

_ROWS_SCORED_AT_ONCE = 32


def judge_by(
    logits: Tensor, task: Judge, *, spec: SessionSpec, position: int, told: Tensor | None = None
) -> Judgement:
    """Judge a chain, or under EXACT a tree.

    Args:
        logits: (T + 1, V), any float dtype; row 0 follows the prefix, row i + 1 the i-th token.
        task: The proposal, with checked distributions; a chain that is only scored has none.
        position: The position of the token after the prefix.
        told: The logits that log probabilities are told of; None: `logits`.
    """
    told = logits if told is None else told
    if task.score:
        return _scored(told, task)
    if isinstance(task, RowsTask):
        return RowsRead((), 0, rows=logits.float().softmax(-1))
    if isinstance(task, ReviewTask):
        return review_by(logits, task, spec=spec, position=position)
    if task.proposal.parents:
        path, next_token = accept_along(
            task.proposal,
            logits,
            first_position=position,
            parameters=spec.sampling,
            seed=spec.seed,
        )
        return _judgement(path, next_token, task=task, logits=told)
    token_ids = task.proposal.token_ids
    if spec.rule is VerificationRule.REJECTION:
        accepted_count, next_token = accept_sampled(
            token_ids,
            logits,
            distributions=task.proposal.distributions,
            first_position=position,
            parameters=spec.sampling,
            seed=spec.seed,
        )
    else:
        accepted_count, next_token = accept_exact(
            token_ids, logits, first_position=position, parameters=spec.sampling, seed=spec.seed
        )
    return _judgement(tuple(range(accepted_count)), next_token, task=task, logits=told)


def choose_next(
    rows: Sequence[tuple[Item, Tensor]], *, token_ids: Tensor | None = None
) -> dict[Item, int]:
    """Choose the next token of each item, given its logits: (1, V) each.

    An item with logits that are NaN or infinite is left out.

    Args:
        token_ids: What the logits' columns stand for; see `sampling.py`.
    """
    draws = [Draw(len(item.prefix), item.spec.sampling, item.spec.seed) for item, _ in rows]
    chosen = choose_each(torch.cat([own for _, own in rows]), draws, token_ids=token_ids)
    return {item: token for (item, _), token in zip(rows, chosen, strict=True) if token is not None}


def _judgement(path: tuple[int, ...], next_token: int, *, task: Judge, logits: Tensor) -> Judgement:
    """Return a judgement, with the log probabilities that the task asks for."""
    judgement = Judgement(path, next_token)
    rows = [0, *(index + 1 for index in path)]
    if task.logprobs:
        decided = (*task.proposal.along(path), next_token)
        judgement = replace(judgement, logprobs=token_logprobs(logits[rows], decided))
    if task.top_logprobs:
        reported = top_logprobs(logits[rows], task.top_logprobs)
        judgement = replace(judgement, top_logprobs=reported)
    return judgement


def _scored(logits: Tensor, task: Judge) -> Judgement:
    """Accept a chain as it is, and return what the task asks of its tokens.

    Cost: in float64 a few rows at a time, as a prompt's may have the width of a large vocabulary.
    """
    token_ids = tuple(task.proposal.token_ids)
    logprobs: list[float] = []
    likeliest: list[LikeliestTokens] = []
    for start in range(0, len(token_ids), _ROWS_SCORED_AT_ONCE):
        end = min(start + _ROWS_SCORED_AT_ONCE, len(token_ids))
        if task.logprobs:
            logprobs += token_logprobs(logits[start:end], token_ids[start:end])
        if task.top_logprobs:
            likeliest += top_logprobs(logits[start:end], task.top_logprobs)
    return Judgement(
        tuple(range(len(token_ids))), 0, tuple(logprobs), top_logprobs=tuple(likeliest)
    )


def draft_from(
    logits: Tensor, *, spec: SessionSpec, position: int, token_ids: Tensor | None = None
) -> Proposal:
    """Draft the token at a position; under REJECTION with the distribution it was drawn from.

    Args:
        logits: (1, V), any float dtype.
        position: The token's position.
        token_ids: What the logits' columns stand for; see `sampling.py`.
    """
    if spec.rule is VerificationRule.REJECTION:
        token, distribution = draw_draft(
            logits,
            position=position,
            parameters=spec.sampling,
            seed=spec.seed,
            token_ids=token_ids,
        )
        return Proposal((token,), distributions=(distribution,))
    chosen = choose_tokens(
        logits,
        first_position=position,
        parameters=spec.sampling,
        seed=spec.seed,
        token_ids=token_ids,
    )
    return Proposal((chosen[0],))


def rank_from(
    logits: Tensor,
    *,
    spec: SessionSpec,
    positions: Sequence[int],
    count: int,
    token_ids: Tensor | None = None,
) -> list[Ranked]:
    """Return the likeliest choices of the target under EXACT, with the target's own noise.

    A token's probability is its softmax over the noisy scores. This is the probability that the
    token wins if the target's scores differ from these by further Gumbel noise. At temperature 0 it
    is the model's own probability. It only orders tokens; no decided token depends on it.

    Args:
        logits: (rows, V), any float dtype.
        positions: The position of the token after each row.
        count: Tokens for each row; fewer if filters leave fewer.
        token_ids: What the logits' columns stand for; see `sampling.py`.
    """
    scores = noisy_scores(
        logits, positions=positions, parameters=spec.sampling, seed=spec.seed, token_ids=token_ids
    )
    best = scores.topk(min(count, scores.shape[-1]))
    shares = (best.values - scores.logsumexp(-1, keepdim=True)).exp()
    chosen = tokens_of(argmax_tokens(scores), token_ids)
    likeliest = best.indices if token_ids is None else token_ids[best.indices]
    found = zip(chosen, likeliest.tolist(), shares.tolist(), strict=True)
    return [_ranked(first, others, own)[:count] for first, others, own in found]


def _ranked(first: int, token_ids: Sequence[int], shares: Sequence[float]) -> Ranked:
    """Put the chain's token before the others; it is that of `draft_from`, also with ties."""
    found = dict(zip(token_ids, shares, strict=True))
    head = (first, found.pop(first, shares[0]))
    return [head, *((token, share) for token, share in found.items() if share > 0)]
