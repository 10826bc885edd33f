"""A conversation, whichever interface it came by: messages, tools, and how they may be used.

Each interface checks its own form of a request and translates it into this one. What renders,
constrains and reads an answer knows only this form.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from paceline_contract.limits import MOST_GRAMMAR_DEPTH, depth_of

if TYPE_CHECKING:
    from collections.abc import Mapping

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
"""Who speaks: `tool` is the result of a call."""

Mode: TypeAlias = Literal["none", "auto", "required"]
"""Whether an answer may call tools: it cannot, it may, it must."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made.

    Attributes:
        id: The name by which the result refers to the call; may be empty.
        name: The tool's name.
        arguments: An object as JSON. It is what a model wrote, so it may be no JSON at all.
    """

    id: str
    name: str
    arguments: str

    @property
    def argument_object(self) -> dict[str, Any] | None:
        """The arguments as an object; None if they are none, or nested beyond all use."""
        if not self.arguments.strip():
            return {}
        try:
            found = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) and depth_of(found) <= MOST_GRAMMAR_DEPTH else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message.

    Attributes:
        role: Who speaks.
        content: A text, or the texts of parts; None only for an assistant that said nothing.
        name: A participant's or a tool's name; may be empty.
        reasoning: What an assistant thought before its answer.
        tool_calls: What an assistant called.
        tool_call_id: Which call a tool answers; may be empty.
    """

    role: Role
    content: str | tuple[str, ...] | None
    name: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Its name.
        description: What it does; may be empty.
        parameters: A JSON schema of its arguments, which are an object; None: not told.
        strict: Whether arguments have to follow the schema; None: if that can be enforced.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tools an answer may call.

    Attributes:
        mode: Whether it may call any.
        names: The allowed tools; None: all.
    """

    mode: Mode = "auto"
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation that an answer continues.

    Attributes:
        messages: The messages, at least one.
        tools: The tools, each with a name of its own.
        tool_choice: Which of them may be called.
        parallel_tool_calls: Whether an answer may have several calls.
        template_options: Further names for the model's template, such as `enable_thinking`.
        continues_last: Whether the answer goes on with the last message, which is an assistant's
            text, and does not begin a message of its own.
        opens_answer: Whether the prompt has the beginning of the next answer.
        most_thought: Most tokens of the answer's reasoning; None: any number.
        limits_free_thought: Whether this also counts where nothing else constrains the answer.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    continues_last: bool = False
    opens_answer: bool = True
    most_thought: int | None = None
    limits_free_thought: bool = True

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the template writes: all, unless no call is wanted."""
        return () if self.tool_choice.mode == "none" else self.tools

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        names = self.tool_choice.names
        return tuple(it for it in self.offered_tools if names is None or it.name in names)
