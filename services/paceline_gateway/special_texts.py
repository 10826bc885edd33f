"""What people wrote of special tokens, kept apart from what a template writes.

A message may say `<s>`, and so may the template around it. In the rendered prompt nobody could tell
one from the other. So what people wrote is marked before it is rendered, with a letter that no text
has, on both sides:

    said        Why is <s>price</s> struck through?
    marked      Why is #<s>#price%</s>% struck through?     # and % are letters for private use
    rendered    <s>[INST] Why is #<s>#price%</s>% struck through? [/INST]
    parts       "<s>[INST] Why is " "<s>" "price" "</s>" " struck through? [/INST]"

The letters stay where they are when a template trims, splits or changes the case of a text, and a
conversation without special tokens goes to the template as it is. A mark that has lost its fellow
(a template wrote half of the text) is taken out; no special token is read across its place. What a
template can see of it: a text that begins with a special token begins with a mark, and is longer.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING, Any

from paceline import PromptPart

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["SpecialTexts"]

# Planes 15 and 16, less their last two code points each, which are none.
_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class SpecialTexts:
    """The special tokens that stand in what people said, and a mark for each.

    Args:
        special_tokens: Their texts.
        messages: What is said, as a template takes it.
    """

    def __init__(
        self, special_tokens: Iterable[str], messages: Sequence[Mapping[str, Any]]
    ) -> None:
        said = "\n".join(_texts(messages))
        # Of any case: a template may change it.
        folded = said.lower()
        first_letters = set(folded)
        found = [
            it
            for it in special_tokens
            if it and it[0].lower() in first_letters and it.lower() in folded
        ]
        names = sorted({it.lower() for it in found}, key=len, reverse=True)
        self._marks = dict(zip(names, _private_letters(len(names), absent_from=said), strict=True))
        self._names = _any_of(map(re.escape, names))
        whole = (f"{mark}{re.escape(name)}{mark}" for name, mark in self._marks.items())
        self._marked = _any_of([*whole, *self._marks.values()])

    def marked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with marks around the special tokens that it says."""
        return {
            name: value if name == "role" else self._with_marks(value)
            for name, value in message.items()
        }

    def parts(self, rendered: str) -> str | list[PromptPart]:
        """Return a rendered prompt without marks: in parts, if there were any."""
        if not self._marks:
            return rendered
        for mark in self._marks.values():
            # As JSON in ASCII and Python write it, where a template writes values so.
            for written in (json.dumps(mark)[1:-1], repr(mark)[1:-1]):
                rendered = rendered.replace(written, mark)
        parts, start = [], 0
        for found in self._marked.finditer(rendered):
            parts.append(PromptPart(rendered[start : found.start()], parse_special_tokens=True))
            parts.append(PromptPart(found[0][1:-1], parse_special_tokens=False))
            start = found.end()
        parts.append(PromptPart(rendered[start:], parse_special_tokens=True))
        return [part for part in parts if part.text]

    def _with_marks(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._names.sub(self._with_mark, value)
        return [self._with_mark_of_text(part) for part in value]

    def _with_mark_of_text(self, part: Mapping[str, Any]) -> dict[str, Any]:
        return {**part, "text": self._with_marks(part["text"])}

    def _with_mark(self, found: re.Match[str]) -> str:
        mark = self._marks[found[0].lower()]
        return f"{mark}{found[0]}{mark}"


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        for name, value in message.items():
            if isinstance(value, str):
                if name != "role":
                    yield value
            else:
                yield from (part["text"] for part in value)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or r"(?!)", re.IGNORECASE)


def _private_letters(count: int, *, absent_from: str) -> list[str]:
    """Choose letters that no text has, nor can be made to have: nobody can guess them."""
    letters: dict[str, None] = {}
    while len(letters) < count:
        plane = secrets.choice(_PRIVATE)
        letter = chr(secrets.choice(plane))
        if letter not in absent_from:
            letters[letter] = None
    return list(letters)
