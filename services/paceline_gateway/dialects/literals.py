"""Reads fixed texts, names and JSON from the beginning of a text that is not complete yet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from paceline_gateway.dialects.family import Hole, Maybe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline_gateway.dialects.family import Piece

_MOST_NAME = 256
_NAME = re.compile(r"""[^\s"'\\<>\[\]{}()|,;=\uff5c]+""")


class Outcome(Enum):
    """Why nothing was found."""

    DIFFERS = auto()
    """What is there is something else, whatever follows."""

    OPEN = auto()
    """What follows decides."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where pieces end, and the name among them."""

    end: int
    name: str = ""


def skip_space(text: str, at: int) -> int:
    """Return where the next letter is that is no space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def read_literal(text: str, at: int, literal: str) -> int | Outcome:
    """Read a fixed text, with any space in it or none; return where it ends."""
    for letter in "".join(literal.split()):
        at = skip_space(text, at)
        if at == len(text):
            return Outcome.OPEN
        if text[at] != letter:
            return Outcome.DIFFERS
        at += 1
    return at


def read_pieces(text: str, at: int, pieces: Iterable[Piece]) -> Found | Outcome:
    """Read pieces without arguments."""
    name = ""
    for piece in pieces:
        if isinstance(piece, Hole):
            at = skip_space(text, at)
            found = _NAME.match(text, at, at + _MOST_NAME)
            end = found.end() if found else at
            if end == len(text):
                return Outcome.OPEN
            if end == at or end == at + _MOST_NAME:
                return Outcome.DIFFERS
            name, at = text[at:end], end
            continue
        literal = piece.text if isinstance(piece, Maybe) else piece
        read = read_literal(text, at, literal)
        if isinstance(piece, Maybe) and read is Outcome.DIFFERS:
            continue
        if isinstance(read, Outcome):
            return read
        at = read
    return Found(at, name)


class JsonScanner:
    """Finds the end of an object or a list in JSON that comes in pieces.

    Args:
        depth: How many objects and lists are open at the beginning.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_in_string = False
        self._is_escaped = False

    def scan(self, text: str) -> int | None:
        """Take the next text; return how much of it belongs to the value; None: all, and more."""
        for index, letter in enumerate(text):
            if self._is_in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif letter == "\\":
                    self._is_escaped = True
                elif letter == '"':
                    self._is_in_string = False
            elif letter == '"':
                self._is_in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None


def begun_length(text: str, literal: str) -> int:
    """Return the length of the longest end of a text with which a literal could begin."""
    for length in range(min(len(literal) - 1, len(text)), 0, -1):
        if literal.startswith(text[-length:]):
            return length
    return 0
