"""Marks special tokens that people wrote, to tell them from those of the template.

A message may contain `<s>`, and so may the template around it. In the rendered prompt the two look
the same. So a special token that people wrote is marked before the rendering, with a letter that no
text contains, on both sides:

    said        Why is <s>price</s> struck through?
    marked      Why is #<s>#price%</s>% struck through?     # and % are letters for private use
    rendered    <s>[INST] Why is #<s>#price%</s>% struck through? [/INST]
    parts       "<s>[INST] Why is " "<s>" "price" "</s>" " struck through? [/INST]"

The marks keep their places when a template trims, splits or changes the case of a text. A
conversation without special tokens goes to the template unchanged. A single mark, whose partner is
missing because the template wrote half of the text, is removed; no special token is read across its
place. A text that ends with the beginning of a special token gets a single mark at its end, so that
the next text cannot complete the token. A template can notice this much: a text that begins with a
special token begins with a mark, and is longer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from paceline import PromptPart
from paceline_serving.name_pattern import name_pattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# Planes 15 and 16, without the last two code points of each, which are not characters.
_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_ANY_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
# A mark as JSON in ASCII and Python write it, for templates that write values so.
_ESCAPED = re.compile(r"\\udb[89a-f][0-9a-f]\\ud[c-f][0-9a-f]{2}|\\U(00(?:0f|10)[0-9a-f]{4})")
_KINDS = ("text", "function", "object", "string", "number", "integer", "boolean", "array", "null")
_LONGEST_NAME = 200  # letters of a name that are searched at a text's end


class SpecialTexts:
    """The special tokens in people's messages, and a mark for each.

    Cost: linear in the messages' length, for any number of special tokens.

    Args:
        special_tokens: The texts of all special tokens.
        messages: The messages in the template's form.
        others: What else a template gets that people wrote, such as tools.

    Attributes:
        messages: The same with marks around the special tokens in them.
        others: The same.
    """

    def __init__(
        self,
        special_tokens: Sequence[str],
        messages: Sequence[dict[str, Any]],
        others: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._names, self._tree = _pattern_of(tuple(special_tokens))
        said = texts_in([messages, others])
        self._said = {it for text in said for it in _ANY_PRIVATE.findall(text)}
        self._marks: dict[str, str] = {}
        self._used_as_marks: set[str] = set()
        self._own_border = ""
        self.messages = [self._marked(it) for it in messages]
        self.others = {name: self._with_marks(it) for name, it in others.items()}

    def parts(self, rendered: str) -> str | list[PromptPart]:
        """Return a rendered prompt without marks: in parts, if there were marks."""
        if not self._used_as_marks:
            return rendered
        rendered = _ESCAPED.sub(self._unescaped, rendered)
        pieces: list[tuple[str, bool]] = []  # with whether special tokens are parsed in the piece
        start = 0
        mark_and_name = rf"({_ANY_PRIVATE.pattern})(?:({self._names.pattern})\1)?"
        marked = re.compile(mark_and_name, re.IGNORECASE)
        for found in marked.finditer(rendered):
            mark, name = found[1], found[2] or ""
            if mark not in self._used_as_marks:
                continue
            pieces.append((rendered[start : found.start()], True))
            # Between two marks of different names the text is the template's.
            pieces.append((name, self._marks.get(name.lower()) != mark))
            start = found.end()
        pieces.append((rendered[start:], True))
        return list(_parts(pieces))

    def _unescaped(self, found: re.Match[str]) -> str:
        digits = found[1]
        letter: str = chr(int(digits, 16)) if digits else json.loads(f'"{found[0]}"')
        return letter if letter in self._used_as_marks else found[0]

    def _marked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value if name == "role" else self._with_marks(value)
            for name, value in message.items()
        }

    def _with_marks(self, value: Any) -> Any:
        """Mark the texts in JSON. Kinds stay as they are, since templates compare them."""
        match value:
            case str():
                return self._with_border(self._names.sub(self._with_mark, value))
            case list():
                return [self._with_marks(it) for it in value]
            case dict():
                return {
                    self._named(name): it
                    if name == "type" and it in _KINDS
                    else self._with_marks(it)
                    for name, it in value.items()
                }
            case _:
                return value

    def _named(self, name: str) -> str:
        """Mark a field's name, unless it is a word, as templates look for."""
        return name if name.isidentifier() else str(self._with_marks(name))

    def _with_border(self, text: str) -> str:
        """Add a border to a text that ends with the beginning of a name, ignoring spaces.

        The next text in the prompt may begin with the rest of the name.
        """
        trimmed = text.rstrip()
        end = trimmed[-_LONGEST_NAME:].lower()
        for start in range(len(end)):
            node = self._tree
            for letter in end[start:]:
                node = node.get(letter, {})
            if any(node):  # a letter may follow
                return f"{trimmed}{self._border}{text[len(trimmed) :]}"
        return text

    @property
    def _border(self) -> str:
        """The mark without a partner: no special token is read across it."""
        if not self._own_border:
            self._own_border = self._new_mark()
        return self._own_border

    def _with_mark(self, found: re.Match[str]) -> str:
        name = found[0].lower()
        if name not in self._marks:
            self._marks[name] = self._new_mark()
        return f"{self._marks[name]}{found[0]}{self._marks[name]}"

    def _new_mark(self) -> str:
        """Choose a random letter, which no text contains and which cannot be guessed."""
        while True:
            letter = chr(secrets.choice(secrets.choice(_PRIVATE)))
            if letter not in self._said and letter not in self._used_as_marks:
                self._used_as_marks.add(letter)
                return letter


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in JSON, also those that name fields."""
    left = [value]
    while left:
        match each := left.pop():
            case str():
                yield each
            case list() | tuple():
                left += each
            case Mapping():
                yield from each
                left += each.values()


def _parts(pieces: Iterable[tuple[str, bool]]) -> Iterator[PromptPart]:
    """Make parts of pieces: adjacent plain pieces become one part."""
    for counts, group in groupby((it for it in pieces if it[0]), key=itemgetter(1)):
        texts = [text for text, _ in group]
        for text in texts if counts else ["".join(texts)]:
            yield PromptPart(text, parse_special_tokens=counts)


@lru_cache(maxsize=8)
def _pattern_of(names: tuple[str, ...]) -> tuple[re.Pattern[str], Mapping[str, Any]]:
    """Return a pattern that finds the longest of many names at a position, in any case.

    The second value is the tree of the names' letters.
    """
    root: dict[str, Any] = {}
    for name in names:
        node = root
        for letter in name[:_LONGEST_NAME].lower():
            node = node.setdefault(letter, {})
        if name:
            node[""] = {}  # a name may end here
    return name_pattern(map(str.lower, names), flags=re.IGNORECASE), root
