"""Rules in llguidance's form of Lark, and how they name a model's own tokens."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from paceline import Grammar
from paceline_contract.limits import MOST_GRAMMAR_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# As the engine's for a whole schema: one blank after a colon and a comma.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

ANY_TEXT = "/(?s:.*)/"


class TooLargeError(Exception):
    """A grammar has more bytes than servers take."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that are found in a text as a whole.

    Attributes:
        ids: Their ids, by their texts: of those that no other tokens may spell in a grammar.
    """

    ids: Mapping[str, int]

    @classmethod
    def of(cls, added: Mapping[str, int], special: Iterable[str]) -> Tokens:
        """Choose those that count: llguidance takes special ones, and those in angle brackets."""
        known = frozenset(special)
        marked = {
            text: each
            for text, each in added.items()
            if text in known or (text.startswith("<") and text.endswith(">"))
        }
        return cls(marked)

    @property
    def ranges(self) -> str:
        """Their ids in llguidance's form: 3-5,9."""
        written: list[str] = []
        for _, run in groupby(enumerate(sorted(self.ids.values())), lambda it: it[1] - it[0]):
            ids = [each for _, each in run]
            written.append(f"{ids[0]}-{ids[-1]}" if len(ids) > 1 else f"{ids[0]}")
        return ",".join(written)

    def literal(self, text: str) -> str:
        """Write a text: tokens in it as tokens."""
        names = [it for it in self.ids if it in text]
        if not names:
            return json.dumps(text, ensure_ascii=False) if text else '""'
        pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        pieces = [it for it in re.split(f"({pattern})", text) if it]
        return " ".join(
            f"<[{self.ids[it]}]>" if it in self.ids else json.dumps(it, ensure_ascii=False)
            for it in pieces
        )


class Rules:
    """The rules of one grammar, as they are written.

    Attributes:
        tokens: The model's tokens.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self._rules: list[str] = []

    def add(self, *rules: str) -> None:
        """Add rules; a rule that is there already is not added again."""
        self._rules += [rule for rule in rules if rule not in self._rules]

    def written(self, start: str) -> Grammar:
        """Return the grammar that begins with a rule.

        Raises:
            TooLargeError: It has too many bytes.
        """
        text = "\n".join([f"start: {start}", *self._rules, ""])
        if len(text.encode()) > MOST_GRAMMAR_BYTES:
            raise TooLargeError
        return Grammar(lark=text)

    def json(self, schema: Mapping[str, Any]) -> str:
        """Write a rule for a JSON value."""
        return f"%json {json.dumps({'x-guidance': _SPACES, **schema}, ensure_ascii=False)}"

    def up_to(self, mark: str, name: str) -> str:
        """Write any text up to a mark, and the mark."""
        text = mark.strip()
        if text in self.tokens.ids:
            self.add(f"{name}: {self.without(text)}")
            return f"{name} {self.tokens.literal(mark)}"
        rule = f"{name.lower()}_end"
        self.add(f"{rule}[lazy]: /(?s:.*){escaped(mark)}/")
        return rule

    def without(self, mark: str) -> str:
        """Write any text without a mark in it."""
        return f"{ANY_TEXT} & ~/(?s:.*){escaped(mark)}(?s:.*)/"


def escaped(text: str) -> str:
    """Write a text in a regular expression between slashes."""
    return slashed(re.escape(text).replace("\\\n", "\\n").replace("\n", "\\n"))


def slashed(pattern: str) -> str:
    """Write a regular expression between slashes: its own slashes are escaped."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern)
