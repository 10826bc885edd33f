"""Guesses that a head makes step by step: chains with runners-up, and trees by confidence.

A step of a head computes the *due* rows of all sequences. Each due row reads a guessed token, and
what the row of the guess before it put out. It finds the tokens that may follow.

    a chain      due: the best guess of the step before. Its runners-up are guesses, too, and
                 nothing follows them.
    a tree       due: the likeliest guesses of the step before, up to the beam. A guess's worth is
                 the product of the head's probabilities on its path. Of all guesses that were
                 found, the tree has those of the most worth.

Trees are those of EAGLE-2 (Li et al. 2024, arXiv 2406.16858). Difference: a guess that is not among
the best so far is not extended. What follows it is worth no more, so it could not be in the tree.

Letters: R due rows, H heads, G key and value heads, D their width, L certain rows of a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from paceline_contract.proposal import Proposal
from paceline_engine.terms.rank_paths import propose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.terms.draft_tree import Ranked
    from paceline_engine.terms.rank_paths import RankPath
    from paceline_engine.torch_backend.self_drafting import DecidedRow


@dataclass(slots=True)
class DueRow:
    """A row that the next step computes.

    Attributes:
        token: The token that it reads.
        seen: The rows of guesses that it sees, as indices in `Growing.states`; with a step that
            keeps states, itself as the last one.
        node: The guess that it reads; None: the decided token.
    """

    token: int
    seen: tuple[int, ...] = ()
    node: int | None = None


class Growing(Protocol):
    """What a head guesses after one decided row, while it is made.

    Attributes:
        row: The row that decided.
        due: What the next step computes; empty: it is finished.
        states: The keys and values of the rows of guesses so far: (G, D) each.
    """

    row: DecidedRow
    due: list[DueRow]
    states: list[tuple[Tensor, Tensor]]

    @property
    def width(self) -> int:
        """How many tokens to find after each due row."""

    def grow(self, ranked: Sequence[Ranked]) -> list[int]:
        """Take the tokens that were found after each due row.

        Returns:
            For each row of the next step, which due row its guess was found by.
        """

    def proposal(self) -> Proposal:
        """Return the guesses."""


@dataclass(slots=True)
class Chain:
    """A chain with runners-up.

    Args:
        row: The row that decided.
        paths: The guesses to propose.
        widths: How many guesses `paths` asks for at each depth.
        least: The chain ends where the probability of all its guesses together is below this.
    """

    row: DecidedRow
    paths: Sequence[RankPath]
    widths: Sequence[int]
    least: float
    due: list[DueRow] = field(init=False)
    states: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)
    _guesses: list[list[int]] = field(default_factory=list, init=False)
    _probability: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        self.due = [DueRow(self.row.next_token)]

    @property
    def width(self) -> int:
        """How many tokens to find after the due row."""
        return self.widths[len(self._guesses)]

    def grow(self, ranked: Sequence[Ranked]) -> list[int]:
        """Take the tokens of a depth, unless the chain has become too unlikely: then it ends."""
        (own,), (read,) = ranked, self.due
        token, probability = own[0]
        self.due = []
        self._probability *= probability
        if self._probability < self.least:
            return []
        self._guesses.append([guess for guess, _ in own])
        if len(self._guesses) == len(self.widths):
            return []
        self.due = [DueRow(token, read.seen)]
        return [0]

    def proposal(self) -> Proposal:
        """Return the guesses."""
        return propose(self.paths, self._guesses)


@dataclass(frozen=True, slots=True)
class _Guess:
    token: int
    parent: int | None
    worth: float


@dataclass(slots=True)
class ConfidenceTree:
    """A tree of the guesses that the head is surest of.

    Args:
        row: The row that decided.
        size: The most guesses to propose.
        depth: The most guesses on a path.
        least: Guesses of less worth are dropped.
    """

    row: DecidedRow
    size: int
    depth: int
    least: float
    due: list[DueRow] = field(init=False)
    states: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)
    _found: list[_Guess] = field(default_factory=list, init=False)
    _best: list[int] = field(default_factory=list, init=False)
    _steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.due = [DueRow(self.row.next_token)]

    @property
    def width(self) -> int:
        """How many tokens to find after each due row, and how many rows a step has at most."""
        return math.isqrt(self.size - 1) + 1

    def grow(self, ranked: Sequence[Ranked]) -> list[int]:
        """Take the tokens that were found, and choose the likeliest to go on from."""
        first, read = len(self._found), self.due
        found_by = [
            place
            for place, found in enumerate(zip(read, ranked, strict=True))
            for _ in range(self._take(*found))
        ]
        # Among equals the one found first, so that a parent comes before its children.
        numbers = range(len(self._found))
        self._best = sorted(numbers, key=lambda it: (-self._found[it].worth, it))[: self.size]
        self._steps += 1
        chosen: list[int] = []
        if self._steps < self.depth:
            chosen = [number for number in self._best if number >= first][: self.width]
        sources = [found_by[number - first] for number in chosen]
        self.due = [
            DueRow(self._found[number].token, read[source].seen, number)
            for number, source in zip(chosen, sources, strict=True)
        ]
        return sources

    def _take(self, read: DueRow, ranked: Ranked) -> int:
        """Take the tokens that a due row found, and return how many."""
        before = 1.0 if read.node is None else self._found[read.node].worth
        count = len(self._found)
        for token, probability in ranked:
            # A rounded probability may be above 1; no guess is worth more than its parent.
            worth = min(before, before * probability)
            if worth > 0 and worth >= self.least:
                self._found.append(_Guess(token, read.node, worth))
        return len(self._found) - count

    def proposal(self) -> Proposal:
        """Return the guesses, parents before children."""
        chosen = sorted(self._best)
        number = {index: place for place, index in enumerate(chosen, 1)}
        guesses = [self._found[index] for index in chosen]
        return Proposal(
            tuple(each.token for each in guesses),
            tuple(0 if each.parent is None else number[each.parent] for each in guesses),
        )


@dataclass(frozen=True, slots=True)
class GrowthStep:
    """A step of some sequences' guesses: what each due row sees (`adapter.SeenRows`).

    Attributes:
        growing: The guesses; they have due rows.
        own_layer: The layer of a sequence's buffers with the head's keys and values.
        keeps: Whether the rows' keys and values are kept with the guesses; if not, they are the
            sequence's own.
    """

    growing: Sequence[Growing]
    own_layer: int
    keeps: bool

    def take(self, keys: Tensor, values: Tensor) -> None:
        """Learn the rows' own keys and values: (R, G, D)."""
        if not self.keeps:
            return
        pairs = zip(keys, values, strict=True)
        for each in self.growing:
            for row in each.due:
                row.seen = (*row.seen, len(each.states))
                each.states.append(next(pairs))

    def states(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Return each sequence's keys and values, certain rows' and guesses': (1, G, L, D)."""
        return [self._states_of(each) for each in self.growing]

    def _states_of(self, each: Growing) -> tuple[Tensor, Tensor]:
        keys, values = (it[self.own_layer] for it in each.row.text.until(each.row.length))
        if not each.states:
            return keys, values
        own = zip(*each.states, strict=True)
        own_keys, own_values = (torch.stack(it, 1)[None] for it in own)
        return torch.cat((keys, own_keys), 2), torch.cat((values, own_values), 2)

    def attend(
        self,
        queries: Tensor,
        *,
        made: Sequence[tuple[Tensor, Tensor]] | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend with the due rows: (R, H, D)."""
        parts = torch.split(queries, [len(each.due) for each in self.growing])
        seen = self.states() if made is None else made
        return torch.cat(
            [
                _attend(own, *states, mask=_mask(each, states[0]), scale=scale)
                for own, states, each in zip(parts, seen, self.growing, strict=True)
            ]
        )


def _mask(each: Growing, keys: Tensor) -> Tensor | None:
    """Return which keys each due row sees, (R, L), or None: all see all."""
    count = len(each.states)
    if all(len(row.seen) == count for row in each.due):
        return None
    certain = keys.shape[2] - count
    mask = torch.zeros(len(each.due), certain + count, dtype=torch.bool)
    mask[:, :certain] = True
    for place, row in enumerate(each.due):
        mask[place, [certain + index for index in row.seen]] = True
    return mask.to(keys.device)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Attend with rows of one sequence: (R, H, D)."""
    count, groups = len(queries), keys.shape[1]
    # (1, G, R * H / G, D): the heads of a group lie one below the other, as rows.
    asked = queries.view(count, groups, -1, queries.shape[-1]).transpose(0, 1).flatten(1, 2)[None]
    if mask is not None:
        mask = mask.repeat_interleave(asked.shape[2] // count, 0)
    found = functional.scaled_dot_product_attention(
        asked, keys, values, attn_mask=mask, scale=scale
    )
    rows = torch.unflatten(found[0], 1, (count, -1)).transpose(0, 1)
    return rows.reshape(count, -1, found.shape[-1])
