"""Checks grammars of Lark: for what takes long to compile, and for what drafts cannot follow."""

from __future__ import annotations

import json
import re

from paceline.errors import InvalidFieldError
from paceline_engine.deciding.json_schemas import check_patterns

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


def check_terms(lark: str, *, field: str) -> None:
    """Refuse a grammar with many terms that a text has to match at once (`&`), or such schemas.

    And one with a rule that a matcher cannot go back over, wherever it comes in a text.

    Raises:
        InvalidFieldError: It has them.
    """
    operators = _TEXT.sub(" ", lark)
    if operators.count("&") > _MOST_TERMS:
        raise InvalidFieldError.of(field, f"has more than {_MOST_TERMS} `&`")
    if _NO_WAY_BACK.search(operators):
        raise InvalidFieldError.of(field, NO_WAY_BACK)
    decoder = json.JSONDecoder()
    for found in _JSON.finditer(lark):
        try:
            schema, _ = decoder.raw_decode(lark, found.end())
            check_patterns(schema, field=field)
        except ValueError:
            continue  # the compiler tells what is wrong
        except RecursionError:
            raise InvalidFieldError.of(field, "has JSON that is nested too deep") from None
