"""Parses a large JSON text in pieces, so that other threads run between two of them.

A parser lets no other thread run until it is done, and the event loop is one of them: a prompt of a
million token ids would hold up every stream for 50 ms. What is large in a body is a few texts and
lists of token ids. So these are cut out and parsed piece by piece:

    {"prompt": "once upon ...", "stop": ["."]}      the text
    {"prompt": "<mark>0",       "stop": ["."]}      what is left: the outline, parsed as a whole
    0: "once upon" + " ..."                         what was cut out

Where a cut is in doubt nothing is cut, and where a piece is no JSON the whole text is parsed, so
the result and the error are those of the library in any case.
"""

from __future__ import annotations

import re
import secrets
from itertools import chain
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

if TYPE_CHECKING:
    from collections.abc import Iterator

# What is shorter stays in the outline.
_LEAST_BYTES = 512
# Parsed in less than a millisecond or two.
_PIECE_BYTES = 1 << 16
# How far back a place is sought where a text may be cut.
_MOST_STEPS = 64
_ESCAPED_CHARACTER_BYTES = 12  # the longest: two halves, of six bytes each
# A text up to its end, or up to a part of an escaped character. The pattern never backtracks.
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_HIGH_HALF = re.compile(rb"\\u[dD][89abAB]..")
_SPACES = b" \t\r\n"


def outline(content: bytes) -> tuple[bytes, dict[str, Any]]:
    """Cut long texts and lists of numbers out of a JSON text.

    Returns:
        The text without them, with marks in their places; and by mark, the value.

    Raises:
        ValueError: Something that was cut out is not JSON.
    """
    mark = secrets.token_hex(16)
    parts: list[bytes] = []
    values: dict[str, Any] = {}
    done = 0
    for start, end in _large(content):
        name = f"{mark}{len(values)}"
        is_text = content[start] == ord('"')
        values[name] = _text(content, start, end) if is_text else _numbers(content, start, end)
        parts += content[done:start], b'"', name.encode(), b'"'
        done = end
    return b"".join((*parts, content[done:])), values


def put_back(value: Any, values: dict[str, Any]) -> Any:
    """Return what an outline was parsed to with the values in the places of their marks."""
    if isinstance(value, str):
        return values.get(value, value)
    containers = [value]
    while containers:
        container = containers.pop()
        if isinstance(container, dict):
            items: Iterator[tuple[Any, Any]] = iter(container.items())
        elif isinstance(container, list):
            items = enumerate(container)
        else:
            continue
        for place, it in items:
            if isinstance(it, str):
                if it in values:
                    container[place] = values[it]
            elif isinstance(it, dict | list):
                containers.append(it)
    return value


def _large(content: bytes) -> Iterator[tuple[int, int]]:
    """Yield where long texts and lists of numbers are, with their quotes and brackets."""
    place = 0
    while True:
        quote = content.find(b'"', place)
        between = len(content) if quote < 0 else quote
        if between - place > _LEAST_BYTES:
            yield from _lists(content, place, between)
        if quote < 0:
            return
        place = _end_of_text(content, quote + 1)
        if place < 0:
            return
        if place - quote > _LEAST_BYTES and not _is_name(content, place):
            yield quote, place


def _lists(content: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where long lists without texts, lists and objects are."""
    while (closed := content.find(b"]", start, end)) >= 0:
        opened = content.rfind(b"[", start, closed)
        is_long = opened >= 0 and closed - opened > _LEAST_BYTES
        if is_long and content.find(b"{", opened, closed) < 0:
            yield opened, closed + 1
        start = closed + 1


def read_on(content: bytes, place: int) -> tuple[int, bool]:
    """Go on inside of a text, for a piece.

    Returns:
        The place behind the quote that ends the text, and True. Or the place from which to go on,
        and False; the same place again if the text has no end.
    """
    inside = _INSIDE.match(content, place, place + _PIECE_BYTES)
    end = inside.end() if inside is not None else place
    has_ended = content[end : end + 1] == b'"'
    return end + has_ended, has_ended


def _end_of_text(content: bytes, place: int) -> int:
    """Return the place behind the quote that ends a text; -1 if there is none."""
    while True:
        before = place
        place, has_ended = read_on(content, before)
        if has_ended:
            return place
        if place == before:
            return -1


def _is_name(content: bytes, place: int) -> bool:
    """Whether a text that ends here is the name of a field."""
    while place < len(content) and content[place] in _SPACES:
        place += 1
    return content[place : place + 1] == b":"


def _numbers(content: bytes, start: int, end: int) -> list[Any]:
    """Parse a list of numbers."""
    pieces = []
    place = start + 1
    while end - place > _PIECE_BYTES:
        comma = content.rfind(b",", place, place + _PIECE_BYTES)
        if comma < 0:
            break
        pieces.append(_parse(b"[" + content[place:comma] + b"]"))
        if not pieces[-1]:
            raise ValueError("a number is missing")
        place = comma + 1
    last = _parse(b"[" + content[place:end])
    if pieces and not last:
        raise ValueError("a number is missing")
    return [*chain.from_iterable(_one_by_one([*pieces, last]))]


def _one_by_one(pieces: list[list[Any]]) -> Iterator[list[Any]]:
    """Yield each; a generator's steps let other threads run."""
    yield from pieces


def _text(content: bytes, start: int, end: int) -> str:
    """Parse a text."""
    pieces = []
    place = start + 1
    while end - place > _PIECE_BYTES:
        cut = _cut(content, place + _PIECE_BYTES)
        if cut <= place:
            break
        pieces.append(_parse(b'"' + content[place:cut] + b'"'))
        place = cut
    return "".join((*pieces, _parse(b'"' + content[place:end])))


def _cut(content: bytes, place: int) -> int:
    """Return where a text can be cut, here or a little before; -1 if nowhere."""
    for cut in range(place, place - _MOST_STEPS, -1):
        before = content[max(0, cut - _ESCAPED_CHARACTER_BYTES) : cut]
        if content[cut] == ord("\\"):
            # The end of no other escape, and not the second half of a character.
            if not before.endswith(b"\\") and not _HIGH_HALF.match(before[-6:]):
                return cut
        elif b"\\" not in before and content[cut] & 0xC0 != 0x80:
            return cut
    return -1


def _parse(piece: bytes) -> Any:
    return from_json(piece, allow_inf_nan=False)
