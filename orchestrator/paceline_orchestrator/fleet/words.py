"""The words that say how a server stands: used, resting, or not used and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Word(StrEnum):
    """One word on a server; the proto says what each means.

    Used and resting servers take work. All others do not, and the word says why.
    """

    USED = "used"
    RESTING = "resting"
    OTHER_MODEL = "other_model"
    OTHER_TOKENIZER = "other_tokenizer"
    OTHER_DTYPE = "other_dtype"
    OTHER_INVARIANCE = "other_invariance"
    OTHER_ROLE = "other_role"
    LISTED_TWICE = "listed_twice"
    UNREACHABLE = "unreachable"
    LOADING = "loading"
    DRAINING = "draining"
    BAD_ANSWER = "bad_answer"
    FAILING = "failing"
    SILENT = "silent"
    TOO_OLD = "too_old"
    REFUSES = "refuses"
    UNWATCHED = "unwatched"

    @property
    def takes_work(self) -> bool:
        """Whether new requests may be given to such a server."""
        return self in (Word.USED, Word.RESTING)

    @property
    def is_passing(self) -> bool:
        """Whether it is in the nature of things, and nobody has to do anything about it."""
        return self in (Word.USED, Word.RESTING, Word.LOADING, Word.DRAINING)


@dataclass(frozen=True, slots=True)
class Standing:
    """How a server stands.

    Attributes:
        word: In one word.
        detail: In a clause for people, of at most a few hundred characters; empty where the word
            says it all.
    """

    word: Word
    detail: str = ""

    def __str__(self) -> str:
        words = f"is {self.word}" if self.word.takes_work else "is not used"
        return f"{words}: {self.detail}" if self.detail else words
