"""How likely a drafter's runners-up are right where its first token is wrong.

The target's token is the drafter's first with the acceptance rate a, else its r-th with a share of
the rest: q (1 - q)^(r - 2) for a rank decay q, which is assumed and not measured, or as measured.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_WIDTH = 16
"""The most tokens that are found at a place: DraftRequest.width."""

DEFAULT_RANK_DECAY = 0.4

LLAMA_SHARES = tuple(rate / (1 - 0.634) for rate in (0.108, 0.057, 0.0225, 0.0195))
"""The shares of a Llama pair: the second to fifth of the hit rates that come with Sequoia (Chen et
al. 2024, arXiv 2402.12374); the first is 0.634. Later ranks are taken to be never right."""


def runner_up_shares(rank_decay: float = DEFAULT_RANK_DECAY) -> tuple[float, ...]:
    """Return how likely each runner-up is right, given that the first token is wrong.

    Args:
        rank_decay: q, in (0, 1]: how likely the next one is, given that all before it are wrong.
    """
    assert 0 < rank_decay <= 1
    return shares_of([rank_decay] * (MOST_WIDTH - 1))


def shares_of(decays: Sequence[float]) -> tuple[float, ...]:
    """Return the same where each runner-up has a decay of its own."""
    wrong = accumulate((1 - decay for decay in decays), mul, initial=1.0)
    return tuple(decay * left for decay, left in zip(decays, wrong, strict=False))


def hit_rates(
    acceptance_rate: float, *, shares: tuple[float, ...], width: int
) -> tuple[float, ...]:
    """Return how likely each of the tokens at a place is right, the first included."""
    missed = 1 - acceptance_rate
    return (acceptance_rate, *(missed * share for share in shares[: width - 1]))
