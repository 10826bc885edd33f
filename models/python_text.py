"""How much a text looks like Python, and how much it repeats itself."""

from __future__ import annotations

import io
import tokenize
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

# What `tokenize` says when the text ends inside a string or a bracket.
_UNFINISHED = ("EOF in multi-line", "unexpected EOF", "unterminated triple-quoted")


def distinct_share(items: Sequence[Hashable], *, size: int) -> float:
    """Return the share of a sequence's n-grams that are distinct; 1 where there is no n-gram."""
    grams = [tuple(items[start : start + size]) for start in range(len(items) - size + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def tokenize_error(text: str, *, excuse_unfinished: bool) -> str | None:
    """Run Python's own tokenizer over a text up to its last complete line.

    Args:
        text: A completion that stopped at a token count, so mostly in the middle of a line.
        excuse_unfinished: Let the text end inside a bracket or a string, as a text cut there does.

    Returns:
        What is wrong with it; None when it is accepted.
    """
    lines = text[: text.rfind("\n") + 1]
    try:
        for token in tokenize.generate_tokens(io.StringIO(lines).readline):
            if token.type == tokenize.ERRORTOKEN and not token.string.isspace():
                return f"no token: {token.string!r}"
    except tokenize.TokenError as error:
        message = str(error.args[0])
        return None if excuse_unfinished and message.startswith(_UNFINISHED) else message
    except IndentationError as error:
        return str(error.args[0])
    return None
