"""The two rules by which a target accepts draft tokens.

Letters: T draft tokens, V the tokenizer's vocabulary. `first_position` is the position of the
block's first token, which is the number of tokens before it. Index map, for T = 3:

    position      first      +1        +2        +3
    draft token   0          1         2
    logits row    0          1         2         3
    decides       draft 0    draft 1   draft 2   the bonus token
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline_engine.deciding.gumbel import add_noise
from paceline_engine.deciding.noise import Purpose, noise_bits, uniform
from paceline_engine.deciding.sampling import (
    Draw,
    argmax_tokens,
    choose_each,
    choose_tokens,
    filtered_scores,
    in_parts,
    known,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_contract.proposal import Distribution, Proposal
    from paceline_contract.sampling import SamplingParameters


def accept_exact(
    draft_token_ids: Sequence[int],
    logits: Tensor,
    *,
    first_position: int,
    parameters: SamplingParameters,
    seed: int,
) -> tuple[int, int]:
    """Accept the draft tokens that the target itself chooses, and choose one more.

    Args:
        draft_token_ids: The block, T >= 0 ids in [0, V).
        logits: (T + 1, V), any float dtype; row t follows the block's first t tokens.
        first_position: See above.

    Returns:
        How many draft tokens are accepted, and the target's token after them.

    Raises:
        InternalError: the model computed NaN or infinity where plain decoding would meet it. What
            follows a rejected token does not count.

    Invariants:
        Accepted tokens and next token are the same as if one token was chosen at a time
        (tests/unit/engine/test_acceptance_rules.py::test_exact_is_plain_decoding).

    Cost: only rows up to the part with the first rejection are computed.
    """
    first = 0
    for part in in_parts(logits):
        positions = range(first_position + first, first_position + first + len(part))
        chosen = choose_each(part, [Draw(it, parameters, seed) for it in positions])
        for index, token in enumerate(map(known, chosen), start=first):
            if index == len(draft_token_ids) or token != draft_token_ids[index]:
                return index, token
        first += len(part)
    raise AssertionError("there is a row after the last draft token")


def accept_along(
    tree: Proposal,
    logits: Tensor,
    *,
    first_position: int,
    parameters: SamplingParameters,
    seed: int,
    at_once: bool | None = None,
) -> tuple[tuple[int, ...], int]:
    """Accept the path of a tree that the target itself chooses, and choose one more.

    Args:
        tree: T tokens; equal ones have different parents.
        logits: (T + 1, V), any float dtype; row 0 follows the prefix, row i + 1 the i-th token.
        first_position: The position of the token after the prefix.
        at_once: Whether to choose after all rows at once; None: on an accelerator, where this takes
            as long as choosing after one.

    Returns:
        The path, and the target's token after it.

    Invariants:
        The result is that of `accept_exact` on the path's tokens
        (tests/unit/engine/test_acceptance_rules.py::test_a_tree_is_decided_as_its_chains_are).

    Cost: unless at once, only the rows along the path are read.
    """
    if at_once is None:
        at_once = logits.device.type != "cpu"
    if at_once:
        depths = [0, *(1 + before for before in tree.depths())]
        draws = [Draw(first_position + depth, parameters, seed) for depth in depths]
        tokens = choose_each(logits, draws)

        def chosen(row: int, _: int) -> int:
            return known(tokens[row])

        return tree.follow(chosen)

    def choose(row: int, depth: int) -> int:
        position = first_position + depth
        (token,) = choose_tokens(
            logits[row : row + 1], first_position=position, parameters=parameters, seed=seed
        )
        return token

    return tree.follow(choose)


def accept_sampled(
    draft_token_ids: Sequence[int],
    logits: Tensor,
    *,
    distributions: Sequence[Distribution],
    first_position: int,
    parameters: SamplingParameters,
    seed: int,
) -> tuple[int, int]:
    """Accept draft tokens by rejection sampling, and draw one more token.

    Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1, and Chen et al. 2023 (arXiv 2302.01318);
    in the former p is the target. A draft token is accepted with probability
    min(1, target_prob / draft_prob). The first rejected one is replaced by a draw from
    max(0, target_probs - draft_probs); after a block accepted whole the next token is drawn as
    under EXACT.

    Difference: the coins are position-keyed noise, so a repeated verification decides alike. If
    rounding leaves the residual empty, the token is drawn from the target.

    Args:
        draft_token_ids: The block, T >= 0 ids in [0, V).
        logits: (T + 1, V), any float dtype; row t follows the block's first t tokens.
        distributions: T checked distributions, from which the draft tokens were drawn.
        first_position: See above.
        parameters: At temperature 0 this is `accept_exact`.

    Returns:
        How many draft tokens are accepted, and the token after them.

    Raises:
        InternalError: the model computed NaN or infinity.

    Invariants:
        Each token is distributed as the target's own
        (tests/unit/engine/test_acceptance_rules.py::test_rejection_is_lossless).
    """
    if parameters.temperature == 0:
        return accept_exact(
            draft_token_ids,
            logits,
            first_position=first_position,
            parameters=parameters,
            seed=seed,
        )
    rows = (row for part in in_parts(logits) for row in filtered_scores(part, parameters))
    for index, (token, distribution) in enumerate(zip(draft_token_ids, distributions, strict=True)):
        position = first_position + index
        target_probs = next(rows).softmax(-1)
        draft_prob = _probability(distribution, token)
        coin = uniform(noise_bits(seed, position, token_id=0, purpose=Purpose.ACCEPT))
        # Written so that NaN, which compares false, is not accepted: drawing from it then fails.
        if not coin * draft_prob < float(target_probs[token]):
            residual = residual_scores(target_probs, distribution)
            return index, _draw(residual, position=position, seed=seed, purpose=Purpose.RESIDUAL)
    accepted = len(draft_token_ids)
    bonus_position = first_position + accepted
    return accepted, _draw(next(rows), position=bonus_position, seed=seed, purpose=Purpose.EXACT)


def residual_scores(target_probs: Tensor, draft: Distribution) -> Tensor:
    """Return log max(0, target_probs - draft_probs), not normalised; if empty, log target_probs.

    Args:
        target_probs: (V,) float64, sums to 1.
        draft: The distribution that the rejected token was drawn from.
    """
    token_ids = torch.tensor(draft.token_ids, device=target_probs.device)
    draft_probs = target_probs.new_tensor(draft.probabilities)
    residual = target_probs.index_add(0, token_ids, -draft_probs / math.fsum(draft.probabilities))
    residual = residual.clamp(min=0)
    return (residual if bool(residual.any()) else target_probs).log()


def _probability(distribution: Distribution, token_id: int) -> float:
    """Return the probability with which a token was drawn, exactly; float32 sums miss 1."""
    # A repeated field of a message has no `index`.
    place = next(place for place, each in enumerate(distribution.token_ids) if each == token_id)
    weight = distribution.probabilities[place]
    return weight / math.fsum(distribution.probabilities)


def _draw(scores: Tensor, *, position: int, seed: int, purpose: Purpose) -> int:
    noisy = add_noise(scores.unsqueeze(0), [position], seed=seed, purpose=purpose)
    return argmax_tokens(noisy)[0]
