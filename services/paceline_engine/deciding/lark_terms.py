"""Checks grammars of Lark for what takes long to compile: many patterns for one text."""

from __future__ import annotations

import json
import re

from paceline.errors import InvalidFieldError
from paceline_engine.deciding.json_schemas import check_patterns

# 11 terms take 0.2 s, and 19 take a second; 29 take minutes.
_MOST_TERMS = 12
# What is no operator: comments, literals, regular expressions, which may have line breaks, and
# special tokens, such as </s>. One that is not closed goes to the end: the compiler refuses it.
_TEXT = re.compile(
    r'(?:#|//)[^\n]*|"(?:[^"\\]|\\.?)*(?:"|\Z)|/(?:[^/\\]|\\.?)+(?:/|\Z)|<[^<>]*>', re.DOTALL
)
_JSON = re.compile(r"%json\s*")


def check_terms(lark: str, *, field: str) -> None:
    """Refuse a grammar with many terms that a text has to match at once (`&`), or such schemas.

    Raises:
        InvalidFieldError: It has them.
    """
    if _TEXT.sub("", lark).count("&") > _MOST_TERMS:
        raise InvalidFieldError.of(field, f"has more than {_MOST_TERMS} `&`")
    decoder = json.JSONDecoder()
    for found in _JSON.finditer(lark):
        try:
            schema, _ = decoder.raw_decode(lark, found.end())
            check_patterns(schema, field=field)
        except ValueError:
            continue  # the compiler tells what is wrong
        except RecursionError:
            raise InvalidFieldError.of(field, "has JSON that is nested too deep") from None
