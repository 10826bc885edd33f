"""A sequence of the target's tokens, as the drafter reads it.

The tokens' bytes are one text, and the drafter's tokens are this text as the drafter's own
tokenizer cuts it, whatever was there before: a function of the bytes alone. A special token is no
text. It cuts the text, and has a token of its own where the drafter has one with the same role.

To encode a long text again with each token would take too long, so it is cut at *seams*, where a
part encodes as it does in the whole. Only the part after the last seam is encoded again.

    target     | The | qu | ick |  brown | ... |  fo | x |
    bytes      |Theˑquickˑbrown ...          ˑfox|
    seams      ^                     ^           (256 bytes or more apart)
    drafter    | closed part         | open part |

A seam is a space after something that is none. Tokenizers that cut words cut there; those that do
not cut at all, as SentencePiece, have no token that goes across. A vocabulary with such a token has
no seams.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_engine.terms.model_cache import common_length

if TYPE_CHECKING:
    from paceline_engine.speaking.token_map import TokenMap
    from paceline_engine.speaking.vocabulary import Vocabulary

_PART_BYTES = 256
# A space after no white space, whatever the alphabet; each look behind has a fixed width.
_SEAM = re.compile(
    rb"(?<=[^\x00-\x20])(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])"
    rb"(?<!\xe2\x81\x9f)(?<!\xe3\x80\x80) "
)


def has_seams(drafter: Vocabulary) -> bool:
    """Whether none of a vocabulary's tokens goes across a seam."""
    return not any(content and _SEAM.search(content) for content in drafter.contents)


@dataclass(frozen=True, slots=True)
class _Part:
    """A closed part of the text.

    Attributes:
        needs: How many of the target's tokens have to stay for it to stay.
        end: Where its bytes end.
        id_count: How many of the drafter's tokens are there up to its end.
    """

    needs: int
    end: int
    id_count: int


class SpokenText:
    """The sequence; see above.

    Invariants:
        The drafter's tokens are those of a text that was followed at once
        (tests/unit/engine/test_spoken_text.py::test_a_text_in_parts_is_the_whole_text).
    """

    def __init__(
        self, target: Vocabulary, drafter: Vocabulary, token_map: TokenMap, *, seams: bool
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._roles = token_map.roles
        self._least_part = _PART_BYTES if seams else None
        self._token_ids = array("I")
        self._ends = array("Q")
        self._bytes = bytearray()
        self._parts: list[_Part] = []
        self._closed = array("I", drafter.start_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    def follow(self, prefix: array[int]) -> None:
        """Take in a whole prefix: keep what is the same, and forget the rest.

        Raises:
            PanicError: the tokenizer gave up on it; the text is empty then.
        """
        self._cut(common_length(self._token_ids, prefix))
        try:
            for token in prefix[len(self) :]:
                self._append(token)
            self._close(self._end)
        except BaseException:
            self._cut(0)
            raise

    def common_length(self, prefix: array[int]) -> int:
        """Count the target's tokens that are here and begin a prefix."""
        return common_length(self._token_ids, prefix)

    def ids(self, length: int | None = None) -> array[int]:
        """Return the drafter's tokens of the first target tokens, of all by default."""
        length = len(self) if length is None else length
        count = bisect_right(self._parts, length, key=lambda part: part.needs)
        part = self._parts[count - 1] if count else _Part(0, 0, len(self._drafter.start_ids))
        end = self._ends[length - 1] if length else 0
        found = self._closed[: part.id_count]
        found.extend(self._drafter.encode(bytes(self._bytes[part.end : end])))
        return found

    @property
    def _end(self) -> int:
        return len(self._bytes)

    def _append(self, token: int) -> None:
        content = self._target.contents[token]
        if content is None and self._target.is_special(token):
            if token in self._target.start_ids:
                content = b""  # the drafter has its own
            elif role := self._roles.get(token):
                self._close(self._end)
                self._shut(self._end, needs=len(self) + 1, more=role)
                content = b""
            else:
                content = self._name(token)
        self._bytes += content or b""
        self._token_ids.append(token)
        self._ends.append(self._end)

    def _name(self, token: int) -> bytes:
        return next((text for text, it in self._target.special.items() if it == token), "").encode()

    def _close(self, end: int) -> None:
        """Close the parts that end at a seam before a place."""
        while self._least_part is not None:
            start = self._parts[-1].end if self._parts else 0
            seam = _SEAM.search(self._bytes, start + self._least_part, end)
            if seam is None:
                return
            at = seam.start()
            # The target's token with the seam's space has to stay.
            self._shut(at, needs=bisect_right(self._ends, at) + 1)

    def _shut(self, end: int, *, needs: int, more: tuple[int, ...] = ()) -> None:
        start = self._parts[-1].end if self._parts else 0
        self._closed.extend(self._drafter.encode(bytes(self._bytes[start:end])))
        self._closed.extend(more)
        self._parts.append(_Part(needs, end, len(self._closed)))

    def _cut(self, length: int) -> None:
        """Forget all but the first target tokens."""
        while self._parts and self._parts[-1].needs > length:
            self._parts.pop()
        kept = self._parts[-1].id_count if self._parts else len(self._drafter.start_ids)
        del self._closed[kept:]
        del self._token_ids[length:], self._ends[length:]
        del self._bytes[self._ends[-1] if length else 0 :]
