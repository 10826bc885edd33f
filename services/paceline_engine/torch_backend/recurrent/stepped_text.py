"""Sequences of models whose state goes forward only: nothing unverified may enter it.

Theory of operation
-------------------

A recurrent state stands for all tokens so far, and no row can be taken out of it again. So a
proposal is judged one token at a time: a row is computed, its token is decided, and the proposal's
next token is fed only if the decision accepts it (`Feed.accepts`).

    proposal   |    p1    |    p2    |    p3    |
    rows       | r0 -> p1 | r1 -> p2 | r2 -> x  |   x is the next token, and p3 is never fed

A proposal of which a tokens are accepted takes a + 1 forwards, as many as plain decoding.

Prefixes that a caller takes back are another matter: a drafter's own tokens, or a block that
another target rejected. For these there are copies of the state, before the last tokens of the
prefixes that calls brought. If no copy is short enough, the sequence is computed anew; the caller
need not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline_engine.terms.model_cache import ModelCache
from paceline_engine.torch_backend.recurrent.library_state import LibraryState

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

# Copies at the ends of prefixes, but not after every token; and some in between.
_LEAST_BETWEEN, _MOST_BETWEEN = 4, 64
MOST_COPIES = 3
"""A caller that drafts on takes back its last tokens, and now and then the ones before these."""


class SteppedText(ModelCache):
    """A session's sequence in a model that the library computes, with a recurrent state."""

    def __init__(self, model: Any, *, takes_blocks: bool) -> None:
        """Build it without state.

        Args:
            model: The library's.
            takes_blocks: Whether several rows after others get the right logits.
        """
        super().__init__()
        self._model, self._takes_blocks = model, takes_blocks
        self._state: LibraryState | None = LibraryState(model)
        self._copies: list[LibraryState] = []
        self.begins_item = False

    def reachable(self, length: int) -> int:
        """Return the longest length, up to this one, that a state here stands for."""
        lengths = [copy.length for copy in self._copies]
        if self._state is not None:
            lengths.append(self.length)
        return max((each for each in lengths if each <= length), default=0)

    def settle(self) -> None:
        """Leave the state as unknown as a failed forward left it: the next one makes it anew."""

    def append(
        self,
        token_ids: Sequence[int],
        *,
        scored_count: int,
        accepts: Callable[[Sequence[Tensor]], bool] | None,
    ) -> Tensor:
        """Compute the rows of further tokens, and return the logits of the last ones: (rows, V).

        Args:
            scored_count: How many of the last rows are scored; one more than the block has.
            accepts: Asked before each token of the block, with the logits so far, (V,) each; after
                a no the rest is not computed. None: all is.
        """
        state = self._known_state()
        self._state = None  # until the forward is over
        ids = torch.tensor([*token_ids]).to(self._model.device, non_blocking=True)
        block_count = scored_count - 1 if accepts is not None else 0
        text_ids = ids[: len(ids) - scored_count + 1]
        if scored_count and self._is_copy_due(state.length + len(text_ids) - 1):
            # The next call may bring the same prefix, whose last row is always computed again.
            if len(text_ids) > 1:
                self._rows(state, text_ids[:-1])
            self._copies = [*self._copies, state.copy()][-MOST_COPIES:]
        rows = self._rows(state, ids[state.length - self.length : len(ids) - block_count])
        scored = [*rows[len(rows) - scored_count + block_count :]]
        for token in ids[len(ids) - block_count :]:
            assert accepts is not None
            if not accepts(scored):
                break
            scored.append(state.append(token[None])[0])
        self._state = state
        return torch.stack(scored) if scored else rows[:0]

    def extend(self, token_ids: array[int], parents: Sequence[int] = ()) -> None:
        """Take in tokens whose state a forward has appended."""
        super().extend(token_ids, parents)
        assert self._state is None or self._state.length == self.length

    def _rows(self, state: LibraryState, token_ids: Tensor) -> Tensor:
        if self._takes_blocks or not state.length:
            return state.append(token_ids)
        return torch.cat([state.append(token[None]) for token in token_ids])

    def _known_state(self) -> LibraryState:
        """Return the state of the sequence, made anew from a copy if a forward failed."""
        if self._state is not None:
            assert self._state.length == self.length
            return self._state
        start = self.reachable(self.length)
        state = self._copy_of(start)
        if start < self.length:
            missing = torch.tensor(self.token_ids[start:].tolist()).to(self._model.device)
            self._rows(state, missing)
        return state

    def _copy_of(self, length: int) -> LibraryState:
        for each in self._copies:
            if each.length == length:
                return each.copy()
        assert not length, "it is reachable"
        return LibraryState(self._model)

    def _is_copy_due(self, length: int) -> bool:
        last = self._copies[-1].length if self._copies else 0
        return length - last >= (_LEAST_BETWEEN if self.begins_item else _MOST_BETWEEN)

    def _crop(self, length: int) -> None:
        self._copies = [each for each in self._copies if each.length <= length]
        if self._state is None or self._state.length != length:
            self._state = self._copy_of(length)
