"""How two tokenizers differ, in a sentence for an operator."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline_engine.model_files.tokenizer_file import TokenizerFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MOST_CHARACTERS = 40  # of a token


def tell_difference(ours: bytes, theirs: bytes) -> str:
    """Name the first token that differs, and the parts that do.

    Args:
        ours: A tokenizer.json.
        theirs: Another one, which does not mean the same.
    """
    parts = ", ".join(_parts(json.loads(ours), json.loads(theirs)))
    return f"{_first_token(TokenizerFile(ours).texts, TokenizerFile(theirs).texts)}; {parts}"


def _first_token(ours: Mapping[int, str], theirs: Mapping[int, str]) -> str:
    differing = (each for each in ours.keys() | theirs.keys() if ours.get(each) != theirs.get(each))
    first = min(differing, default=None)
    if first is None:
        return "all tokens are the same"
    return f"token {first} is {_named(ours.get(first))} and {_named(theirs.get(first))}"


def _named(text: str | None) -> str:
    if text is None:
        return "missing"
    return repr(text) if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]!r}..."


def _parts(ours: Any, theirs: Any) -> Iterator[str]:
    """Yield the parts that differ: those of the model one by one."""
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name), theirs.get(name)
        if one == other:
            continue
        if name == "model" and isinstance(one, dict) and isinstance(other, dict):
            keys = sorted(one.keys() | other.keys())
            yield from (f"model.{key}" for key in keys if one.get(key) != other.get(key))
        else:
            yield name
