"""Token by token comparison with plain decoding, where only a proven near-tie is excused."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.oracle import Oracle, Sampling

# Forwards over blocks of other shapes add the same numbers in another order. On the bundled models
# in fp32 that moves a score by about 1e-5; what is closer than this may come out either way.
NEAR_TIE = 1e-4
# Near-ties may decide fewer than one in so many of the compared positions.
_POSITIONS_PER_TIE = 10_000


@dataclass(frozen=True)
class NearTie:
    """A position where two candidates were too close to call."""

    position: int
    expected: int
    actual: int
    gap: float


def compare(
    oracle: Oracle,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    expected: Sequence[int],
    actual: Sequence[int],
) -> list[NearTie]:
    """Return the near-ties after which `actual` went another way than `expected`.

    After one, the oracle goes on from the way that was taken, so that every later position is
    compared, too.

    Raises:
        AssertionError: They differ where the two candidates are not close.
    """
    ties: list[NearTie] = []
    reference = list(expected)
    while (at := _first_difference(reference, actual)) is not None:
        assert at < min(len(reference), len(actual)), (
            f"{len(actual)} tokens instead of {len(reference)}"
        )
        prefix = [*prompt, *actual[:at]]
        gap = oracle.gap(prefix, sampling, (reference[at], actual[at]))
        assert gap < NEAR_TIE, (
            f"token {at} is {actual[at]} instead of {reference[at]}, and their scores differ by"
            f" {gap:.3g}: {list(actual)} instead of {list(expected)}"
        )
        ties.append(NearTie(len(prefix), reference[at], actual[at], gap))
        taken = actual[: at + 1]
        rest = oracle.decode([*prompt, *taken], sampling, len(expected) - at - 1)
        reference = [*taken, *rest]
    assert all(earlier.position < later.position for earlier, later in pairwise(ties))
    return ties


def check_rarity(ties: Sequence[NearTie], *, position_count: int) -> None:
    """List near-ties as warnings, and hold that they are rare.

    Where fewer positions were compared than one near-tie is allowed for, one is excused. It may be
    met again by every way of decoding the same text.

    Raises:
        AssertionError: There are too many.
    """
    times = Counter(ties)
    for tie, count in times.items():
        warnings.warn(f"met {count} times: {tie}", stacklevel=2)
    if position_count <= _POSITIONS_PER_TIE:
        assert len(times) <= 1, ties
    else:
        assert len(ties) * _POSITIONS_PER_TIE < position_count, ties


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    if list(left) == list(right):
        return None
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))
