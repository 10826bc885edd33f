"""How a running request uses targets that become free while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_orchestrator.planning.equation import needed_target_count, smallest_lookahead

# With the text beyond a drafter, on Table 2's rows (bench/LOG.md, 2026-11-23): a token of the text
# beside the drafter's is worth a fifth of the time, and so are two targets more; further ones gain
# next to nothing, and what they are asked costs this process time.
TEXT_LOOKAHEAD, TEXT_TARGETS = 2, 2
"""The shortest blocks and the further targets of a request whose text drafts beyond a drafter."""


@dataclass(frozen=True, slots=True)
class TargetScaling:
    """How many targets a plan can use, by Equation 1 with the present latencies.

    Attributes:
        lookahead: As planned.
        is_fixed: Whether the client set the lookahead; otherwise more targets mean shorter blocks.
        has_text: Whether the text drafts beyond the drafter.
    """

    lookahead: int
    is_fixed: bool
    has_text: bool = False

    def target_limit(self, target_ns: int, drafter_ns: int) -> int:
        """Return the most targets that are of use."""
        lookahead = self.lookahead if self.is_fixed else 1
        needed = needed_target_count(target_ns, drafter_ns, lookahead=lookahead)
        return needed + (TEXT_TARGETS if self.has_text else 0)

    def lookahead_with(self, target_count: int, *, target_ns: int, drafter_ns: int) -> int:
        """Return the lookahead for so many targets: never more than planned."""
        if self.is_fixed:
            return self.lookahead
        shortest = smallest_lookahead(target_ns, drafter_ns, target_count=target_count)
        return min(self.lookahead, max(shortest, TEXT_LOOKAHEAD if self.has_text else 1))
