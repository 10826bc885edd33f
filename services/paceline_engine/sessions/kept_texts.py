"""Sequences of ended sessions, kept for sessions that begin with the same tokens.

A conversation's next turn, and another question about the same document, begin with tokens that an
earlier session has computed. So a sequence is kept for a while after its session, and a session
with the same first tokens copies their state.

A session is compared only with sequences of its own owner and share, so its latency shows nothing
about other clients' prompts. And only with sequences of its own LoRA adapter, or of none as it has
none: the same tokens have other keys and values with another one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_engine.terms.model_cache import common_length

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from paceline_engine.terms.model_cache import ModelCache

_LEAST_TOKENS = 32
"""Sequences are found by their first tokens, so many. To reuse fewer would not pay for the copy."""
_MOST_TEXTS = 256


@dataclass(eq=False, slots=True, kw_only=True)
class _KeptText:
    """A kept sequence, and the owner, the share and the adapter whose sessions may use it.

    Attributes:
        size: Tokens that it has memory for.
        until: The time at which it is dropped, on the table's clock.
    """

    cache: ModelCache
    token_ids: array[int]
    owner: str
    share: str
    lora: str
    size: int
    until: float


class KeptTexts:
    """Sequences of ended sessions, in unreserved memory. Used on the event loop only.

    The share with most kept tokens loses its least recently used sequence first.

    Args:
        seconds: How long a sequence is kept after its last use; 0: no sequence is kept.
        clock: Seconds that never go back.

    Invariants:
        A kept sequence is only read: any number of sessions can begin with it.
        If one sequence begins with another one, only the longer is kept; but both where the longer
        one's state cannot be cut to the shorter one's.
    """

    def __init__(self, *, seconds: float, clock: Callable[[], float]) -> None:
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
        self,
        cache: ModelCache,
        token_ids: array[int],
        *,
        owner: str,
        share: str,
        lora: str = "",
        size: int,
    ) -> None:
        """Keep the sequence of an ended session, unless it is too short or cannot be copied.

        A sequence without computed state is not kept either.

        Args:
            cache: The model's state; from now on it is only copied.
            token_ids: The tokens that the session held.
            owner, share, lora: As the session's specification has them.
            size: Tokens that the sequence has memory for.
        """
        if not self._seconds or len(token_ids) < _LEAST_TOKENS:
            return
        if not cache.can_be_copied or cache.is_empty:
            return
        alike = self._alike(token_ids, whose=(owner, share, lora))
        if any(
            common == len(token_ids) and _covers(text.cache, cache, common)
            for text, common in alike
        ):
            return
        for text, common in alike:
            if common == len(text.token_ids) and _covers(cache, text.cache, common):
                self._texts.remove(text)
        until = self._clock() + self._seconds
        self._texts.append(
            _KeptText(
                cache=cache,
                token_ids=token_ids,
                owner=owner,
                share=share,
                lora=lora,
                size=size,
                until=until,
            )
        )
        if len(self._texts) > _MOST_TEXTS:
            self._drop_one()

    def find(
        self, token_ids: array[int], *, owner: str, share: str, lora: str = ""
    ) -> tuple[ModelCache, int]:
        """Return the sequence with state for most first tokens, and how many tokens are the same.

        A recurrent state cannot be cut anywhere, so a shorter sequence may have more to give.

        Raises:
            LookupError: no sequence has enough tokens in common.
        """
        alike = self._alike(token_ids, whose=(owner, share, lora))
        if not alike:
            raise LookupError
        # A text's last token is always computed again.
        most = len(token_ids) - 1
        found, length = max(
            alike, key=lambda each: (each[0].cache.reachable(min(each[1], most)), each[1])
        )
        found.until = self._clock() + self._seconds
        self._texts.remove(found)
        self._texts.append(found)
        return found.cache, length

    def shrink(self, token_count: int) -> None:
        """Drop sequences until the rest has memory for no more than so many tokens."""
        while self.token_count > token_count:
            self._drop_one()

    def expire(self) -> None:
        """Drop sequences that were not used for `seconds`."""
        now = self._clock()
        self._texts = [text for text in self._texts if text.until > now]

    def _alike(
        self, token_ids: array[int], *, whose: tuple[str, str, str]
    ) -> list[tuple[_KeptText, int]]:
        """Return the sequences with the same first tokens, and how many each has in common."""
        beginning = token_ids[:_LEAST_TOKENS]
        return [
            (text, common_length(text.token_ids, token_ids))
            for text in self._texts
            if (text.owner, text.share, text.lora) == whose
            and not text.cache.is_empty  # its last forward may have failed after the session ended
            and text.token_ids[:_LEAST_TOKENS] == beginning
        ]

    def _drop_one(self) -> None:
        sizes = Counter[str]()
        for text in self._texts:
            sizes[text.share] += text.size
        [(largest, _)] = sizes.most_common(1)
        self._texts.remove(next(text for text in self._texts if text.share == largest))


def _covers(longer: ModelCache, shorter: ModelCache, length: int) -> bool:
    """Whether a sequence that begins with another one has as much state for its tokens."""
    return longer.reachable(length) >= shorter.reachable(length)
