"""What a decoding method promises, in whatever order answers come, and whatever fails.

A method's row says which of these hold for it; README.md has them in a table. The checker in
tests/unit/protocol/checker.py looks at every one after every event, and
tests/unit/protocol/test_checker.py shows for each that it sees it broken.
"""

from __future__ import annotations

from enum import Enum


class Invariant(Enum):
    """A promise. Its value is the promise in one sentence, for people."""

    LOSSLESS = "The emitted tokens are always a prefix of the target's own continuation."
    """Under rejection sampling: of what the verification says that owns the position."""

    BUSY_FRONTIER = (
        "While a target is up, an unfinished verification decides the first uncommitted position."
    )
    """Why a method is never slower than plain decoding: a target is always computing the token that
    plain decoding would compute."""

    NOTHING_WORTHLESS = "No call stays in flight if its answer can tell nothing new."
    """Neither what contradicts the committed text, nor what is behind it. A prompt that warms up a
    target's session is excepted, and so is a drafter's first draft, until its first token."""

    NO_PREEMPTION = "A verification that decides the first uncommitted position is never withdrawn."
    """Unless its target is lost, or only guesses that ride along with it would decide it."""

    NOTHING_TWICE = "No draft token is judged by two verifications at once."
    """Guesses of a target's own are nobody's: they ride along."""

    CLEAN_END = "At the end nothing is in flight, and every draft token is accounted for."
