"""What the planner knows of servers, load and this process before it plans a request."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from paceline_orchestrator.fleet.row_prices import RowPrices

MOST_TREE_TOKENS = 64
"""The most tokens of a tree: what accelerators compute in about the time of one row."""

EQUAL_ROWS = RowPrices()
"""The prices of servers that have not said what rows cost."""

# All targets compute side by side, however many there are.
_NOTHING_SHARED = sys.maxsize


@dataclass(frozen=True, slots=True)
class Measurements:
    """What the planner knows.

    Attributes:
        target_step_ns: One decoding step of a target, with no rows beside it.
        target_first_ns: A target's first forward on the prompt.
        drafter_step_ns: One decoding step of the drafter, as its tokens arrive.
        acceptance_rate: Probability that the target accepts a draft token, in [0, 1].
        target_count: Targets there are, 1 or more.
        drafter_count: Drafters there are; without one the drafter's latency means nothing.
        call_ns: What a call takes before its first answer, besides its forward and its wait.
        dispatch_ns: What a verification costs this process, in CPU time.
        request_count: Requests that share the targets, this one included.
        drafting_count: Requests that share this one's drafter, this one included.
        target_prices: What the rows of a target's forwards cost, and whether calls share them.
        drafter_prices: The same of the drafter.
        guess_count: Tokens that a target which drafts for itself proposes with a verdict; 0 where
            none does.
        guesses_accepted: How many of those it accepts with the next one, on average.
        rank_decays: How often each runner-up of the drafter is right where all before it are wrong.
        tree_tokens: The most tokens of a tree that targets judge; 0 where they, or the drafter,
            know chains only.
        tree_depth: The most tokens of a path of it.
        side_by_side: Targets that have hardware left beside the drafter's and each other's; 0:
            whenever the drafter computes, a target is slower for it.
        targets_run_on: Whether a target's forward runs to its end after its call was withdrawn, so
            that the next call waits for that.
        drafter_runs_on: The same of the drafter.
    """

    target_step_ns: int
    target_first_ns: int
    drafter_step_ns: int
    acceptance_rate: float
    target_count: int
    drafter_count: int = 1
    call_ns: int = 0
    dispatch_ns: int = 0
    request_count: int = 1
    drafting_count: int = 1
    target_prices: RowPrices = EQUAL_ROWS
    drafter_prices: RowPrices = EQUAL_ROWS
    guess_count: float = 0.0
    guesses_accepted: float = 0.0
    rank_decays: tuple[float, ...] = ()
    tree_tokens: int = 0
    tree_depth: int = 0
    side_by_side: int = _NOTHING_SHARED
    targets_run_on: bool = False
    drafter_runs_on: bool = False

    @property
    def verification_ns(self) -> int:
        """A verification as its caller sees it, at an idle target."""
        return self.target_step_ns + self.call_ns

    @property
    def knows_trees(self) -> bool:
        """Whether servers take trees, and it is known what their rows cost."""
        measured = self.target_prices.are_measured and self.drafter_prices.are_measured
        return measured and self.tree_tokens > 0

    @property
    def is_crowded(self) -> bool:
        """Whether there are more requests than targets."""
        return self.request_count > self.target_count

    @property
    def part(self) -> int:
        """This request's part of the targets, rounded; at least one, which it may have to share."""
        return max(1, (2 * self.target_count + self.request_count) // (2 * self.request_count))

    @property
    def everybody(self) -> int:
        """Requests at this one's drafter if all of them drafted, and at least those that do now."""
        each = -(-self.request_count // max(1, self.drafter_count))
        return max(self.drafting_count, each)

    def forward_ns(self, row_count: float, *, calls: float = 1.0) -> float:
        """Return what a target's forward takes with so many calls of so many rows each."""
        return self.target_step_ns * self.target_prices.of(max(1.0, calls) * row_count)

    def turn_ns(self, row_count: float) -> float:
        """Return how long the targets take to judge so many rows of every request once."""
        calls = self.request_count / self.target_count
        if calls <= 1:
            return self.forward_ns(row_count)
        if self.target_prices.shares_forwards:
            return 2 * self.forward_ns(row_count, calls=calls / 2)
        return calls * self.forward_ns(row_count)
