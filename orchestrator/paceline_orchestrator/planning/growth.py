"""What a running request makes of targets that come while it runs: its speculation runs deeper."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_orchestrator.planning.estimates import needed_target_count, smallest_lookahead

__all__ = ["Growth"]


@dataclass(frozen=True, slots=True)
class Growth:
    """How far a plan can stretch, by Equation 1 with the latencies of now.

    Attributes:
        is_fixed: Whether the client said so; else more targets take shorter blocks.
    """

    lookahead: int
    is_fixed: bool

    def target_limit(self, target_ns: int, drafter_ns: int) -> int:
        """Return the most targets that are of use."""
        lookahead = self.lookahead if self.is_fixed else 1
        return needed_target_count(target_ns, drafter_ns, lookahead=lookahead)

    def lookahead_with(self, target_count: int, *, target_ns: int, drafter_ns: int) -> int:
        """Return the lookahead for so many targets: never more than planned."""
        if self.is_fixed:
            return self.lookahead
        shortest = smallest_lookahead(target_ns, drafter_ns, target_count=target_count)
        return min(self.lookahead, shortest)
