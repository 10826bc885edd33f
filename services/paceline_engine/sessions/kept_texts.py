"""What ended sessions leave behind, for a session whose text begins alike.

A conversation's next turn, and another question about the same document, begin with a text that a
session before them has computed. It is kept for a while, and who comes with the same beginning
copies what was computed of it.

Only texts of the same owner and share are looked at, so timing tells nothing of others' texts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from paceline_engine.terms.model_cache import common_length

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from paceline_engine.terms.model_cache import ModelCache

_LEAST_TOKENS = 32
"""What fewer tokens save is not worth a copy; and texts are found by so many."""
_MOST_TEXTS = 256


@dataclass(eq=False, slots=True, kw_only=True)
class _KeptText:
    """A text, and for whom it is kept.

    Attributes:
        size: Tokens that it has memory for.
        until: When it is given up, on the table's clock.
    """

    cache: ModelCache
    token_ids: array[int]
    owner: str
    share: str
    size: int
    until: float


class KeptTexts:
    """Texts of ended sessions, within what no session reserves. Used on the event loop only.

    The least recently used goes first, of the share that has most.

    Invariants:
        A text that is kept is only read: as many sessions as come can begin with it.
        Of two texts of which one begins with the other, the longer is kept.
    """

    def __init__(self, *, seconds: float, clock: Callable[[], float]) -> None:
        """Build it.

        Args:
            seconds: How long a text is kept after its last use; 0: none is.
            clock: Seconds that never go back.
        """
        self._seconds = seconds
        self._clock = clock
        self._texts: list[_KeptText] = []

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def token_count(self) -> int:
        """Tokens that they have memory for."""
        return sum(text.size for text in self._texts)

    def keep(
        self, cache: ModelCache, token_ids: array[int], *, owner: str, share: str, size: int
    ) -> None:
        """Keep the text of a session that has ended, unless it is too short or cannot be copied.

        Nor is a text kept of which nothing was computed, or all was lost by a forward that failed.

        Args:
            cache: The text in the model; nothing else will be asked of it.
            token_ids: What the session held.
            size: Tokens that it has memory for.
        """
        if not self._seconds or len(token_ids) < _LEAST_TOKENS:
            return
        if not cache.can_be_copied or cache.is_empty:
            return
        alike = self._alike(token_ids, owner=owner, share=share)
        if any(common == len(token_ids) for _, common in alike):
            return
        for text, common in alike:
            if common == len(text.token_ids):
                self._texts.remove(text)
        until = self._clock() + self._seconds
        self._texts.append(
            _KeptText(
                cache=cache, token_ids=token_ids, owner=owner, share=share, size=size, until=until
            )
        )
        if len(self._texts) > _MOST_TEXTS:
            self._drop_one()

    def find(self, token_ids: array[int], *, owner: str, share: str) -> tuple[ModelCache, int]:
        """Return the text that has most in common with another one's beginning, and how much.

        Raises:
            LookupError: no text has enough.
        """
        alike = self._alike(token_ids, owner=owner, share=share)
        if not alike:
            raise LookupError
        found, length = max(alike, key=itemgetter(1))
        found.until = self._clock() + self._seconds
        self._texts.remove(found)
        self._texts.append(found)
        return found.cache, length

    def shrink(self, token_count: int) -> None:
        """Drop texts until the others have memory for no more than so many tokens."""
        while self.token_count > token_count:
            self._drop_one()

    def expire(self) -> None:
        """Drop what has not been used for long."""
        now = self._clock()
        self._texts = [text for text in self._texts if text.until > now]

    def _alike(
        self, token_ids: array[int], *, owner: str, share: str
    ) -> list[tuple[_KeptText, int]]:
        """Return the texts with the same first tokens, and how many each has in common."""
        beginning = token_ids[:_LEAST_TOKENS]
        return [
            (text, common_length(text.token_ids, token_ids))
            for text in self._texts
            if (text.owner, text.share) == (owner, share)
            and not text.cache.is_empty  # its last forward may have failed after the session ended
            and text.token_ids[:_LEAST_TOKENS] == beginning
        ]

    def _drop_one(self) -> None:
        sizes = Counter[str]()
        for text in self._texts:
            sizes[text.share] += text.size
        [(largest, _)] = sizes.most_common(1)
        self._texts.remove(next(text for text in self._texts if text.share == largest))
