"""Whom a decoding method has work for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline_orchestrator.planning.growth import Growth

__all__ = ["Staff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staff:
    """Servers that a method can use, if there are as many.

    Attributes:
        target_count: Targets at most.
        drafter_count: Drafters at most.
        growth: How many more targets it takes if they come while it runs; None takes no more.
        drafts: Whether it has work for a drafter, be it the text itself.
    """

    target_count: int
    drafter_count: int
    growth: Growth | None
    drafts: bool
