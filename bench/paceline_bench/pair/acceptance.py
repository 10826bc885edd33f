"""How often a drafter is right: by the DSI paper's estimator, and by verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Block:
    """A block of draft tokens that a target has judged.

    Attributes:
        drafted: How many there were.
        accepted: How many of them, from the first on, were right.
    """

    drafted: int
    accepted: int


def common_run(left: Sequence[int], right: Sequence[int]) -> int:
    """Count the tokens, from the first on, that two texts have in common."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))


def run_rate(runs: Sequence[int]) -> float:
    """Estimate the acceptance rate from common runs, one for each prompt.

    Timor et al. 2024 (arXiv 2405.14105), appendix F.2: a run is taken for a draw from a geometric
    distribution, whose mean is rate / (1 - rate).

    Difference: none. It is biased low where runs are cut off at the length of the texts, and tells
    of the drafter's own text only until it first leaves the target's.
    """
    return 1 - 1 / (1 + mean(runs))


def verdict_rate(blocks: Iterable[Block]) -> float:
    """Return the share of right ones among the draft tokens that were decided; 0 if none was.

    Those after a block's first wrong one were not decided.
    """
    accepted = decided = 0
    for block in blocks:
        accepted += block.accepted
        decided += min(block.accepted + 1, block.drafted)
    return accepted / decided if decided else 0.0


def accepted_shares(blocks: Sequence[Block]) -> list[float]:
    """Return for n = 1, 2, ... the share of blocks whose first n tokens were all right.

    Only blocks of n tokens or more count.
    """
    shares = []
    for length in range(1, max((block.drafted for block in blocks), default=0) + 1):
        long_enough = [block for block in blocks if block.drafted >= length]
        shares.append(mean(block.accepted >= length for block in long_enough))
    return shares
