"""Reads Gemma's arguments, whose keys are bare and whose texts stand between marks.

Theory of operation
    The model means to write

        {city:<|"|>Bern, CH<|"|>,days:3,where:{lat:46.9}}<tool_call|>

    and often leaves marks out: `{city:Bern, CH,days:3}`. A comma at depth 0 therefore may end a
    pair, or belong to an unmarked text. What follows the comma decides: the pair ends at the last
    such comma that a key and a colon follow. Between these two moments the comma's place is kept:

        text     city:Bern, CH,days:3
                 |        |    '-- _comma: its key follows, so the pair city ends here
                 |        '------- _comma before: "CH,days" holds no key and colon
                 '---------------- the open pair begins (index 0 of the unused text)

    The arguments begin behind their opening brace. They end at a brace that none of theirs opens,
    or at the mark that ends the call, whichever comes first. A marked text hides commas, braces
    and that end mark; a quoted text hides commas and braces. A pair is written when its end is
    known, as the JSON that `_bare_as_json` makes of it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from paceline_gateway.dialects.family import BARE_END, TEXT_MARK
from paceline_gateway.dialects.literals import begun_length
from paceline_gateway.dialects.pair_writer import PairWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

_BARE_NAME = r"[^\s{}\[\],:\"]"
_MARK = re.escape(TEXT_MARK)
# A quoted text without an end goes to the end of all, so that no letter is read twice.
_BARE = re.compile(
    rf"{_MARK}(.*?){_MARK}|\"(?:[^\"\\]|\\.)*(?:\"|\\?\Z)|([{{,]\s*)({_BARE_NAME}+)(?=\s*:)",
    re.DOTALL,
)
_MOST_KEY = 256


class BareArguments:
    """Reads the arguments of one call.

    Args:
        schema: The schema of the arguments, whose property names may hold spaces; empty if it is
            not known.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._writer = PairWriter()
        self._begin = _pair_begin(schema)
        self._scanned = 0  # letters of the open pair
        self._comma: int | None = None  # in the open pair: its last one, which may be its end
        self._depth, self._is_in_text = 0, False
        self._is_quoted, self._is_escaped, self._begins_value = False, False, True

    def read(self, text: str) -> tuple[str, int, bool]:
        """Take the text that was not used yet, as `ArgumentsReader.read` does."""
        written, at, index = "", 0, self._scanned
        end = len(text) - max(begun_length(text, it) for it in (TEXT_MARK, BARE_END))
        while index < end:
            if text.startswith(TEXT_MARK, index):
                self._is_in_text = not self._is_in_text
                self._is_quoted = self._begins_value = False
                index += len(TEXT_MARK)
                continue
            is_cut = not self._is_in_text and text.startswith(BARE_END, index)
            if is_cut or self._ends(text[index]):
                told, at = self._followed(text, at, index)
                written += told
                if is_cut or text[index] == "}":
                    stop = _without_brace(text, at, index) if is_cut else index
                    return written + self._last(text[at:stop]) + self._writer.end(), stop, True
                self._comma = index - at
            index += 1
        told, at = self._followed(text, at, end)
        self._scanned = index - at
        return written + told, at, False

    def cut(self, text: str) -> str:
        """Leave out a pair that is not whole: what it would be is not known."""
        told, _ = self._followed(text, 0, len(text))
        return told

    def _followed(self, text: str, at: int, end: int) -> tuple[str, int]:
        """Write the open pair, if another one begins behind it; return where that one begins."""
        if self._comma is None or not self._begin.match(text, at + self._comma + 1, end):
            return "", at
        comma, self._comma = at + self._comma, None
        return self._written(text[at:comma]), comma + 1

    def _last(self, pair: str) -> str:
        is_over = self._comma is not None and not pair[self._comma + 1 :].strip()
        return self._written(pair[: self._comma] if is_over else pair)

    def _ends(self, letter: str) -> bool:
        """Take the next letter; tell whether it may be behind a pair."""
        if self._is_in_text:
            return False
        if self._is_quoted:
            self._is_quoted = self._is_escaped or letter != '"'
            self._is_escaped = letter == "\\" and not self._is_escaped
            return False
        self._is_quoted = letter == '"' and self._begins_value
        self._begins_value = letter in ":,[{" or (self._begins_value and letter.isspace())
        if self._depth == 0 and letter in ",}":
            return True
        self._depth = max(0, self._depth + (letter in "{[") - (letter in "}]"))
        return False

    def _written(self, pair: str) -> str:
        try:
            found = json.loads(_bare_as_json(f"{{{pair}}}"), strict=False)
            return self._pairs(found)
        except (ValueError, RecursionError):
            key, colon, value = pair.partition(":")
            name, text = (it.strip().replace(TEXT_MARK, "") for it in (key, value))
            return self._pairs({name.strip('"'): text}) if colon else ""

    def _pairs(self, found: Mapping[str, Any]) -> str:
        """Write pairs as JSON, which knows no number that is not finite."""
        values = {
            key: json.dumps(value, ensure_ascii=False, allow_nan=False)
            for key, value in found.items()
        }
        return "".join(self._writer.pair(key, value) for key, value in values.items())


def _pair_begin(schema: Mapping[str, Any]) -> re.Pattern[str]:
    """Return what a pair begins with: a bare or quoted key, or one that a schema names."""
    properties = schema.get("properties")
    names = properties if isinstance(properties, dict) else ()
    odd = [re.escape(it) for it in names if not re.fullmatch(f"{_BARE_NAME}+", it)]
    most = f"{{0,{_MOST_KEY}}}"
    marked, quoted = rf"{_MARK}.{most}?{_MARK}", rf'"(?:[^"\\]|\\.){most}"'
    keys = "|".join([marked, quoted, f"{_BARE_NAME}{{1,{_MOST_KEY}}}", *odd])
    return re.compile(rf"\s{most}(?:{keys})\s{most}:", re.DOTALL)


def _without_brace(text: str, at: int, end: int) -> int:
    """Return where arguments end that a mark ends, before a brace that none of theirs opens."""
    last = len(text[:end].rstrip()) - 1
    is_brace = last >= at and text[last] == "}"
    return last if is_brace and text.count("}", at, end) > text.count("{", at, end) else end


def _bare_as_json(written: str) -> str:
    """Write what has bare keys and marked texts as JSON."""

    def json_of(found: re.Match[str]) -> str:
        marked, before, key = found.groups()
        if marked is not None:
            return json.dumps(marked, ensure_ascii=False)
        return found[0] if key is None else f'{before}"{key}"'

    return _BARE.sub(json_of, written)
