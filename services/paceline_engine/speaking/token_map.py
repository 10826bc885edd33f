"""Which tokens of the target a drafter's tokens mean, by their bytes.

Theory of operation
-------------------

T is the target's vocabulary, D the drafter's. A row of the drafter says how likely each token of D
is; a row of the target's kind is wanted. Three relations lead there, each from encoding the tokens
of one vocabulary with the other's tokenizer:

    first     of a token of D: the token of T that it begins with        D: " the"   T: " the"
    longer    a token of D is several tokens of T                        D: " hello" T: " hel" "lo"
    composed  a token of T is several tokens of D                        D: " hel" "lo" T: " hello"

`first` alone makes a row: the probability of a token of D goes to its first token of T. After one
of them, as after " hel", the drafter would see a text that its own tokenizer never cuts there. So
its row *before* that token still counts: " hello" has its probability, of which "lo" is left. And
a token of T that no token of D begins with is reached through `composed`, by drafting on.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_engine.speaking.vocabulary import Vocabulary

NO_TOKEN = -1
"""In a table: there is no such token."""

MOST_PARTS = 4
"""The longest way between the vocabularies that is looked at, in tokens."""


class Paths:
    """Tokens of one vocabulary that are several tokens of another: the paths to them.

    Args:
        found: Paths of two tokens or more, and the token that each of them is.
    """

    def __init__(self, found: Sequence[tuple[tuple[int, ...], int]]) -> None:
        self._found = sorted(found)

    def __len__(self) -> int:
        return len(self._found)

    def after(self, path: tuple[int, ...]) -> list[tuple[int, int, bool]]:
        """Return what begins with a path: a path's next token, its token, and whether it ends."""
        return [
            (each[len(path)], token, len(each) == len(path) + 1)
            for each, token in self._beginning_with(path)
        ]

    def __contains__(self, path: tuple[int, ...]) -> bool:
        """Whether a path goes on."""
        return next(self._beginning_with(path), None) is not None

    def _beginning_with(self, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield the longer paths that begin with one, which lie side by side."""
        for place in range(bisect_left(self._found, (path, NO_TOKEN)), len(self._found)):
            each, token = self._found[place]
            if each[: len(path)] != path:
                return
            if len(each) > len(path):
                yield each, token


@dataclass(frozen=True, slots=True)
class TokenMap:
    """The relations between two vocabularies; see above.

    Attributes:
        first: For each id of D its first token of T, or NO_TOKEN.
        longer: Paths of T that are one token of D.
        composed: Paths of D that are one token of T, where no token of D is this token.
        roles: For each special token of T the tokens of D that mean the same; none: its text does.
    """

    first: array[int]
    longer: Paths
    composed: Paths
    roles: dict[int, tuple[int, ...]]


def map_tokens(target: Vocabulary, drafter: Vocabulary) -> TokenMap:
    """Find the relations between two vocabularies.

    Cost: seconds for 100,000 tokens: each is encoded once.
    """
    first = array("i", [NO_TOKEN]) * drafter.size
    longer: list[tuple[tuple[int, ...], int]] = []
    said = {content: each for each, content in _texts(target)}
    for each, path in _encoded(drafter, target):
        if path:
            first[each] = path[0]
        if len(path) > 1:
            longer.append((tuple(path), each))
    for each, content in enumerate(drafter.contents):
        if content and first[each] == NO_TOKEN:
            first[each] = _longest_beginning(content, said)
    for token, role in _roles(target, drafter).items():
        if role is not None:
            first[token] = role
    drafter_contents = {content for content in drafter.contents if content}
    composed = [
        (tuple(path), token)
        for token, path in _encoded(target, drafter)
        if 1 < len(path) <= MOST_PARTS and target.contents[token] not in drafter_contents
    ]
    roles = {each: _inputs(each, target, drafter) for each in _special_ids(target)}
    return TokenMap(first, Paths(longer), Paths(composed), roles)


def _texts(vocabulary: Vocabulary) -> Iterator[tuple[int, bytes]]:
    """Yield ids and bytes; of several ids with the same bytes last the one that is encoded."""
    yield from ((each, content) for each, content in enumerate(vocabulary.contents) if content)


def _encoded(ours: Vocabulary, theirs: Vocabulary) -> Iterator[tuple[int, list[int]]]:
    """Yield each token of one vocabulary that is whole characters, as tokens of the other.

    A token that the other vocabulary cannot say exactly has no path.
    """
    known = [
        (each, content, text)
        for each, content in enumerate(ours.contents)
        if content and (text := _text(content)) is not None
    ]
    paths = theirs.encode_many([text for _, _, text in known])
    for (each, content, _), path in zip(known, paths, strict=True):
        if b"".join(theirs.contents[it] or b"" for it in path if it < theirs.size) == content:
            yield each, path


def _text(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def _longest_beginning(content: bytes, said: dict[bytes, int]) -> int:
    """Return the token that is the most of the beginning of some bytes."""
    lengths = range(len(content), 0, -1)
    return next((said[content[:n]] for n in lengths if content[:n] in said), NO_TOKEN)


def _special_ids(vocabulary: Vocabulary) -> set[int]:
    return {*vocabulary.special.values(), *vocabulary.end_ids}


def _inputs(token: int, target: Vocabulary, drafter: Vocabulary) -> tuple[int, ...]:
    """Return what the drafter reads for a special token of the target; see `TokenMap.roles`."""
    if token in target.start_ids:
        return ()  # the drafter has its own, or none
    text = next((text for text, each in target.special.items() if each == token), None)
    if text in drafter.special:
        return (drafter.special[text],)
    return drafter.end_ids[:1] if token in target.end_ids else ()


def _roles(target: Vocabulary, drafter: Vocabulary) -> dict[int, int | None]:
    """Return what the drafter's special tokens mean to the target; None: nothing."""
    texts = {each: text for text, each in drafter.special.items()}
    found: dict[int, int | None] = {}
    for each in _special_ids(drafter):
        same = target.special.get(texts.get(each, ""))
        if each in drafter.end_ids and target.end_ids:
            found[each] = same if same in target.end_ids else target.end_ids[0]
        else:
            found[each] = None if same in target.start_ids else same
    return found
