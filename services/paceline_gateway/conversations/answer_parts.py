"""What an answer consists of: a stream of parts, which every interface writes in its own form.

    reasoning   content   call 0: begin, arguments   call 1: begin, arguments   content

A parser makes the parts of an answer's text as it comes. Parts of one kind, put together, are the
same wherever the text was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from paceline_gateway.conversations.conversation import ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline import Chunk


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of what the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """The beginning of a call; its arguments follow, and then no more of an earlier call's.

    Attributes:
        index: The number of the call in the answer.
        id: The call's own id.
        name: The tool's name.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments: together they are JSON, unless the answer was cut.

    Attributes:
        index: The number of the call.
        text: A piece of JSON.
    """

    index: int
    text: str


AnswerPart: TypeAlias = ReasoningDelta | ContentDelta | ToolCallBegin | ArgumentsDelta


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Attributes:
        content: What the model said.
        reasoning: What it thought before.
        tool_calls: What it called.
    """

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, parts: Iterable[AnswerPart]) -> Answer:
        """Put the parts of an answer together."""
        content: list[str] = []
        reasoning: list[str] = []
        begins: list[ToolCallBegin] = []
        arguments: dict[int, list[str]] = {}
        for part in parts:
            match part:
                case ContentDelta(text):
                    content.append(text)
                case ReasoningDelta(text):
                    reasoning.append(text)
                case ToolCallBegin():
                    begins.append(part)
                case ArgumentsDelta(index, text):
                    arguments.setdefault(index, []).append(text)
        calls = (ToolCall(it.id, it.name, "".join(arguments.get(it.index, ()))) for it in begins)
        return cls("".join(content), "".join(reasoning), tuple(calls))


class AnswerReader(Protocol):
    """Reads one answer, chunk by chunk."""

    @property
    def call_count(self) -> int:
        """How many calls have begun."""

    @property
    def is_within_call(self) -> bool:
        """Whether the finished answer was cut within a call: then its arguments are not whole."""

    @property
    def reasoning_token_count(self) -> int | None:
        """Tokens of the reasoning so far; None if they cannot be counted."""

    def read(self, chunk: Chunk) -> Sequence[AnswerPart]:
        """Take a chunk; return the parts that are certain now."""

    def finish(self) -> Sequence[AnswerPart]:
        """End the answer; return what was held back."""


class PlainReader:
    """Reads an answer that is nothing but content."""

    call_count = 0
    is_within_call = False
    reasoning_token_count: int | None = None

    def read(self, chunk: Chunk) -> Sequence[AnswerPart]:
        """Return the chunk's text."""
        return [ContentDelta(chunk.text)] if chunk.text else []

    def finish(self) -> Sequence[AnswerPart]:
        """Return nothing: nothing is held back."""
        return ()
