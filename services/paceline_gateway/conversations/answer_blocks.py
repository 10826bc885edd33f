"""Groups an answer's parts into blocks of one kind, for interfaces whose answers are lists of them.

    reasoning | content | call 0 | call 1 | content

A block begins with its first part, and ends where another kind or another call begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeAlias

from paceline_gateway.conversations.answer_parts import ContentDelta, ReasoningDelta, ToolCallBegin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline_gateway.conversations.answer_parts import AnswerPart


class Kind(Enum):
    """What a block is."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


@dataclass(slots=True, eq=False)
class Block:
    """A block of an answer, which grows until the next one begins.

    Attributes:
        index: Its number in the answer.
        kind: What it is.
        id: A call's own id; otherwise empty.
        name: The tool of a call; otherwise empty.
        texts: The pieces of its text, or of a call's arguments.
    """

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Began:
    """A block began; nothing is in it yet."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grew:
    """A block has more text."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A block is complete."""

    block: Block


Step: TypeAlias = Began | Grew | Ended


class AnswerBlocks:
    """The blocks of one answer.

    White space alone makes no block of content: models write it around calls and reasoning.

    Args:
        needs_one: Whether an answer without any part has an empty block of content.
    """

    def __init__(self, *, needs_one: bool = False) -> None:
        self._needs_one = needs_one
        self._blocks: list[Block] = []
        self._is_open = False
        self._space = ""

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks so far."""
        return self._blocks

    def take(self, parts: Iterable[AnswerPart]) -> Iterator[Step]:
        """Take the next parts; yield what happens to the blocks."""
        for part in parts:
            if isinstance(part, ToolCallBegin):
                yield from self._begin(Kind.CALL, id=part.id, name=part.name)
            elif isinstance(part, ContentDelta):
                yield from self._say(part.text)
            elif isinstance(part, ReasoningDelta):
                yield from self._grow(Kind.REASONING, part.text)
            else:
                yield from self._grow(Kind.CALL, part.text)

    def finish(self) -> Iterator[Step]:
        """End the answer."""
        if not self._blocks and (self._space or self._needs_one):
            yield from self._grow(Kind.CONTENT, self._space)
        yield from self._end()

    def _say(self, text: str) -> Iterator[Step]:
        if not self._is_in(Kind.CONTENT):
            text = self._space + text
            if not text.strip():
                self._space = text
                return
        yield from self._grow(Kind.CONTENT, text)

    def _grow(self, kind: Kind, text: str) -> Iterator[Step]:
        if not self._is_in(kind):
            yield from self._begin(kind)
        if text:
            block = self._blocks[-1]
            block.texts.append(text)
            yield Grew(block, text)

    def _begin(self, kind: Kind, *, id: str = "", name: str = "") -> Iterator[Step]:  # noqa: A002
        yield from self._end()
        self._space = ""
        block = Block(len(self._blocks), kind, id, name)
        self._blocks.append(block)
        self._is_open = True
        yield Began(block)

    def _end(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield Ended(self._blocks[-1])

    def _is_in(self, kind: Kind) -> bool:
        return self._is_open and self._blocks[-1].kind is kind
