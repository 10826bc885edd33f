"""Where the end of a text stood before: an index that follows the text token by token.

A trie over the text's *contexts*: each place's tokens read backwards, the last one first, so the
longest end of the text that stood before is a walk down from the root. Chains of only children are
one edge, as in a suffix tree (Weiner 1973), which this is, of the text read backwards: one more
token puts a path into it, one token less takes the path out again.

    text  a b c a b       contexts of its places, the last token first:  a, ba, cba, acba, bacba
    the last one meets "ba" at depth 2: the end "ab" stood before, and ended at place 1
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Tie(Enum):
    """The place that counts, if the longest end stood at several."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Match:
    """The longest end of a text that stood before.

    Attributes:
        length: Its tokens; 0: the last token is new.
        follows: Where the token after that earlier place stands.
    """

    length: int
    follows: int


class _Node:
    """The last `depth` tokens of a place.

    Attributes:
        depth: How many.
        first: The first place in the text that ends in them.
        last: The last such place.
        children: What else stands before them, by the token next to them.
    """

    __slots__ = ("children", "depth", "first", "last")

    def __init__(self, depth: int, *, first: int, last: int) -> None:
        self.depth, self.first, self.last = depth, first, last
        self.children: dict[int, _Node] = {}


@dataclass(frozen=True, slots=True)
class _Undo:
    """How the index was before a place came.

    Attributes:
        lasts: Of the nodes on its way that there were, from the root down.
        split_depth: Of the node that was put into an edge; 0: none was.
    """

    lasts: tuple[int, ...]
    split_depth: int


class SuffixIndex:
    """A text, and for its end the longest one that stood before.

    Cost:
        A token, come or gone, takes a walk of at most `longest` comparisons, however long the text
        is; asking takes nothing (bench/LOG.md has it measured). Two nodes for each token.

    Invariants:
        The answer is a search's through the whole text
        (tests/unit/protocol/test_suffix_index.py::test_the_index_finds_what_a_search_finds).
    """

    def __init__(self, *, tie: Tie = Tie.EARLIEST, longest: int = 32) -> None:
        """Begin with no text.

        Args:
            tie: Which place counts if there are several.
            longest: No end of more tokens is looked for; of those that agree in so many, the tie
                rule chooses.
        """
        self._tie = tie
        self._longest = longest
        self._text = array("I")
        self._matches: list[Match] = []
        self._undo: list[_Undo] = []
        self._root = _Node(0, first=0, last=-1)

    def __len__(self) -> int:
        return len(self._text)

    @property
    def match(self) -> Match:
        """The longest end of the text that stood before, the text itself excepted."""
        return self._matches[-1] if self._matches else Match(0, 0)

    def tokens(self, start: int, end: int) -> array[int]:
        """Return the text's tokens from `start` to before `end`."""
        return self._text[start:end]

    def follow(self, token_ids: Sequence[int], *, start: int = 0) -> None:
        """Have the text be its first `start` tokens and then these; what is the same stays."""
        self.truncate(start + self.common_length(token_ids, start=start))
        self.extend(token_ids[len(self._text) - start :])

    def common_length(self, token_ids: Sequence[int], *, start: int = 0) -> int:
        """Count how many of these tokens the text has from `start` on."""
        mine = self._text[start : start + len(token_ids)]
        theirs = array("I", token_ids[: len(mine)])
        if mine == theirs:
            return len(mine)
        # Whole arrays are compared much quicker than their tokens.
        return bisect_left(range(len(mine)), True, key=lambda n: mine[: n + 1] != theirs[: n + 1])

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens."""
        for token in token_ids:
            self._append(token)

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        while len(self._text) > length:
            self._remove_last()

    def _append(self, token: int) -> None:
        self._text.append(token)
        place = len(self._text) - 1
        deepest = min(self._longest, place + 1)
        node, lasts, split_depth = self._root, [], 0
        while True:
            below, common = node, node.depth
            lasts.append(node.last)
            node.last = place
            if node.depth == deepest:
                break
            child = node.children.get(self._text[place - node.depth])
            if child is None:
                self._add_leaf(node, place, depth=deepest)
                break
            common = self._common(child, place, known=node.depth + 1, deepest=deepest)
            if common < child.depth:
                below, split_depth = child, common
                middle = self._split(node, child, place, depth=common)
                if common < deepest:
                    self._add_leaf(middle, place, depth=deepest)
                break
            node = child
        self._note(place, common, below, earlier=lasts, is_node=below is node)
        self._undo.append(_Undo(tuple(lasts), split_depth))

    def _note(
        self, place: int, length: int, below: _Node, *, earlier: Sequence[int], is_node: bool
    ) -> None:
        """Keep what a place's end matches: all places of the node at or below it."""
        if not length:
            self._matches.append(Match(0, 0))
            return
        latest = earlier[-1] if is_node else below.last
        end = below.first if self._tie is Tie.EARLIEST else latest
        assert end < place
        self._matches.append(Match(length, end + 1))

    def _common(self, child: _Node, place: int, *, known: int, deepest: int) -> int:
        """Return how many of its last tokens a place shares with a child; at least `known`."""
        text, end = self._text, min(child.depth, deepest)
        other = child.first
        while known < end and text[other - known] == text[place - known]:
            known += 1
        return known

    def _add_leaf(self, node: _Node, place: int, *, depth: int) -> None:
        leaf = _Node(depth, first=place, last=place)
        node.children[self._text[place - node.depth]] = leaf

    def _split(self, node: _Node, child: _Node, place: int, *, depth: int) -> _Node:
        """Put a node into the edge to a child."""
        middle = _Node(depth, first=child.first, last=place)
        node.children[self._text[place - node.depth]] = middle
        middle.children[self._text[child.first - depth]] = child
        return middle

    def _remove_last(self) -> None:
        place = len(self._text) - 1
        undo = self._undo.pop()
        node = self._root
        node.last = undo.lasts[0]
        for last in undo.lasts[1:]:
            node = node.children[self._text[place - node.depth]]
            node.last = last
        if undo.split_depth:
            middle = node.children[self._text[place - node.depth]]
            (child,) = (each for each in middle.children.values() if each.first != place)
            node.children[self._text[place - node.depth]] = child
        else:
            self._remove_leaf(node, place)
        self._matches.pop()
        del self._text[place]

    def _remove_leaf(self, node: _Node, place: int) -> None:
        if node.depth < min(self._longest, place + 1):
            del node.children[self._text[place - node.depth]]
