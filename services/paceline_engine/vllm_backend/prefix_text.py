"""A session's sequence as a prefix in vLLM's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_engine.terms.model_cache import ModelCache

if TYPE_CHECKING:
    from collections.abc import Sequence


class PrefixText(ModelCache):
    """The tokens of a sequence that vLLM has computed, of which it may still have the blocks.

    No decision depends on what is left in the cache: vLLM computes what it evicted again.

    Attributes:
        salt: Names the sequence in vLLM's cache, so that no other session finds its blocks: how
            fast an answer comes tells nothing about the texts of others.
    """

    def __init__(self, salt: str) -> None:
        super().__init__()
        self.salt = salt

    @property
    def can_be_copied(self) -> bool:
        """True: a sequence that begins with an ended one takes its salt, and finds its blocks."""
        return True

    def _copy(self, source: ModelCache, length: int) -> None:
        del length
        assert isinstance(source, PrefixText)
        self.salt = source.salt

    def _gather(self, path: Sequence[int]) -> None:
        raise AssertionError(f"{path}: trees are not computed here")

    def _crop(self, length: int) -> None:
        """Do nothing: blocks of tokens that no prefix names are evicted first."""
