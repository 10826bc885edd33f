"""Reads an answer's chunks: shows the marks among its tokens, and hands its text to a parser.

A special token has no text in a chunk. Where a family marks calls or reasoning with special tokens,
the gateway knows their ids from the model's template, and puts their texts back in their places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paceline_gateway.conversations.answer_parts import ContentDelta, ReasoningDelta
from paceline_gateway.dialects.reasoning import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from paceline import Chunk
    from paceline_gateway.conversations.answer_parts import AnswerPart
    from paceline_gateway.dialects.call_parser import CallParser
    from paceline_gateway.dialects.reasoning import ReasoningParser


class TextParser(Protocol):
    """Makes parts of an answer's text."""

    @property
    def call_count(self) -> int:
        """How many calls have begun."""

    @property
    def is_within_call(self) -> bool:
        """Whether the finished answer was cut within a call: then its arguments are not whole."""

    @property
    def stage(self) -> Stage:
        """Where the answer is; always an answer where no reasoning is looked for."""

    def feed(self, text: str) -> Sequence[AnswerPart]:
        """Take more of the answer; return the parts that are certain now."""

    def finish(self) -> Sequence[AnswerPart]:
        """End the answer; return what was held back."""


class PartsParser:
    """Reasoning first, and then content and calls.

    Args:
        reasoning: Parts reasoning; None: there is none.
        calls: Reads calls; None: everything is content.
    """

    def __init__(self, reasoning: ReasoningParser | None, calls: CallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def call_count(self) -> int:
        """How many calls have begun."""
        return self._calls.call_count if self._calls is not None else 0

    @property
    def is_within_call(self) -> bool:
        """Whether the finished answer was cut within a call."""
        return self._calls is not None and self._calls.is_within_call

    @property
    def stage(self) -> Stage:
        """Where the answer is."""
        return self._reasoning.stage if self._reasoning is not None else Stage.ANSWER

    def feed(self, text: str) -> Sequence[AnswerPart]:
        """Take more of the answer; return the parts that are certain now."""
        thought: list[str] = []
        if self._reasoning is not None:
            text = self._reasoning.feed(text, thought.append)
        return [*map(ReasoningDelta, thought), *self._said(text)]

    def finish(self) -> Sequence[AnswerPart]:
        """End the answer; return what was held back."""
        thought: list[str] = []
        text = self._reasoning.finish(thought.append) if self._reasoning is not None else ""
        rest = self._calls.finish() if self._calls is not None else ()
        return [*map(ReasoningDelta, thought), *self._said(text), *rest]

    def _said(self, text: str) -> Sequence[AnswerPart]:
        if self._calls is not None:
            return self._calls.feed(text)
        return [ContentDelta(text)] if text else []


class DialectReader:
    """Reads one answer.

    Args:
        parser: Makes parts of its text.
        marks: Texts of special tokens that the parser looks for, by their ids.
        counts_reasoning: Whether reasoning is looked for.
    """

    def __init__(
        self, parser: TextParser, *, marks: Mapping[int, str], counts_reasoning: bool
    ) -> None:
        self._parser = parser
        self._marks = marks
        self._thought: int | None = 0 if counts_reasoning else None
        self._undecided = 0

    @property
    def call_count(self) -> int:
        """How many calls have begun."""
        return self._parser.call_count

    @property
    def is_within_call(self) -> bool:
        """Whether the finished answer was cut within a call."""
        return self._parser.is_within_call

    @property
    def reasoning_token_count(self) -> int | None:
        """Tokens of the reasoning, with the mark behind it; None if they cannot be counted."""
        return self._thought

    def read(self, chunk: Chunk) -> Sequence[AnswerPart]:
        """Take a chunk; return the parts that are certain now."""
        parts: list[AnswerPart] = []
        for text in self._texts(chunk):
            before = self._parser.stage
            parts += self._parser.feed(text)
            self._count(before, self._parser.stage)
        return parts

    def finish(self) -> Sequence[AnswerPart]:
        """End the answer; return what was held back."""
        return self._parser.finish()

    def _texts(self, chunk: Chunk) -> Iterable[str]:
        """Return the text of each token, or that of all if it is not known where each ends."""
        if len(chunk.text_lengths) != len(chunk.token_ids):
            self._thought = None
            return [chunk.text]
        return self._texts_of_tokens(chunk)

    def _texts_of_tokens(self, chunk: Chunk) -> Iterator[str]:
        start = 0
        for token_id, length in zip(chunk.token_ids, chunk.text_lengths, strict=True):
            yield chunk.text[start : start + length] + self._marks.get(token_id, "")
            start += length

    def _count(self, before: Stage, after: Stage) -> None:
        """Count a token: those before the first mark count once the mark is there."""
        if self._thought is None:
            return
        if before is Stage.REASONING or after is Stage.REASONING:
            self._thought += self._undecided + 1
            self._undecided = 0
        else:
            self._undecided = self._undecided + 1 if after is Stage.UNKNOWN else 0
