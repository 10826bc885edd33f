"""What logits decide: which of a proposal's tokens are accepted, or what is drafted next.

For every backend that computes logits. Letters: T draft tokens, V the tokenizer's vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_engine.calls import VerificationRule
from paceline_engine.items import Judgement
from paceline_engine.proposal import Proposal
from paceline_engine.review_tasks import ReviewTask
from paceline_engine.reviews import review_by
from paceline_engine.sampling import choose_tokens, draw_draft, token_logprobs
from paceline_engine.verification import accept_exact, accept_sampled

if TYPE_CHECKING:
    from torch import Tensor

    from paceline_engine.calls import SessionSpec
    from paceline_engine.items import Judge

__all__ = ["draft_from", "judge_by"]


def judge_by(logits: Tensor, task: Judge, *, spec: SessionSpec, position: int) -> Judgement:
    """Judge a chain.

    Args:
        logits: (T + 1, V), any float dtype; row t follows the chain's first t tokens.
        task: The chain, with checked distributions.
        position: Of the chain's first token.
    """
    if isinstance(task, ReviewTask):
        return review_by(logits, task, spec=spec, position=position)
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
    path = tuple(range(accepted_count))
    if not task.logprobs:
        return Judgement(path, next_token)
    decided = (*token_ids[:accepted_count], next_token)
    return Judgement(path, next_token, token_logprobs(logits[: accepted_count + 1], decided))


def draft_from(logits: Tensor, *, spec: SessionSpec, position: int) -> Proposal:
    """Draft the token at a position, and under REJECTION say what it was drawn from.

    Args:
        logits: (1, V), any float dtype.
        position: Of the token.
    """
    if spec.rule is VerificationRule.REJECTION:
        token, distribution = draw_draft(
            logits, position=position, parameters=spec.sampling, seed=spec.seed
        )
        return Proposal((token,), distributions=(distribution,))
    chosen = choose_tokens(
        logits, first_position=position, parameters=spec.sampling, seed=spec.seed
    )
    return Proposal((chosen[0],))
