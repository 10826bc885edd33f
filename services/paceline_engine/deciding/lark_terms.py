"""Checks grammars of Lark: what takes long to compile, what drafts cannot follow, their schemas."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import InvalidFieldError
from paceline_engine.deciding.json_schemas import sound_schemas

if TYPE_CHECKING:
    from collections.abc import Iterator

# 11 terms take 0.2 s, and 19 take a second; 29 take minutes.
_MOST_TERMS = 12
NO_WAY_BACK = "has a rule with max_tokens or stop, which drafts cannot follow"
# What is no operator: comments, literals, regular expressions, which may have line breaks, and
# special tokens, such as </s>. One that is not closed goes to the end: the compiler refuses it.
_TEXT = re.compile(
    r'(?:#|//)[^\n]*|"(?:[^"\\]|\\.?)*(?:"|\Z)|/(?:[^/\\]|\\.?)+(?:/|\Z)|<[^<>]*>', re.DOTALL
)
_NO_WAY_BACK = re.compile(r"\b(?:max_tokens|stop)\s*=")
_JSON = re.compile(r"%json\s*")


def sound_lark(lark: str, *, field: str) -> str:
    """Return a grammar that llguidance enforces: its schemas are those of `sound_schemas`.

    Refuse one with many terms that a text has to match at once (`&`), and one with a rule that a
    matcher cannot go back over, wherever it comes in a text.

    Raises:
        InvalidFieldError: It has them, or schemas that are refused.
    """
    operators = _TEXT.sub(" ", lark)
    if operators.count("&") > _MOST_TERMS:
        raise InvalidFieldError.of(field, f"has more than {_MOST_TERMS} `&`")
    if _NO_WAY_BACK.search(operators):
        raise InvalidFieldError.of(field, NO_WAY_BACK)
    found = [*_schemas(lark, field=field)]
    changed = sound_schemas([it.content for it in found], field=field)
    pieces, end = [], 0
    for schema, is_changed in zip(found, changed, strict=True):
        if is_changed:
            pieces += [lark[end : schema.start], json.dumps(schema.content)]
            end = schema.end
    return "".join([*pieces, lark[end:]])


class _Schema(NamedTuple):
    """A schema in a grammar, and its place there."""

    content: object
    start: int
    end: int


def _schemas(lark: str, *, field: str) -> Iterator[_Schema]:
    """Yield the schemas of a grammar, and what looks like one in a literal or a comment.

    Whether it is in one only the compiler knows for sure; what looks like one is checked alike.
    """
    decoder = json.JSONDecoder()
    for found in _JSON.finditer(lark):
        try:
            schema, end = decoder.raw_decode(lark, found.end())
        except ValueError:
            continue  # the compiler tells what is wrong
        except RecursionError:
            raise InvalidFieldError.of(field, "has JSON that is nested too deep") from None
        yield _Schema(schema, found.end(), end)
