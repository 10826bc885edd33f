"""Targets kept apart: each for one of the requests that may be what ends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_orchestrator.fleet.server import ModelServer


class Quarantine:
    """Which target is kept for which request. Requests that are not suspected do not ask.

    Args:
        tell: Told that a target has become free.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._kept: dict[object, ModelServer] = {}

    def is_free(self, target: ModelServer, holder: object) -> bool:
        """Whether no other holder has the target."""
        return all(it is not target or its is holder for its, it in self._kept.items())

    def take(self, target: ModelServer, holder: object) -> None:
        """Keep a target that is free, instead of the one that the holder had."""
        self._kept[holder] = target

    def release(self, holder: object) -> None:
        """Free the holder's target, if it has one."""
        if self._kept.pop(holder, None) is not None:
            self._tell()
