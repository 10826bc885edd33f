"""What a stage of a stack is asked, and what it answers: plain data beside `items`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_engine.terms.items import Judge, Judgement

if TYPE_CHECKING:
    from paceline_engine.deciding.cascade import Draw


@dataclass(frozen=True, slots=True)
class ReviewTask(Judge):
    """Judge a chain for a stack.

    Attributes:
        draws: The chain's tokens, as their stages drew them.
        stage: Who reviews.
        leniency: A token may be up to so many times too likely.
    """

    draws: tuple[Draw, ...] = ()
    stage: int = 0
    leniency: float = 1.0


@dataclass(frozen=True, slots=True)
class Reviewed(Judgement):
    """A stage's word on a chain.

    Attributes:
        draws: The accepted tokens and the next one, as they are drawn now.
    """

    draws: tuple[Draw, ...] = ()
