"""Reads calls out of an answer, in whatever pieces it comes.

Theory of operation
    The parser is a machine over the text that is not used yet. A state uses a beginning of that
    text, or leaves all of it until more comes:

        content ──opening──> head ──name──> arguments ──end──> tail ──> between ──> head, content
                              ├─no call─> content: the opening was only text
                              └─> object ──end──> tail: a call that is JSON in another order

    A state decides by what stands there, and never by where a piece happens to end. A text that
    could still become something else stays. So the parts, put together, are the same for any cut
    of the answer, which a test holds for every family.

    What looks like a call and is none becomes content, with the space before it. A call has begun
    once its name is told; from then on what follows belongs to it, up to its end or the answer's.
    Space around calls is left out: it is the form's, and not the answer's.
"""

from __future__ import annotations

import json
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from paceline_gateway.conversations.answer_parts import ArgumentsDelta, ContentDelta, ToolCallBegin
from paceline_gateway.dialects.arguments import reader_of
from paceline_gateway.dialects.family import Hole, Maybe, Shape, Tags
from paceline_gateway.dialects.literals import (
    Found,
    JsonScanner,
    Outcome,
    begun_length,
    read_literal,
    read_pieces,
    skip_space,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline_gateway.conversations.answer_parts import AnswerPart
    from paceline_gateway.conversations.conversation import Tool
    from paceline_gateway.dialects.arguments import ArgumentsReader
    from paceline_gateway.dialects.family import Family, Piece


class CallParser:
    """Reads the calls of one answer.

    Args:
        family: How the model writes them.
        tools: The tools that there are.
        most_calls: Further calls are left out; None: none are.
        is_demanded: Whether a grammar makes the answer nothing but calls. Then what an answer
            that is cut holds of a call is never content.

    Attributes:
        call_count: Calls that have begun.
        is_within_call: Whether the finished answer was cut within a call's arguments.
    """

    def __init__(
        self,
        family: Family,
        tools: Sequence[Tool] = (),
        *,
        most_calls: int | None = None,
        is_demanded: bool = False,
    ) -> None:
        self._family = family
        self._schemas: Mapping[str, Mapping[str, Any]]
        self._schemas = {it.name: it.parameters or {} for it in tools}
        self._most_calls = most_calls
        self._is_demanded = is_demanded
        place = family.call.index(Hole.ARGUMENTS)
        self._head: Sequence[Piece] = family.call[:place]
        self._tail: Sequence[Piece] = family.call[place + 1 :]
        self.call_count = 0
        self.is_within_call = False
        self._text = ""
        self._space = ""  # before the opening, while it is not known to be one
        self._is_in_section = False
        self._follows_call = False
        self._is_plain = False  # nothing that follows is a call
        self._scanner: JsonScanner | None = None
        self._scanned = 0
        self._left: list[Piece] = []
        self._arguments: ArgumentsReader
        self._state: Callable[[], bool] = self._in_content
        self._parts: list[AnswerPart] = []

    def feed(self, text: str) -> list[AnswerPart]:
        """Take more of the answer; return the parts that are certain now."""
        self._text += text
        while self._state():
            pass
        return self._taken()

    def finish(self) -> list[AnswerPart]:
        """End the answer; return what was held back."""
        state, text, self._text = self._state, self._text, ""
        if state == self._in_arguments:
            self.is_within_call = True
            self._tell_arguments(self._arguments.cut(text))
        elif self._is_demanded:
            if state == self._in_head:
                self._begin_cut_call(text)
        elif state in (self._in_head, self._in_object):
            self._say(self._space + text)
        elif state == self._in_content and not (self._follows_call and text.isspace()):
            self._say(text)
        return self._taken()

    def _taken(self) -> list[AnswerPart]:
        parts, self._parts = self._parts, []
        return parts

    # What is told

    def _say(self, text: str) -> None:
        if text:
            self._follows_call = False
            self._parts.append(ContentDelta(text))

    def _begin_call(self, name: str) -> None:
        if self._is_within_limit:
            id_ = self._family.new_id(self.call_count, name)
            self._parts.append(ToolCallBegin(self.call_count, id_, name))
        self.call_count += 1

    def _begin_cut_call(self, text: str) -> None:
        """Begin the call in whose head the answer ends, if its name is there."""
        before = () if self._is_in_section else self._family.begin
        place = self._head.index(Hole.NAME) + 1
        found = read_pieces(text, 0, (*before, *self._head[:place]))
        if isinstance(found, Found):
            self.is_within_call = True
            self._begin_call(self._name(found.name))

    def _tell_arguments(self, text: str) -> None:
        if text and self._is_told:
            self._parts.append(ArgumentsDelta(self.call_count - 1, text))

    @property
    def _is_within_limit(self) -> bool:
        return self._most_calls is None or self.call_count < self._most_calls

    @property
    def _is_told(self) -> bool:
        return self._most_calls is None or self.call_count <= self._most_calls

    # States: each uses a beginning of the text, and tells whether another one is to go on

    def _in_content(self) -> bool:
        if self._family.starts_answer:
            return self._at_start()
        if self._follows_call:
            self._text = self._text.lstrip()
        opening = self._family.opening
        at = self._text.find(opening)
        if at >= 0:
            said = self._text[:at].rstrip()
            is_between = self._follows_call and not said
            self._space = "" if is_between else self._text[len(said) : at]
            self._say(said)
            self._text = self._text[at:]
            self._state = self._in_head
            return True
        end = len(self._text) - begun_length(self._text, opening)
        said = self._text[:end].rstrip()
        self._say(said)
        self._text = self._text[len(said) :]
        return False

    def _at_start(self) -> bool:
        """Look for calls where nothing was said yet; what follows them is content."""
        self._is_plain = self._is_plain or self.call_count > 0
        if self._is_plain:
            self._text = self._text.lstrip() if self._follows_call else self._text
            self._say(self._text)
            self._text = ""
        elif self._text.strip():
            self._state = self._in_head
            return True
        return False

    def _in_head(self) -> bool:
        before = () if self._is_in_section else self._family.begin
        found = read_pieces(self._text, 0, (*before, *self._head))
        if isinstance(found, Found):
            found = self._checked(found)
        if found is Outcome.OPEN:
            return False
        if found is Outcome.DIFFERS:
            if self._family.is_object and self._finds_object((*before, *self._head)):
                return True
            return self._give_up()
        assert isinstance(found, Found)
        self._text = self._text[found.end :]
        self._begin_call(self._name(found.name))
        self._left = list(self._tail)
        schema = self._schemas.get(self._name(found.name), {})
        self._arguments = reader_of(self._family.arguments, schema)
        self._state = self._in_arguments
        return True

    def _checked(self, found: Found) -> Found | Outcome:
        """Check that a head is one: its name, and what begins behind it."""
        family = self._family
        if family.starts_answer and self._name(found.name) not in self._schemas:
            return Outcome.DIFFERS
        if family.arguments is Shape.JSON and not family.is_object:
            start = skip_space(self._text, found.end)
            if start == len(self._text):
                return Outcome.OPEN
            return found if self._text[start] in '{"' else Outcome.DIFFERS
        if isinstance(family.arguments, Tags):
            following = family.arguments.key_open, self._tail[0]
            read = [read_literal(self._text, found.end, it) for it in map(str, following)]
            if not any(isinstance(it, int) for it in read):
                return Outcome.OPEN if Outcome.OPEN in read else Outcome.DIFFERS
        return found

    def _name(self, written: str) -> str:
        if not self._family.is_numbered:
            return written
        name, colon, number = written.removeprefix("functions.").rpartition(":")
        return name if colon and number.isdecimal() else written.removeprefix("functions.")

    def _give_up(self) -> bool:
        """Take an opening for what it is: text."""
        self._say(self._space)
        if self._family.starts_answer:
            self._is_plain = True
        elif not self._is_in_section:
            opening = self._family.opening
            self._say(opening)
            self._text = self._text[len(opening) :]
        self._is_in_section, self._space = False, ""
        self._state = self._in_content
        return True

    def _finds_object(self, pieces: Sequence[Piece]) -> bool:
        """Whether a JSON object begins behind the marks before it; then its end is looked for."""
        found = read_pieces(self._text, 0, _before_object(pieces))
        start = skip_space(self._text, found.end) if isinstance(found, Found) else len(self._text)
        if self._text[start : start + 1] != "{":
            return False
        self._start, self._scanned, self._scanner = start, start, JsonScanner()
        self._state = self._in_object
        return True

    def _in_object(self) -> bool:
        """Read a call whose fields come in another order, or with others between."""
        assert self._scanner is not None
        length = self._scanner.scan(self._text[self._scanned :])
        if length is None:
            self._scanned = len(self._text)
            return False
        end = self._scanned + length
        call = _call_of(self._text[self._start : end])
        if call is None or (self._family.starts_answer and call[0] not in self._schemas):
            return self._give_up()
        self._text = self._text[end:]
        self._begin_call(call[0])
        self._tell_arguments(call[1])
        self._left = list(self._tail[1:])  # without the brace
        self._state = self._in_tail
        return True

    def _in_arguments(self) -> bool:
        told, used, is_at_end = self._arguments.read(self._text)
        self._tell_arguments(told)
        self._text = self._text[used:]
        if is_at_end:
            self._state = self._in_tail
        return is_at_end

    def _in_tail(self) -> bool:
        """Read what belongs to the end of a call, as far as it is there."""
        if self._family.is_object and len(self._left) == len(self._tail):
            start = skip_space(self._text, 0)
            if start == len(self._text):
                return False
            if self._text[start] == ",":  # further fields of the object
                self._text, self._scanner = self._text[start:], JsonScanner(1)
                self._state = self._in_further_fields
                return True
        while self._left:
            read = read_literal(self._text, 0, _text_of(self._left[0]))
            if read is Outcome.OPEN:
                return False
            self._text = self._text[read:] if isinstance(read, int) else self._text
            del self._left[0]
        self._follows_call = True
        self._state = self._in_between
        return True

    def _in_further_fields(self) -> bool:
        assert self._scanner is not None
        length = self._scanner.scan(self._text)
        self._text = "" if length is None else self._text[length:]
        if length is None:
            return False
        del self._left[0]
        self._state = self._in_tail
        return True

    def _in_between(self) -> bool:
        """Find out what follows a call: another one, the end of all, or something else."""
        family = self._family
        self._text = self._text.lstrip()
        if not self._text:
            return False
        if not family.begin and not family.starts_answer:
            self._state = self._in_content  # each call has an opening of its own
            return True
        ends = read_pieces(self._text, 0, family.end) if family.end else Outcome.DIFFERS
        if isinstance(ends, Found):
            self._text, self._is_in_section = self._text[ends.end :], False
            self._state = self._in_content
            return True
        start = read_literal(self._text, 0, family.separator)
        goes_on: bool | Outcome = start if isinstance(start, Outcome) else False
        if isinstance(start, int):
            goes_on = _begins(self._text[start:], self._head, is_object=family.is_object)
            if goes_on is True:
                self._space, self._text = self._text[:start], self._text[start:]
                self._is_in_section = True
                self._state = self._in_head
                return True
        if Outcome.OPEN in (ends, goes_on):
            return False
        self._is_in_section = False
        self._state = self._in_content
        return True


def _begins(text: str, head: Sequence[Piece], *, is_object: bool) -> bool | Outcome:
    """Tell whether a call begins here, without its whole head."""
    first = head[0]
    pieces = head[:2] if isinstance(first, Hole) else head[:1]
    if is_object:  # its fields may come in any order
        pieces = [*_before_object(head), "{"]
    found = read_pieces(text, 0, pieces)
    return True if isinstance(found, Found) else found


def _before_object(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Return the pieces before the one with which an object begins."""
    return [*takewhile(lambda it: not _text_of(it).strip().startswith("{"), pieces)]


def _text_of(piece: Piece) -> str:
    return piece.text if isinstance(piece, Maybe) else str(piece)


def _call_of(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON, of an object that is a call."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match found:
        case {"function": {"name": str(name)} as inner}:
            found = inner
        case {"name": str(name)} | {"function": str(name)}:
            pass
        case _:
            return None
    arguments: Any = next((found[it] for it in ("arguments", "parameters") if it in found), {})
    if isinstance(arguments, str):
        return name, arguments
    return name, json.dumps({} if arguments is None else arguments, ensure_ascii=False)
