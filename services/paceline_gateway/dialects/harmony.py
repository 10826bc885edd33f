"""The dialect of gpt-oss: messages in channels, each with a head.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
        <|message|>{…}<|call|>                              in one line
    <|start|>assistant<|channel|>final<|message|>…<|return|>

The channel analysis is reasoning. A message to a recipient is a call, its body the arguments. Any
other message is content. The prompt ends behind `<|start|>assistant`.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING

from paceline_gateway.conversations.answer_parts import (
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallBegin,
)
from paceline_gateway.dialects.literals import begun_length
from paceline_gateway.dialects.reasoning import Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_gateway.conversations.answer_parts import AnswerPart

NAME = "gpt_oss"
SIGNS = ("<|channel|>", "<|message|>")
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END = "<|end|>"
ENDS = (END, "<|call|>", "<|return|>", START, CHANNEL)
MARKS = frozenset({*ENDS, MESSAGE, CONSTRAIN})

_RECIPIENT = re.compile(r"to=(\S+?)(?=[\s<]|$)")
_MOST_HEAD = 1000


class HarmonyParser:
    """Reads one answer. The parts are the same for any cut of its text.

    Args:
        most_calls: Further calls are left out; None: none are.

    Attributes:
        call_count: Calls that have begun.
        is_within_call: Whether the finished answer was cut within a call's arguments.
        stage: Where the answer is: unknown in a message's head.
    """

    def __init__(self, *, most_calls: int | None = None) -> None:
        self._most_calls = most_calls
        self.call_count = 0
        self.is_within_call = False
        self._arguments = ""  # of the last call
        self.stage = Stage.UNKNOWN
        self._text = ""
        self._is_in_head = True
        self._is_call = False
        self._parts: list[AnswerPart] = []

    def feed(self, text: str) -> Sequence[AnswerPart]:
        """Take more of the answer; return the parts that are certain now."""
        self._text += text
        while self._head() if self._is_in_head else self._body():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> Sequence[AnswerPart]:
        """End the answer; return what was held back. A head alone says nothing."""
        text, self._text = self._text, ""
        if not self._is_in_head:
            self._tell(text)
            # The mark behind a call may be missing: a server stops at it.
            self.is_within_call = self._is_call and not _is_json(self._arguments)
        elif not any(mark in text for mark in MARKS) and not self.call_count:
            # A model that does not speak in channels.
            self._parts += [ContentDelta(text)] if text else []
        parts, self._parts = self._parts, []
        return parts

    def _head(self) -> bool:
        """Read a head, up to the mark of its message."""
        head, mark, rest = self._text.partition(MESSAGE)
        if not mark:
            return False
        self._text, self._is_in_head = rest, False
        head = head[-_MOST_HEAD:]
        recipient = _RECIPIENT.search(head)
        self._is_call = recipient is not None
        if recipient is not None:
            self._begin_call(recipient[1].removeprefix("functions."))
        is_reasoning = not self._is_call and head.rpartition(CHANNEL)[2].startswith("analysis")
        self.stage = Stage.REASONING if is_reasoning else Stage.ANSWER
        return True

    def _body(self) -> bool:
        """Read a message, up to the mark of its end."""
        found = [(at, mark) for mark in ENDS if (at := self._text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._tell(self._text[:at])
            self._text = (
                self._text[at:] if mark in (START, CHANNEL) else self._text[at + len(mark) :]
            )
            self._is_in_head, self.stage = True, Stage.UNKNOWN
            return True
        end = len(self._text) - max(begun_length(self._text, mark) for mark in ENDS)
        self._tell(self._text[:end])
        self._text = self._text[end:]
        return False

    def _begin_call(self, name: str) -> None:
        if self._most_calls is None or self.call_count < self._most_calls:
            id_ = f"call_{secrets.token_hex(12)}"
            self._parts.append(ToolCallBegin(self.call_count, id_, name))
        self.call_count += 1
        self._arguments = ""

    def _tell(self, text: str) -> None:
        if not text:
            return
        if self._is_call:
            self._arguments += text
            if self._most_calls is None or self.call_count <= self._most_calls:
                self._parts.append(ArgumentsDelta(self.call_count - 1, text))
        elif self.stage is Stage.REASONING:
            self._parts.append(ReasoningDelta(text))
        else:
            self._parts.append(ContentDelta(text))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
