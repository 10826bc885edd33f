"""How wide drafts are: what a request may have and the planner chooses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """How wide drafts are.

    Attributes:
        width: Tokens that are drafted at a place; 1 for a chain.
        branches: Tokens beside the chain's that a drafter's forward follows.
    """

    width: int = 1
    branches: int = 0

    def __str__(self) -> str:
        branches = f" and {self.branches} branch(es)" if self.branches else ""
        return f"trees of width {self.width}{branches}"


CHAIN = Shape()
