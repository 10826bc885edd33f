"""Parts what a model thinks from what it says: by marks, of which the prompt may have the first."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from paceline_gateway.dialects.literals import begun_length

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How a family of models marks its reasoning.

    Attributes:
        name: The name in settings.
        open: The mark before it; it may consist of a token and a text.
        close: The mark behind it.
    """

    name: str
    open: str
    close: str


REASONINGS = (
    Reasoning("think", "<think>", "</think>"),
    Reasoning("mistral", "[THINK]", "[/THINK]"),
    Reasoning("seed", "<seed:think>", "</seed:think>"),
    Reasoning("gemma4", "<|channel>thought", "<channel|>"),
)
"""The families, each known by the second mark in its template."""


def find_reasoning(template: str) -> Reasoning | None:
    """Return how the model of a chat template marks its reasoning; None if it does not."""
    return next((it for it in REASONINGS if it.close in template), None)


class Stage(Enum):
    """Where an answer is."""

    UNKNOWN = auto()
    """At its start: reasoning may follow."""

    REASONING = auto()
    ANSWER = auto()


def stage_after(prompt: str, reasoning: Reasoning) -> Stage:
    """Tell where an answer begins, from the end of its prompt."""
    end = prompt.rstrip()
    if end.endswith(reasoning.open):
        return Stage.REASONING
    return Stage.ANSWER if end.endswith(reasoning.close) else Stage.UNKNOWN


class ReasoningParser:
    """Parts one answer. The parts are the same for any cut of its text.

    Args:
        reasoning: The marks.
        stage: Where the answer begins. A model may think although its prompt has closed that.

    Attributes:
        stage: Where it is.
    """

    def __init__(self, reasoning: Reasoning, stage: Stage) -> None:
        self._reasoning = reasoning
        self.stage = Stage.REASONING if stage is Stage.REASONING else Stage.UNKNOWN
        self._text = ""
        self._has_begun = False  # what the present stage says
        self._follows_reasoning = stage is Stage.ANSWER

    def feed(self, text: str, think: Callable[[str], None]) -> str:
        """Take more of the answer; tell the reasoning in it, and return what is said."""
        self._text += text
        if self.stage is Stage.UNKNOWN:
            self._look_for_mark()
        if self.stage is Stage.REASONING:
            self._think(think)
        return self._said() if self.stage is Stage.ANSWER else ""

    def finish(self, think: Callable[[str], None]) -> str:
        """End the answer; tell and return what was held back."""
        text, self._text = self._text, ""
        if self.stage is Stage.REASONING:
            if text.strip():
                think(text)
            return ""
        return text

    def _look_for_mark(self) -> None:
        start, mark = self._text.lstrip(), self._reasoning.open
        if start.startswith(mark):
            self._text = start[len(mark) :]
            self.stage = Stage.REASONING
        elif not mark.startswith(start):
            self.stage = Stage.ANSWER

    def _think(self, think: Callable[[str], None]) -> None:
        if not self._has_begun:
            self._text = self._text.lstrip()
        mark = self._reasoning.close
        at = self._text.find(mark)
        end = at if at >= 0 else len(self._text) - begun_length(self._text, mark)
        thought = self._text[:end].rstrip()
        if thought:
            self._has_begun = True
            think(thought)
        self._text = self._text[len(thought) :] if at < 0 else self._text[at + len(mark) :]
        if at >= 0:
            self.stage, self._follows_reasoning = Stage.ANSWER, True

    def _said(self) -> str:
        if self._follows_reasoning:
            self._text = self._text.lstrip()
            self._follows_reasoning = not self._text
        text, self._text = self._text, ""
        return text
