"""Drafting with a stack of models: how many tokens each stage drafts, and which stage reviews them.

Chen et al. 2023, "Cascade Speculative Drafting" (arXiv 2312.11462), Algorithm 1. Stages are
drafters, largest first; the last may be Max-Gram, which only proposes. Row 0 of the matrix is about
drafts for the target, row r about drafts for stage r - 1 when that stage reviews. The entries from
the diagonal on are how many tokens each stage adds:

                       base  small  Max-Gram
    for the target   [[ 5,    14,    10 ],    base up to 5 tokens, small up to 19, Max-Gram up to 29
    for base          [ 0,     1,    10 ],    small up to 1, Max-Gram up to 11
    for small         [ 0,     0,    10 ]]    Max-Gram up to 10

Smaller stages draft for a stage, which reviews their tokens (the vertical cascade). Later tokens,
which are less likely to be accepted, come from smaller stages (the horizontal cascade). Limits are
lower bounds, because a review gives several tokens.

Difference: the printed algorithm ends the acceptance loop on acceptance, leaves the bonus token
out, never has the last model review Max-Gram, and cuts the matrix in the wrong corner; this module
does what the paper's code does. Max-Gram's entry is also how many tokens it proposes at once (the
paper's code: 10, as in all of its matrices), it may find none, and no more tokens are drafted than
are asked for. A draft for a target is made in rounds: the matrix counts from the end of the call's
prefix.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from paceline_engine.terms.items import Judge, Judgement

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Sequence
    from typing import Self

    from paceline_contract.proposal import SparseDistribution

_MOST_TOKENS = 1024

MAX_GRAM = "max-gram"
"""The name of the stage that is no model."""

Matrix: TypeAlias = tuple[tuple[int, ...], ...]
"""As above: as many rows and columns as stages."""


class MatrixError(ValueError):
    """A matrix cannot be used. The message is one line for the operator."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A token that a stage drew.

    Attributes:
        stage: The stage that drew it.
        probability: The stage's probability of the token.
        distribution: Under REJECTION the distribution that it was drawn from.
        is_forced: Whether a grammar left no other, so that no stage had to draw it.
    """

    token_id: int
    stage: int = 0
    probability: float = 1.0
    distribution: SparseDistribution | None = None
    is_forced: bool = False


Propose: TypeAlias = "Callable[[Sequence[Draw], int], Sequence[Draw]]"
"""Max-Gram, or a grammar that leaves no other tokens.

Returns at most so many tokens that follow the prefix and these tokens.
"""


@dataclass(frozen=True, slots=True)
class Review:
    """A forward that a draft needs next.

    Attributes:
        stage: The stage that reviews.
        text: The tokens after the prefix that are not reviewed.
        tail: The tokens after `text`, which are reviewed; empty: the stage finds one token itself.
    """

    stage: int
    text: tuple[Draw, ...]
    tail: tuple[Draw, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewTask(Judge):
    """The task of a stage that reviews a chain.

    Attributes:
        draws: The chain's tokens, as their stages drew them.
        stage: The stage that reviews.
        leniency: A token may be up to so many times too likely.
    """

    draws: tuple[Draw, ...] = ()
    stage: int = 0
    leniency: float = 1.0

    def only(self, kept: Sequence[int]) -> Self:
        """Return the same task for only these of the chain's tokens."""
        draws = tuple(self.draws[index] for index in kept)
        return replace(self, proposal=self.proposal.only(kept), draws=draws)


@dataclass(frozen=True, slots=True)
class Reviewed(Judgement):
    """A stage's verdict on a chain.

    Attributes:
        draws: The accepted tokens and the next one, as they are drawn now.
    """

    draws: tuple[Draw, ...] = ()


class CascadeDraft:
    """One draft: it asks for a review, gets the review's result, and asks for the next review.

    Invariants:
        It drafts what Algorithm 1 does
        (tests/unit/engine/test_cascade.py::test_it_drafts_what_the_algorithm_does).

    Attributes:
        wanted: The next review; None: all tokens are found.
    """

    def __init__(
        self,
        matrix: Matrix,
        *,
        propose: Propose | None = None,
        force: Propose | None = None,
        token_count: int,
    ) -> None:
        """Begin.

        Args:
            matrix: A row for each stage.
            propose: The last stage, if that is no model.
            force: Returns the tokens that a grammar forces; None: there is no grammar.
            token_count: How many tokens are to be found.
        """
        self._rounds = _Rounds(matrix, propose=propose, force=force, token_count=token_count)
        self._steps = self._rounds.steps()
        self._taken_count = 0
        self.wanted: Review | None = next(self._steps, None)

    def answer(self, draws: Sequence[Draw]) -> None:
        """Go on with the wanted review's result: the accepted tokens, and one more."""
        try:
            self.wanted = self._steps.send(draws)
        except StopIteration:
            self.wanted = None

    def take_found(self) -> list[Draw]:
        """Return the tokens that were found since the last call."""
        settled_count = self._rounds.settled_count
        found = self._rounds.text[self._taken_count : settled_count]
        self._taken_count = settled_count
        return found


class _Rounds:
    """A draft's tokens, and the steps in which it grows.

    The generator of steps refers to this object, but this object does not refer to the generator.
    So an abandoned draft is freed at once, with Max-Gram's index of its sequence.

    Attributes:
        text: The tokens that are drafted so far; some are still to be reviewed.
        settled_count: How many of them are final.
    """

    def __init__(
        self,
        matrix: Matrix,
        *,
        propose: Propose | None,
        force: Propose | None,
        token_count: int,
    ) -> None:
        self._matrix = matrix
        self._propose = propose
        self._force = force
        self._token_count = token_count
        self.text: list[Draw] = []
        self.settled_count = 0

    def steps(self) -> Generator[Review, Sequence[Draw]]:
        """Draft to the end: yield each review that is needed, and receive its result."""
        while (room := self._token_count - len(self.text)) > 0:
            start = len(self.text)
            self._add_forced(room)
            yield from self._draft_for(0, room - (len(self.text) - start))
            if len(self.text) == start:
                # Only Max-Gram was asked, and it found no token.
                yield from self._step(0, room)
            self.settled_count = len(self.text)

    def _draft_for(self, row: int, room: int) -> Generator[Review, Sequence[Draw]]:
        """Append at most `room` tokens for a row's reviewer: the horizontal cascade."""
        start, limit = len(self.text), 0
        for stage in range(row, len(self._matrix)):
            limit += self._matrix[row][stage]
            while (drafted := len(self.text) - start) < min(limit, room):
                yield from self._step(stage, room - drafted, at_once=self._matrix[row][stage])
                if row == 0:
                    self.settled_count = len(self.text)
                if len(self.text) - start == drafted:
                    break

    def _step(
        self, stage: int, room: int, *, at_once: int = 1
    ) -> Generator[Review, Sequence[Draw]]:
        """Append a stage's review of tokens that were drafted for it: the vertical cascade."""
        if self._propose is not None and stage == len(self._matrix) - 1:
            self.text += self._propose(self.text, min(at_once, room))
            return
        start = len(self.text)
        if stage + 1 < len(self._matrix):
            # A review gives one token more than it is given.
            yield from self._draft_for(stage + 1, room - 1)
        tail = tuple(self.text[start:])
        del self.text[start:]
        self.text += yield Review(stage, tuple(self.text), tail)
        self._add_forced(room - (len(self.text) - start))

    def _add_forced(self, room: int) -> None:
        """Append what a grammar forces: the stage that reviews next would draw nothing else."""
        if self._force is not None and room > 0:
            self.text += self._force(self.text, room)


def without_stages(matrix: Matrix, stages: Collection[int]) -> Matrix:
    """Return a matrix in which these stages draft nothing; the other entries stay."""
    return tuple(
        tuple(0 if stage in stages else entry for stage, entry in enumerate(row)) for row in matrix
    )


def parse_matrix(text: str, *, stage_count: int) -> Matrix:
    """Read a matrix: JSON, a list of rows.

    Raises:
        MatrixError: it is none, or not for so many stages.
    """
    try:
        rows = json.loads(text)
    except ValueError:
        rows = None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise MatrixError("is no matrix such as [[5, 10], [0, 10]]")
    if [len(row) for row in rows] != [stage_count] * stage_count:
        raise MatrixError(f"needs {stage_count} rows of {stage_count}: a column for each stage")
    for row, entries in enumerate(rows):
        for stage, entry in enumerate(entries):
            if type(entry) is not int or not 0 <= entry <= _MOST_TOKENS:
                raise MatrixError(f"[{row}][{stage}] is {entry!r}, not in [0, {_MOST_TOKENS}]")
            if entry and stage < row:
                raise MatrixError(f"[{row}][{stage}] is {entry}, below the diagonal all are 0")
    if not sum(rows[0]):
        raise MatrixError("[0] is all zeros: nothing would be drafted")
    return tuple(map(tuple, rows))
