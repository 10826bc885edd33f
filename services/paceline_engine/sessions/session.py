"""A session: what a model server holds for one request. Used on the event loop only.

Its token list and its KV cache are kept apart. The list is what the contract speaks of, and changes
here, in the order in which calls arrive. The cache belongs to the worker thread, and takes from the
list's next version whatever it has computed already (`ModelCache`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import PrefixMismatchError, PrefixNotHeldError, StaleCallError
from paceline_contract.prefix import TokenPrefix

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from paceline_engine.scheduling.jobs import Job, Outlet
    from paceline_engine.terms.calls import PrefixCall, SessionSpec
    from paceline_engine.terms.items import Item, Outcome
    from paceline_engine.terms.model_cache import ModelCache

# Seconds of a fast stream, and little memory if it ends at once.
_STEP_TOKENS = 256


@dataclass(eq=False, slots=True, kw_only=True)
class LiveCall:
    """A call that is queued or running.

    Attributes:
        prefix_length: How many tokens it builds on.
        outlet: Where its caller waits.
        item: What it asks.
        job: The item's place at the worker.
        began_early: Whether the model had begun it by itself.
    """

    prefix_length: int
    outlet: Outlet[Outcome]
    item: Item
    job: Job
    began_early: bool = False

    def will_answer(self, item: Item) -> bool:
        """Whether it is still to answer, and asks the same as this item."""
        return self.item.asks_the_same(item) and not self.outlet.ended


class Session:
    """What a server holds for one request.

    A call goes through `fence`, `rebase`, and if it succeeds `hold`. In between, and for good if it
    fails, the session holds the first min(held, base_length) tokens.

    Attributes:
        spec: What it was opened for.
        needed_length: The longest text that it was asked to hold.
        reserved_length: Tokens that memory is reserved for: as many, and if there was room a step
            more. `SessionTable` sets it, and counts them.
        cache: The model's side; for the worker thread.
        live_call: Its newest call while that is queued or running.
        ahead: What the model goes on with by itself after its last call.
        reused_count: Tokens of its first prefix that a kept text has; `SessionTable` sets it.
        expires_at: When it ends if nothing happens, on the table's clock.
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
        """How many tokens its reservation lacks of being a step ahead."""
        return wanted_lengths(self.needed_length, self.spec)[0] - self.reserved_length

    def fence(self, sequence: int) -> None:
        """Let only newer calls pass.

        Raises:
            StaleCallError: this one is not newer than the newest.
        """
        if sequence <= self._sequence:
            raise StaleCallError(f"sequence {sequence} is not above {self._sequence}")
        self._sequence = sequence

    def rebase(self, call: PrefixCall) -> array[int]:
        """Forget all but the call's base, and return the whole prefix that it means.

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
        """Return how many tokens a kept text has of it: to the first that is answered, else 0."""
        count, self.reused_count = self.reused_count, 0
        return count


def wanted_lengths(length: int, spec: SessionSpec) -> tuple[int, int]:
    """Return what to reserve for a text of a length: at best a step more, at least the length."""
    # A tree's branches can need more than the longest text.
    return max(length, min(length + _STEP_TOKENS, spec.longest_length)), length
