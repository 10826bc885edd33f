"""Rules in llguidance's form of Lark, and how they name a model's own tokens."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from paceline import Grammar
from paceline_contract.limits import MOST_GRAMMAR_BYTES
from paceline_gateway.bodies.schema_notes import without_notes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# As the engine's for a whole schema: one blank after a colon and a comma.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

ANY_TEXT = "/(?s:.*)/"


class TooLargeError(Exception):
    """A grammar has more bytes than servers take."""


@dataclass(frozen=True)
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

    @cached_property
    def ranges(self) -> str:
        """Their ids in llguidance's form: 3-5,9."""
        written: list[str] = []
        for _, run in groupby(enumerate(sorted(self.ids.values())), lambda it: it[1] - it[0]):
            ids = [each for _, each in run]
            written.append(f"{ids[0]}-{ids[-1]}" if len(ids) > 1 else f"{ids[0]}")
        return ",".join(written)

    def literal(self, text: str) -> str:
        """Write a text: tokens in it as tokens, at each place the longest.

        Cost: it does not depend on how many tokens there are; some models have thousands.
        """
        pieces: list[str] = []
        start = place = 0
        while place < len(text):
            name = self._name_at(text, place)
            if not name:
                place += 1
                continue
            pieces += [*_quoted(text[start:place]), f"<[{self.ids[name]}]>"]
            start = place = place + len(name)
        return " ".join([*pieces, *_quoted(text[start:])]) or '""'

    def _name_at(self, text: str, place: int) -> str:
        """Return the longest token at a place of a text; nothing if there is none."""
        for length in self._lengths.get(text[place], ()):
            if (name := text[place : place + length]) in self.ids:
                return name
        return ""

    @cached_property
    def _lengths(self) -> Mapping[str, Sequence[int]]:
        """The lengths of tokens by their first letter, longest first."""
        found: defaultdict[str, set[int]] = defaultdict(set)
        for name in self.ids:
            if name:
                found[name[0]].add(len(name))
        return {letter: sorted(lengths, reverse=True) for letter, lengths in found.items()}


def _quoted(text: str) -> list[str]:
    return [json.dumps(text, ensure_ascii=False)] if text else []


class Rules:
    """The rules of one grammar, as they are written.

    Attributes:
        tokens: The model's tokens.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self._rules: dict[str, None] = {}  # in order
        self._size = 0

    def add(self, *rules: str) -> None:
        """Add rules; a rule that is there already is not added again.

        Raises:
            TooLargeError: They have too many bytes. So what many tools cost ends here, too.
        """
        for rule in rules:
            if rule not in self._rules:
                self._rules[rule] = None
                self._size += len(rule.encode()) + 1
        if self._size > MOST_GRAMMAR_BYTES:
            raise TooLargeError

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
        written = {"x-guidance": _SPACES, **without_notes(schema)}
        return f"%json {json.dumps(written, ensure_ascii=False, separators=(',', ':'))}"

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
