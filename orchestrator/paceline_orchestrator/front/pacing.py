"""Has running requests follow the load, where all is left to the planner.

What is best for a request depends on who shares the servers with it, and that changes while it
runs. So of those whose method may change, one is planned again each second, and at once where a new
request shows that servers have become crowded. If it is better off with another method, so are
those that wish the same. To plan takes a millisecond, so it is not done for each.

A request that has changed stays so for a second, and twice as long each time: to change costs a
drafter's session, and load goes up and down.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline_orchestrator.front.generation import Generation
    from paceline_orchestrator.front.order import Order
    from paceline_orchestrator.planning.experience import Planning
    from paceline_orchestrator.planning.planner import Plan

__all__ = ["Pacing"]

_INTERVAL_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 60.0


@dataclass(slots=True)
class _Pace:
    """When a request may change, on the loop's clock, and for how long it then stays so."""

    not_before: float = 0.0
    wait_seconds: float = _INTERVAL_SECONDS


class Pacing:
    """Knows the requests whose method may change.

    Args:
        planning: Asked how they are to be decoded by now.
    """

    def __init__(self, planning: Planning) -> None:
        self._planning = planning
        self._paces: dict[Generation, _Pace] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def following(self, generation: Generation) -> Iterator[None]:
        """Have a request that runs meanwhile follow the load."""
        order = generation.order
        if not order.follows_load:
            yield
            return
        self._paces[generation] = _Pace()
        try:
            self._look_later()
            if order.plan.is_crowded and not generation.drafts:
                self._look(drafting=True)
            yield
        finally:
            del self._paces[generation]
            if not self._paces and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _look_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_INTERVAL_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look_later()
        for drafting in (True, False):
            self._look(drafting=drafting)

    def _look(self, *, drafting: bool) -> None:
        """Plan one request again that drafts, or one that does not; those like it follow it."""
        now = asyncio.get_running_loop().time()
        free = [
            generation
            for generation, pace in self._paces.items()
            if generation.drafts is drafting and pace.not_before <= now
        ]
        if not free:
            return
        first = free[0]
        plan = self._planning.plan_again(
            first.order.options.wish, first.order.model, length=first.length, drafts=drafting
        )
        self._paces[first] = self._paces.pop(first)  # next time it is another one's turn
        for generation in free:
            if plan is not None and _are_alike(generation.order, first.order):
                self._follow(generation, plan, now=now)

    def _follow(self, generation: Generation, plan: Plan, *, now: float) -> None:
        if generation.follow(plan):
            pace = self._paces[generation]
            pace.not_before = now + pace.wait_seconds
            pace.wait_seconds = min(2 * pace.wait_seconds, _LONGEST_WAIT_SECONDS)


def _are_alike(order: Order, other: Order) -> bool:
    is_same_model = order.model.fingerprint == other.model.fingerprint  # of whichever server
    return is_same_model and order.options.wish == other.options.wish
