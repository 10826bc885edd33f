"""A session's sequence at a model that speaks another vocabulary: `speaking_backend.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_engine.speaking.mapped_rows import KnownRows
from paceline_engine.terms.model_cache import ModelCache

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from paceline_engine.speaking.spoken_text import SpokenText


class SpeakingText(ModelCache):
    """A session's sequence: in the target's tokens outside, in the drafter's inside.

    Args:
        own_length: Returns how many of the model's tokens a text is likely to have.
        reserve_length: How many of the model's tokens memory is reserved for.

    Attributes:
        inner: The model's sequence.
        text: The text in both vocabularies.
        rows: The model's last rows.
    """

    def __init__(
        self,
        inner: ModelCache,
        text: SpokenText,
        *,
        own_length: Callable[[int], int],
        reserve_length: int,
    ) -> None:
        super().__init__()
        self.inner, self.text = inner, text
        self.rows = KnownRows()
        self._own_length = own_length
        self._reserved_length = reserve_length

    def reserve(self, length: int) -> None:
        """Learn for how many tokens memory is reserved from now on. Called on the event loop."""
        self._reserve(self._own_length(length))

    def grow(self, length: int) -> None:
        """Let buffers grow by a quarter where a text has more tokens than was likely.

        Beyond what is reserved they would grow row by row, and each time be copied. Worker thread.

        Args:
            length: Of the text, in the model's tokens.
        """
        if length > self._reserved_length:
            self._reserve(length + length // 4)

    def _reserve(self, own_length: int) -> None:
        self._reserved_length = max(self._reserved_length, own_length)
        self.inner.reserve(self._reserved_length)

    @property
    def can_be_copied(self) -> bool:
        """Whether another sequence can begin with what was computed of this one."""
        return self.inner.can_be_copied

    @property
    def is_empty(self) -> bool:
        """Whether the model has computed nothing of it."""
        return self.inner.is_empty

    def begin_like(self, source: ModelCache) -> None:
        """Begin with what a sequence has in common with the first prefix."""
        assert isinstance(source, SpeakingText)
        self.inner.begin_like(source.inner)

    def end(self) -> None:
        """Learn that its session is over: at most it is copied from now on."""
        super().end()
        self.inner.end()

    def missing_length(self, prefix: array[int]) -> int:
        """Estimate the rows of the next forward: the target's tokens that are not here yet."""
        return max(1, len(prefix) - self.text.common_length(prefix))

    def reachable(self, length: int) -> int:
        """Estimate the most tokens, up to so many, to which the model's sequence can be cut.

        A text's tokens in the two vocabularies are taken to lie evenly beside each other. On the
        event loop, perhaps during the last forward of an ended session: so nothing is encoded.
        """
        total, own = len(self.text), self.inner.length
        length = min(length, total)
        wanted = own * length // total if total else 0
        if wanted == 0:
            return 0
        reached = self.inner.reachable(wanted)
        return length if reached == wanted else length * reached // wanted

    def clear(self) -> None:
        """Forget all state, because code stopped at an unknown point."""
        self.rows.forget()
        self.inner.clear()

    def _crop(self, length: int) -> None:
        """Do nothing: the model's sequence crops itself."""
