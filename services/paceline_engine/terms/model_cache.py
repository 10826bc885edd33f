"""A session's sequence in a model: the interface that all backends share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from typing import TYPE_CHECKING
from weakref import ref

from paceline_contract.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NO_TREE = Proposal()


class ModelCache(ABC):
    """A session's sequence in a model: the tokens computed so far and the model's state for them.

    The caller never says what to roll back. It names the whole prefix, and the cache keeps the
    tokens that it has in common with this prefix. So no order of faults and cancels can make it
    compute on a wrong prefix, and all state that is still right is used again.

    Beyond the sequence there can be a tree: tokens that may follow, with their state. The next
    prefix tells which of them belong to the sequence; the others are forgotten.

    Attributes:
        has_ended: Whether its session is over.

    Invariants:
        The state stands for exactly `token_ids` and `tree`, also after a forward that raised.
    """

    def __init__(self) -> None:
        self._token_ids = array("I")
        self._tree = _NO_TREE
        self._source: Callable[[], ModelCache | None] = _nothing
        self.has_ended = False

    @property
    def length(self) -> int:
        """How many tokens the state stands for."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> array[int]:
        """A copy of the tokens the state stands for."""
        return self._token_ids[:]

    @property
    def tree(self) -> Proposal:
        """The tree beyond the sequence: its tokens' rows lie there in this order."""
        return self._tree

    @property
    def row_count(self) -> int:
        """How many tokens have state here: the sequence's and the tree's."""
        return self.length + len(self._tree)

    def reserve(self, length: int) -> None:  # noqa: B027 - most need not know
        """Learn for how many tokens memory is reserved from now on. Called on the event loop."""

    @property
    def can_be_copied(self) -> bool:
        """Whether another sequence can begin with a copy of this one's state."""
        return False

    @property
    def is_empty(self) -> bool:
        """Whether no state was computed that another sequence could begin with."""
        return not self.length

    def begin_like(self, source: ModelCache) -> None:
        """Begin with the state of a finished sequence, as far as the first prefix is the same.

        The state is copied when the first prefix is computed, if the finished sequence still exists
        then. Called on the event loop.
        """
        self._source = ref(source)

    def end(self) -> None:
        """Learn that the session is over: from now on the state is only copied. Event loop."""
        self.has_ended = True

    def stage(self, prefix: array[int], *, draft_count: int) -> int:  # noqa: ARG002 - a stack asks
        """Return which of several models computes the next forward after a prefix; most have one.

        Args:
            prefix: The tokens before the work.
            draft_count: How many tokens are drafted after the prefix; 0: a proposal is judged.
        """
        return 0

    def missing_length(self, prefix: array[int]) -> int:
        """Count the tokens of a prefix that are still to be computed; the last one always is."""
        return len(prefix) - self._kept_length(prefix)

    def reachable(self, length: int) -> int:
        """Return the most tokens, up to so many, to which the state can be cut; mostly all."""
        return length

    def has_of(self, prefix: array[int], tree: Proposal) -> bool:
        """Whether this prefix is here, followed only by the first tokens of this tree, if any."""
        own = self._tree
        return (
            self._token_ids == prefix
            and own.token_ids == tree.token_ids[: len(own)]
            and own.parents == tree.parents[: len(own)]
        )

    def keep(self, prefix: array[int]) -> int:
        """Forget all but the prefix without its last token; return how many tokens are left."""
        self._begin(prefix)
        self.adopt(self._path_of(prefix))
        kept = self._kept_length(prefix)
        self._crop(kept)
        del self._token_ids[kept:]
        return kept

    def adopt(self, path: Sequence[int]) -> None:
        """Append a path of the tree to the sequence, and forget the rest of the tree."""
        # The tree goes first, so that a failure below leaves nothing wrong.
        tree, self._tree = self._tree, _NO_TREE
        if path:
            self._gather(path)
            self._token_ids.extend(tree.along(path))

    def extend(self, token_ids: array[int], parents: Sequence[int] = ()) -> None:
        """Take in tokens whose state a forward has appended.

        Args:
            parents: The parents of the last tokens, which are the tree's: 0 if a token follows the
                sequence, i + 1 if it follows the tree's i-th token.
        """
        text_count = len(token_ids) - len(parents)
        assert not (text_count and self._tree), "a tree lies beyond the sequence's end"
        self._token_ids.extend(token_ids[:text_count])
        if parents:
            tree = self._tree
            self._tree = Proposal(
                (*tree.token_ids, *token_ids[text_count:]), (*tree.parents, *parents)
            )

    def settle(self) -> None:
        """Forget the rows that a failed forward may have appended."""
        self._crop(self.row_count)

    def clear(self) -> None:
        """Forget all state, because code stopped at an unknown point and may have left anything."""
        self._tree, self._source = _NO_TREE, _nothing
        self._crop(0)
        del self._token_ids[:]

    def _begin(self, prefix: array[int]) -> None:
        """Copy the finished sequence's state for a prefix, if this sequence is still empty."""
        source = self._source()
        if source is not None and not self.length:
            kept = self._kept_length(prefix)
            self._source = _nothing
            if kept:
                self._copy(source, kept)
            self._token_ids = prefix[:kept]

    def _kept_length(self, prefix: array[int]) -> int:
        common, holder = common_length(self._token_ids, prefix) + len(self._path_of(prefix)), self
        if not self.length and (source := self._source()) is not None:
            common, holder = common_length(source.token_ids, prefix), source
        return holder.reachable(min(common, len(prefix) - 1))

    def _path_of(self, prefix: array[int]) -> tuple[int, ...]:
        """Return the tree's path that a prefix takes after the sequence."""
        if not self._tree or prefix[: self.length] != self._token_ids:
            return ()
        return self._tree.path_of(prefix[self.length :])

    def _gather(self, path: Sequence[int]) -> None:
        """Move the state of these tokens of the tree to the sequence's end, in this order."""
        raise AssertionError(f"{path}: here no tree was computed")

    def _copy(self, source: ModelCache, length: int) -> None:
        """Copy the state of another sequence's first tokens into this empty one."""
        raise AssertionError(f"{source}, {length}: it cannot be copied")

    @abstractmethod
    def _crop(self, length: int) -> None:
        """Forget the state of all rows but the first `length`, even if a forward stopped midway."""


def common_length(left: array[int], right: array[int]) -> int:
    """Count the tokens that both have in common at the start. Reads each token about once."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _nothing() -> None:
    """Return None: there is no finished sequence to begin with."""
