"""A session's text in a model, whatever the model is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left

__all__ = ["ModelCache"]


class ModelCache(ABC):
    """A session's text in a model: the tokens computed so far and the model's state for them.

    The caller never says what to roll back. It names the whole prefix that it means, and the cache
    keeps what it has in common with that. So no sequence of faults and cancels can make it compute
    on a wrong prefix, and whatever is still right is used again.

    Invariants:
        The state stands for exactly `token_ids`, also after a forward that raised.
    """

    def __init__(self) -> None:
        self._token_ids = array("I")

    @property
    def length(self) -> int:
        """How many tokens the state stands for."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> array[int]:
        """A copy of the tokens the state stands for."""
        return self._token_ids[:]

    def reserve(self, length: int) -> None:  # noqa: B027 - most need not know
        """Learn how many tokens there is memory for from now on. Called on the event loop."""

    def stage(self, prefix: array[int]) -> int:  # noqa: ARG002 - a stack's text asks
        """Return which of several models computes what is next after a prefix; most have one."""
        return 0

    def missing_length(self, prefix: array[int]) -> int:
        """Count the tokens of a prefix, the last one always included, that are to be computed."""
        return len(prefix) - self._kept_length(prefix)

    def keep(self, prefix: array[int]) -> int:
        """Forget what is not the prefix's, and its last token; return how many tokens are left."""
        kept = self._kept_length(prefix)
        self._crop(kept)
        del self._token_ids[kept:]
        return kept

    def extend(self, token_ids: array[int]) -> None:
        """Take in tokens whose state a forward has appended."""
        self._token_ids.extend(token_ids)

    def settle(self) -> None:
        """Forget what a forward that failed may have appended."""
        self._crop(len(self._token_ids))

    def clear(self) -> None:
        """Forget all, because something broke off anywhere and may have left anything."""
        self._crop(0)
        del self._token_ids[:]

    def _kept_length(self, prefix: array[int]) -> int:
        return min(_common_length(self._token_ids, prefix), len(prefix) - 1)

    @abstractmethod
    def _crop(self, length: int) -> None:
        """Forget the state of all tokens but the first `length`, wherever a forward stopped."""


def _common_length(left: array[int], right: array[int]) -> int:
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    return bisect_left(range(limit), True, key=lambda n: left[: n + 1] != right[: n + 1])
