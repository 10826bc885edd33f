"""What a simulated target guesses by itself, for methods that let it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_contract.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_protocol.laboratory.tree_shapes import RankPath


@dataclass(frozen=True, slots=True)
class OwnGuesses:
    """How good a target's own guesses are, and which of them it proposes.

    Attributes:
        rates: How likely its best guess is right: the one for the token after its own next one
            first, then for the one after that, each by itself.
        paths: The tree that it proposes; a path comes before those that it is the beginning of.
    """

    rates: tuple[float, ...]
    paths: tuple[RankPath, ...]

    def proposal(self, ranked: Sequence[Sequence[int]]) -> Proposal:
        """Put guesses into the tree: for each place the tokens, best first."""
        places = {(): 0} | {path: place for place, path in enumerate(self.paths, start=1)}
        return Proposal(
            tuple(ranked[len(path) - 1][path[-1]] for path in self.paths),
            tuple(places[path[:-1]] for path in self.paths),
        )
