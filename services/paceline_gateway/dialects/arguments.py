"""Reads a call's arguments as they come, and writes them as JSON.

A reader takes the text from where arguments begin. It gives out pieces of JSON as soon as they are
certain, and says how much of the text it has used. JSON goes through as the model wrote it. Of
other forms each argument is written when it is complete.
"""

from __future__ import annotations

import ast
import json
import re
from typing import TYPE_CHECKING, Any, Protocol

from paceline_gateway.dialects.bare_arguments import BareArguments
from paceline_gateway.dialects.family import Shape, Tags
from paceline_gateway.dialects.literals import (
    JsonScanner,
    Outcome,
    begun_length,
    read_literal,
    skip_space,
)
from paceline_gateway.dialects.pair_writer import PairWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCALAR = re.compile(r"[^\s,{}\[\]<]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_KEYWORD = re.compile(r"\s*([^\W\d]\w*)\s*=\s*(.*)", re.DOTALL)


class ArgumentsReader(Protocol):
    """Reads the arguments of one call."""

    def read(self, text: str) -> tuple[str, int, bool]:
        """Take the text that was not used yet.

        Returns:
            A piece of JSON, how many letters are used, and whether the arguments have ended.
        """

    def cut(self, text: str) -> str:
        """Return what can be said of the rest of an answer that ends here."""


def reader_of(arguments: Shape | Tags, schema: Mapping[str, Any]) -> ArgumentsReader:
    """Make a reader.

    Args:
        arguments: The form.
        schema: The schema of the arguments; empty if it is not known.
    """
    if isinstance(arguments, Tags):
        return _TaggedArguments(arguments, schema)
    if arguments is Shape.BARE:
        return BareArguments(schema)
    return _PythonArguments() if arguments is Shape.PYTHON else _JsonArguments()


class _JsonArguments:
    """Arguments in JSON. A model may also write them as a text in which the JSON stands."""

    def __init__(self) -> None:
        self._scanner: JsonScanner | None = None

    def read(self, text: str) -> tuple[str, int, bool]:
        if self._scanner is not None:
            return self._in_value(text, 0)
        start = skip_space(text, 0)
        if start == len(text):
            return "", 0, False
        if text[start] in "{[":
            self._scanner = JsonScanner()
            return self._in_value(text, start)
        if text[start] == '"':
            found = _STRING.match(text, start)
            return (_unquoted(found[0]), found.end(), True) if found else ("", 0, False)
        scalar = _SCALAR.match(text, start)
        assert scalar is not None
        if scalar.end() == len(text):
            return "", 0, False
        return _scalar(scalar[0]), scalar.end(), True

    def cut(self, text: str) -> str:
        return text.strip()

    def _in_value(self, text: str, start: int) -> tuple[str, int, bool]:
        assert self._scanner is not None
        length = self._scanner.scan(text[start:])
        if length is None:
            return text[start:], len(text), False
        return text[start : start + length], start + length, True


def _unquoted(quoted: str) -> str:
    """Return the JSON in a text; the quoted text if there is none."""
    try:
        inner = json.loads(quoted)
        is_object = isinstance(json.loads(inner), dict)
    except (ValueError, RecursionError):
        return quoted
    return str(inner) if is_object else quoted


def _scalar(text: str) -> str:
    return "{}" if text in ("", "null", "None") else text


class _TaggedArguments:
    """Pairs of keys and values in tags."""

    def __init__(self, tags: Tags, schema: Mapping[str, Any]) -> None:
        self._tags = Tags(*(it.strip() for it in _each(tags)))
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._searched = 0  # so much of the open value has no end
        self._writer = PairWriter()

    def read(self, text: str) -> tuple[str, int, bool]:
        written, at = "", 0
        while True:
            start = skip_space(text, at)
            opened = read_literal(text, start, self._tags.key_open)
            if opened is Outcome.OPEN:
                return written, at, False
            if opened is Outcome.DIFFERS:
                return written + self._writer.end(), start, True
            assert isinstance(opened, int)
            found = self._pair(text, opened)
            if found is None:
                return written, at, False
            key, value, at = found
            written += self._writer.pair(key, value)

    def cut(self, text: str) -> str:
        start = skip_space(text, 0)
        opened = read_literal(text, start, self._tags.key_open)
        if not isinstance(opened, int):
            return ""
        key, closed, rest = text[opened:].partition(self._tags.key_close)
        found = self._value_start(rest, 0)
        if not closed or found is None or (self._tags.value_open and not found[0]):
            return ""
        start, is_text = found
        value = rest[start : len(rest) - begun_length(rest[start:], self._tags.value_close)]
        name = key.strip()
        if is_text is None:
            value = value.removeprefix("\n").removesuffix("\n")
        if self._is_text(name) if is_text is None else is_text:
            written = json.dumps(value, ensure_ascii=False)
            return self._writer.pair(name, written.removesuffix('"'))  # it has no end
        return self._writer.pair(name, value.strip()) if value.strip() else ""

    def _pair(self, text: str, at: int) -> tuple[str, str, int] | None:
        """Read a pair behind the mark that opens it, the value as JSON; None if it is not whole."""
        tags = self._tags
        key_end = text.find(tags.key_close, at)
        if key_end < 0:
            return None
        found = self._value_start(text, key_end + len(tags.key_close))
        if found is None:
            return None
        opened, is_text = found
        value_end = text.find(tags.value_close, max(opened, self._searched))
        if value_end < 0:
            self._searched = max(0, len(text) - at - len(tags.value_close))
            return None
        self._searched = 0
        key = text[at:key_end].strip()
        value = self._value(key, text[opened:value_end], is_text=is_text)
        return key, value, value_end + len(tags.value_close)

    def _value_start(self, text: str, at: int) -> tuple[int, bool | None] | None:
        """Read what opens a value, which may say whether the value is a text.

        Returns:
            Where the value begins, and whether it is a text; None: what follows decides.
        """
        tags = self._tags
        for mark, is_text in ((tags.value_open, True), (tags.json_open, False)):
            found = read_literal(text, at, mark) if mark else Outcome.DIFFERS
            if found is Outcome.OPEN:
                return None
            if isinstance(found, int):
                return found, is_text if tags.json_open else None
        return at, None

    def _is_text(self, key: str) -> bool:
        about = self._properties.get(key)
        return isinstance(about, dict) and about.get("type") == "string"

    def _value(self, key: str, text: str, *, is_text: bool | None) -> str:
        """Write a value as JSON: as a text if it is to be one, and if it is nothing else."""
        if is_text is None:  # the schema says it, and lines of their own are the form's
            text, is_text = text.removeprefix("\n").removesuffix("\n"), self._is_text(key)
        if not is_text:
            try:
                # Also numbers that JSON lacks are texts: NaN, Infinity, and what is as large.
                json.dumps(json.loads(text), allow_nan=False)
            except (ValueError, RecursionError):
                pass
            else:
                return text.strip()
        return json.dumps(text, ensure_ascii=False)


def _each(tags: Tags) -> tuple[str, str, str, str, str]:
    return tags.key_open, tags.key_close, tags.value_open, tags.value_close, tags.json_open


class _PythonArguments:
    """Keyword arguments of a call in Python."""

    def __init__(self) -> None:
        self._writer = PairWriter()
        self._scanned = 0  # letters of the open argument
        self._depth, self._quote, self._is_escaped = 0, "", False

    def read(self, text: str) -> tuple[str, int, bool]:
        written, at = "", 0
        for index in range(self._scanned, len(text)):
            if not self._ends(text[index]):
                continue
            written += self._written(text[at:index])
            if text[index] == ")":
                return written + self._writer.end(), index, True
            at = index + 1
        self._scanned = len(text) - at
        return written, at, False

    def cut(self, text: str) -> str:
        """Leave out an argument that is not whole: what it would be is not known."""
        del text
        return ""

    def _ends(self, letter: str) -> bool:
        """Take the next letter; tell whether it is behind an argument."""
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif letter == "\\":
                self._is_escaped = True
            elif letter == self._quote:
                self._quote = ""
        elif letter in "\"'":
            self._quote = letter
        elif self._depth == 0 and letter in ",)":
            return True
        elif letter in "([{":
            self._depth += 1
        elif letter in ")]}":
            self._depth -= 1
        return False

    def _written(self, argument: str) -> str:
        found = _KEYWORD.fullmatch(argument)
        return self._writer.pair(found[1], _as_json(found[2].strip())) if found else ""


def _as_json(literal: str) -> str:
    """Write a literal of Python as JSON; a text that is none as a text."""
    for read in (ast.literal_eval, json.loads):
        try:
            return json.dumps(read(literal), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return json.dumps(literal, ensure_ascii=False)
