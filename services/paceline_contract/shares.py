"""Shares one resource among the tenants that compete for it, and reserves nothing for any.

Dynamic thresholds (Choudhury and Hahne 1998, "Dynamic queue length thresholds for shared-memory
packet switches"): no tenant may hold more than a fixed multiple of what is still free. A tenant
that is alone gets nearly all of it; the next one finds a part of it free, however greedy the first
one is.
"""

from __future__ import annotations

from collections import Counter

# One tenant alone gets 4 / (4 + 1) of all; each of two greedy ones gets 4 / (2 * 4 + 1).
_MULTIPLE_OF_FREE = 4


class FairShares:
    """Counts how much of a resource each tenant holds, and refuses a tenant that holds too much.

    A tenant that holds nothing is refused only what is not there.

    Args:
        capacity: How much there is of the resource, in units that the caller chooses.

    Attributes:
        capacity: The same; it may change at any time.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: Counter[str] = Counter()
        self._used = 0

    @property
    def free(self) -> int:
        """How much nobody holds."""
        return self.capacity - self._used

    def held_by(self, share: str) -> int:
        """Return how much a share holds."""
        return self._held[share]

    def allows(self, share: str, amount: int = 1) -> bool:
        """Whether a share may take so much more."""
        left, held = self.free - amount, self._held[share]
        return left >= 0 and (not held or held + amount <= _MULTIPLE_OF_FREE * (left + 1))

    def take(self, share: str, amount: int = 1) -> None:
        """Give so much to a share, whether it is allowed to have it or not."""
        self._held[share] += amount
        self._used += amount

    def give_back(self, share: str, amount: int = 1) -> None:
        """Take so much back from a share."""
        self._used -= amount
        self._held[share] -= amount
        if not self._held[share]:
            del self._held[share]
