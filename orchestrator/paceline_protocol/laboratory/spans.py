"""What a server did for a while on the virtual clock, for pictures and for counting."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import TypeAlias

Time: TypeAlias = int | float | Fraction


class SpanKind(Enum):
    """What a server did for a while."""

    DRAFT = "draft"
    VERIFY = "verify"
    DECODE = "decode"


@dataclass(slots=True)
class Span:
    """A draft, a verification or a decode.

    Attributes:
        kind: Which of them.
        server: Index of the drafter or target.
        call_id: Its name.
        start: When it began.
        end: When it was answered or withdrawn.
        position: Where its first token stands, the prompt counted.
        token_ids: What was drafted or decoded, or the proposal that was judged.
        parents: The parents in a tree, as in a proposal; a chain has none.
        depth: A verification's depth at its start.
        withdrawn: Whether it was given up before its (last) answer.
        accepted_count: How many tokens an answered verification accepted.
        next_token: The next token that an answered verification found.
    """

    kind: SpanKind
    server: int
    call_id: int
    start: Time
    end: Time
    position: int
    token_ids: list[int]
    parents: list[int] = field(default_factory=list)
    depth: int = 0
    withdrawn: bool = False
    accepted_count: int | None = None
    next_token: int | None = None

    @property
    def machine(self) -> tuple[bool, int]:
        """Where: whether at a target, and its index."""
        return self.kind is not SpanKind.DRAFT, self.server
