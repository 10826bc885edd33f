"""GBNF, llama.cpp's form of context-free grammars, as llguidance's form of Lark.

llguidance has a converter. Before it runs, escapes become what it understands, because it leaves
out the zeros of a code such as `u00e4`; and so do the characters of [a&&b], which would be an
intersection in the regular expressions behind it.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from paceline.errors import InvalidFieldError

_FIRST_RULE = re.compile(r"(?:\s|#[^\n]*(?:\n|$))*[A-Za-z_][\w-]*\s*::=")
_PIECE = re.compile(r"""#[^\r\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_FIRST_BEYOND_ASCII = 0x80
_SURROGATES, _MOST_CODE = range(0xD800, 0xE000), 0x10FFFF


def is_gbnf(grammar: str) -> bool:
    """Whether the first rule is GBNF: `name ::=`, which no rule of Lark begins with."""
    return _FIRST_RULE.match(grammar) is not None


def lark_of(grammar: str, *, field: str) -> str:
    """Return a grammar of Lark for one of GBNF.

    Raises:
        InvalidFieldError: It cannot be read, or has what Lark has not; with the place.
    """
    try:
        lark: str = gbnf_to_lark(_PIECE.sub(lambda it: _plain(it, field=field), grammar))
    except InvalidFieldError:
        raise
    except Exception as error:  # noqa: BLE001 - the converter raises errors of no kind of its own
        raise InvalidFieldError.of(field, f"cannot be read as GBNF: {error}") from None
    return lark


def _plain(piece: re.Match[str], *, field: str) -> str:
    """Write a literal or a class without the escapes that are read otherwise."""
    text = piece[0]
    if text.startswith("#"):
        return text
    plain = _ESCAPE.sub(lambda it: _character(it, piece=piece, field=field), text)
    if not plain.startswith("["):
        return plain
    if "--" in plain:
        raise _refusal(piece, "has -- in a class", field=field)
    return plain.replace("&", r"\x26").replace("~", r"\x7e")


def _character(escape: re.Match[str], *, piece: re.Match[str], field: str) -> str:
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code in _SURROGATES or code > _MOST_CODE:
        raise _refusal(piece, f"has {escape[0]}, which is no character", field=field)
    return f"\\x{code:02x}" if code < _FIRST_BEYOND_ASCII else chr(code)


def _refusal(piece: re.Match[str], what: str, *, field: str) -> InvalidFieldError:
    line = piece.string.count("\n", 0, piece.start()) + 1
    return InvalidFieldError.of(field, f"cannot be read as GBNF: {what}, at line {line}")
