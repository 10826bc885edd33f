"""A session: the state of one request at a model server. Used on the event loop only.

A session's token list and its KV cache are separate. The contract is about the list, which changes
here, in the order in which calls arrive. The cache belongs to the worker thread. It compares itself
with the list that comes with each item, and keeps the state that is still right (`ModelCache`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import PrefixMismatchError, PrefixNotHeldError, StaleCallError
from paceline_contract.prefix import TokenPrefix

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from paceline_contract.calls import PrefixCall
    from paceline_engine.scheduling.jobs import Job, Outlet
    from paceline_engine.terms.calls import SessionSpec
    from paceline_engine.terms.items import Item, Outcome
    from paceline_engine.terms.model_cache import ModelCache

# This lasts a fast sequence some seconds, and wastes little memory if it ends at once.
_STEP_TOKENS = 256


@dataclass(eq=False, slots=True, kw_only=True)
class LiveCall:
    """A call that is queued or running.

    Attributes:
        prefix_length: How many tokens come before its work.
        outlet: Where its caller waits.
        item: The item that it asks for.
        job: The item's job at the worker.
        began_early: Whether the model had begun the item by itself.
    """

    prefix_length: int
    outlet: Outlet[Outcome]
    item: Item
    job: Job
    began_early: bool = False

    def will_answer(self, item: Item) -> bool:
        """Whether it is not answered yet, and asks the same as this item."""
        return self.item.asks_the_same(item) and not self.outlet.ended


class Session:
    """The state of one request.

    A call goes through `fence`, `rebase`, and if it succeeds `hold`. In between, and for good if it
    fails, the session holds the first min(held, base_length) tokens.

    Attributes:
        spec: The specification from the call that opened it.
        needed_length: The longest sequence that a call has needed so far.
        reserved_length: How many tokens memory is reserved for: `needed_length`, and a step more if
            there was room. `SessionTable` sets it.
        cache: The model's state; for the worker thread.
        live_call: Its newest call while that is queued or running.
        ahead: The job that the model goes on with by itself after the last call.
        reused_count: Tokens of its first prefix that a kept sequence has; `SessionTable` sets it.
        expires_at: The time at which its lease ends, on the table's clock.
    """

    def __init__(self, session_id: str, spec: SessionSpec, cache: ModelCache) -> None:
        self.session_id = session_id
        self.spec = spec
        self.needed_length = spec.reserve_length
        self.reserved_length = 0
        self.cache = cache
        self.live_call: LiveCall | None = None
        self.ahead: Job | None = None
        self.reused_count = 0
        self.expires_at = 0.0
        self._prefix = TokenPrefix()
        self._sequence = 0

    @property
    def is_new(self) -> bool:
        """Whether it has had no call yet."""
        return not self._sequence

    @property
    def held_length(self) -> int:
        """How many tokens it holds."""
        return len(self._prefix)

    @property
    def live_sequence(self) -> int | None:
        """The sequence of its call that is queued or running; None if none is."""
        return self._sequence if self.live_call is not None else None

    @property
    def missing_length(self) -> int:
        """How many tokens its reservation lacks to be a step ahead."""
        return wanted_lengths(self.needed_length, self.spec)[0] - self.reserved_length

    def fence(self, sequence: int) -> None:
        """Refuse a call that is not newer than all calls before.

        Raises:
            StaleCallError: the call's sequence number is not above the last one.
        """
        if sequence <= self._sequence:
            raise StaleCallError(f"sequence {sequence} is not above {self._sequence}")
        self._sequence = sequence

    def rebase(self, call: PrefixCall) -> array[int]:
        """Forget all tokens beyond the call's base, and return the call's whole prefix.

        Raises:
            PrefixNotHeldError: fewer tokens are held than the base has.
            PrefixMismatchError: other tokens are held than the digest says.
        """
        held_length, base_length = self.held_length, call.base_length
        if base_length > held_length:
            raise PrefixNotHeldError(
                f"the session holds {held_length} tokens, not {base_length}",
                metadata={"held_length": str(held_length)},
            )
        self._prefix.truncate(base_length)
        if (base_length or call.base_digest) and self._prefix.digest() != call.base_digest:
            raise PrefixMismatchError(f"the first {base_length} tokens held are others")
        prefix = self._prefix.tokens()
        prefix.extend(call.token_ids)
        return prefix

    def hold(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self._prefix.extend(token_ids)

    def held(self) -> array[int]:
        """Return a copy of the tokens it holds."""
        return self._prefix.tokens()

    def take_reused(self) -> int:
        """Return `reused_count` at the first answer, and 0 at later ones."""
        count, self.reused_count = self.reused_count, 0
        return count


def wanted_lengths(length: int, spec: SessionSpec) -> tuple[int, int]:
    """Return how many tokens to reserve: at best a step more than a length, at least it."""
    # A tree's branches can need more tokens than the longest sequence.
    return max(length, min(length + _STEP_TOKENS, spec.longest_length)), length
