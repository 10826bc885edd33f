"""Max-Gram: guessing what follows from the text itself, without a model.

Chen et al. 2023, "Cascade Speculative Drafting" (arXiv 2312.11462), section 3 and appendix A: what
followed where the text's end stood before. Its distribution is one-hot, its cost next to nothing.

Difference: the prompt and the output are one text, searched once; the paper's listing searches the
prompt alone, its code the prompt twice, and for a model without an encoder proposes at the start
the prompt's own beginning. The whole text never matches itself here.

Difference: a copy that reaches the text's end goes on with its own beginning. That is what another
search would find for the longer text, and the paper's code makes one such search; so a period of
any length is continued as far as is asked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline_contract.suffix_index import SuffixIndex, Tie

if TYPE_CHECKING:
    from collections.abc import Sequence

_FORMAT = "paceline bigrams 1"
# The tokens of all texts together. A token takes some 0.5 KB, so these take 128 MiB.
_MOST_INDEXED = 262_144


class BigramError(ValueError):
    """A bigram table cannot be used. The message is one line for the operator."""


class MaxGram(SuffixIndex):
    """A text that proposes how it goes on.

    Invariants:
        It proposes what a search through the text finds
        (tests/unit/protocol/test_max_gram.py::test_it_proposes_what_the_paper_does).
    """

    def __init__(
        self,
        *,
        tie: Tie = Tie.EARLIEST,
        longest: int = 32,
        bigrams: Sequence[int | None] = (),
    ) -> None:
        """Begin with no text.

        Args:
            tie: Which of several places is copied; the paper's is the earliest.
            longest: Matches count up to so many tokens.
            bigrams: What mostly follows each token, for a last token that is new; may be empty.
        """
        super().__init__(tie=tie, longest=longest)
        self._bigrams = bigrams

    def propose(self, count: int) -> list[int]:
        """Return the next `count` tokens; fewer, or none, only where the last token is new."""
        match = self.match
        if not match.length:
            return self._by_bigrams(count)
        period = len(self) - match.follows
        found = self.tokens(match.follows, match.follows + count).tolist()
        while len(found) < count:
            found.append(found[-period])
        return found

    @property
    def source(self) -> int | None:
        """Where the first token of the next proposal stands in the text; None: it does not."""
        return self.match.follows if self.match.length else None

    def _by_bigrams(self, count: int) -> list[int]:
        if not len(self):
            return []
        found: list[int] = []
        token: int | None = self.tokens(len(self) - 1, len(self))[0]
        while len(found) < count:
            token = self._bigrams[token] if token is not None and self._bigrams else None
            if token is None:
                break
            found.append(token)
        return found


class IndexRoom:
    """How many tokens the indexes of all texts may have together: each takes some 0.5 KB."""

    def __init__(self, count: int = _MOST_INDEXED) -> None:
        self._free = count

    def take(self, count: int) -> int:
        """Take room for so many tokens, or for as many as there is room for; return how many."""
        taken = min(count, self._free)
        self._free -= taken
        return taken

    def give_back(self, count: int) -> None:
        """Return the room of so many tokens."""
        self._free += count


@dataclass(frozen=True, slots=True)
class MaxGramRules:
    """What texts propose by.

    Attributes:
        tie: Which of several places is copied.
        bigrams: What mostly follows each token; may be empty.
        room: For the indexes of all texts that go by these rules.
    """

    tie: Tie = Tie.EARLIEST
    bigrams: Sequence[int | None] = ()
    room: IndexRoom = field(default_factory=IndexRoom, compare=False, repr=False)

    def fit(self, vocabulary_size: int) -> bool:
        """Tell whether the table, if there is one, is of such a vocabulary."""
        return len(self.bigrams) in {0, vocabulary_size}

    def begin(self, *, vocabulary_size: int) -> MaxGram:
        """Begin a text; a table of another vocabulary is left out."""
        bigrams = self.bigrams if self.fit(vocabulary_size) else ()
        return MaxGram(tie=self.tie, bigrams=bigrams)


def parse_bigrams(text: str, *, vocabulary_size: int | None = None) -> tuple[int | None, ...]:
    """Read a table: JSON, {"format": "paceline bigrams 1", "next": [an id or null for each id]}.

    Args:
        vocabulary_size: Of the tokenizer; None: the table says it.

    Raises:
        BigramError: it is no table, or not of this vocabulary.
    """
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BigramError(f"is no JSON: {error}") from None
    if not isinstance(table, dict) or table.get("format") != _FORMAT:
        raise BigramError(f"has no format {_FORMAT!r}")
    following = table.get("next")
    if not isinstance(following, list):
        raise BigramError("needs `next`, a list")
    if vocabulary_size is None:
        vocabulary_size = len(following)
    if len(following) != vocabulary_size:
        raise BigramError(f"needs `next` with {vocabulary_size} entries, one for each token")
    for token, each in enumerate(following):
        if each is not None and not (type(each) is int and 0 <= each < vocabulary_size):
            raise BigramError(f"next[{token}] is {each!r}, not null or in [0, {vocabulary_size})")
    return tuple(following)
