"""The schemas of chat's messages and tools, and their translation into a conversation."""

from __future__ import annotations

import json
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
)

from paceline_contract.limits import MOST_GRAMMAR_BYTES, MOST_GRAMMAR_DEPTH, depth_of
from paceline_gateway.bodies.fields import UNKNOWN_KIND, Fields, known_kind, problem
from paceline_gateway.bodies.parameter_types import Content, NoList, NoText, one_of
from paceline_gateway.conversations.conversation import (
    Message,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
)

MOST_TOOLS = 512
"""Tools of a request. OpenAI takes 128; agents with several servers of tools have more."""

MOST_TOOL_CALLS = 512
"""Calls in one message."""

_MOST_NAME = 128
_MOST_OPTIONS = 64
_TOOL_NAME = r"^[a-zA-Z0-9_.:/-]+$"
# What a template finds under these names is the conversation's; the last three steer libraries.
_TAKEN_OPTIONS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "return_dict",
        "tokenize",
        "tools",
    }
)

_Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=_MOST_NAME)]


def _check_size(value: object) -> None:
    if depth_of(value) > MOST_GRAMMAR_DEPTH:
        raise problem("is nested deeper than {most}", most=MOST_GRAMMAR_DEPTH)
    if len(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")) > MOST_GRAMMAR_BYTES:
        raise problem("has more than {most} bytes as JSON", most=MOST_GRAMMAR_BYTES)


def _parameters(value: dict[str, Any]) -> dict[str, Any]:
    """Check a schema of arguments as far as it concerns this gateway."""
    _check_size(value)
    if value.get("type", "object") != "object":
        raise problem("must be a schema of an object")
    return value


def _arguments(value: object) -> object:
    """Turn arguments into JSON, as some clients send the object itself."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def _options(value: dict[str, Any]) -> dict[str, Any]:
    """Check names for a template."""
    if len(value) > _MOST_OPTIONS:
        raise problem("has more than {most} names", most=_MOST_OPTIONS)
    for name in value:
        if name in _TAKEN_OPTIONS or not name.isidentifier():
            raise problem("cannot have the name {name}", name=json.dumps(name[:_MOST_NAME]))
    _check_size(value)
    return value


def with_effort(options: dict[str, Any], effort: str | None) -> dict[str, Any]:
    """Add OpenAI's word for how long to think to the names for a template.

    Templates that can only think or not have one of two other names for that.
    """
    if effort is None:
        return options
    thinks = {} if effort != "none" else {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": effort, **thinks, **options}


TemplateOptions: TypeAlias = Annotated[dict[str, Any], AfterValidator(_options)]


FunctionName: TypeAlias = Annotated[_Name, Field(pattern=_TOOL_NAME)]
Parameters: TypeAlias = Annotated[dict[str, Any], AfterValidator(_parameters)]


class Function(Fields):
    """A function of a tool."""

    name: FunctionName
    description: str = ""
    parameters: Parameters | None = None
    strict: bool | None = None

    @property
    def tool(self) -> Tool:
        """The tool."""
        return Tool(
            name=self.name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )


class _FunctionTool(Fields):
    """A tool that is a function."""

    type: str
    function: Function

    @property
    def tool(self) -> Tool:
        """The tool."""
        return self.function.tool


def tool_kind(known: str) -> BeforeValidator:
    """Refuse a tool of another kind, which the caller may leave out."""
    return known_kind({known}, thing="a tool", error=UNKNOWN_KIND)


class _HasTool(Protocol):
    @property
    def tool(self) -> Tool: ...


_ToolT = TypeVar("_ToolT", bound=_HasTool)


def check_names(tools: list[_ToolT]) -> list[_ToolT]:
    """Refuse two tools of one name."""
    seen = set()
    for name in (it.tool.name for it in tools):
        if name in seen:
            raise problem("has two tools of the name {name}", name=json.dumps(name))
        seen.add(name)
    return tools


Tools: TypeAlias = Annotated[
    list[Annotated[_FunctionTool, tool_kind("function")]],
    Field(max_length=MOST_TOOLS),
    AfterValidator(check_names),
]


def _tool_choice(value: object) -> ToolChoice:
    """Read OpenAI's forms of a choice: of chat, and of responses, which are a level flatter."""
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(mode=value)
        case {"type": "function"}:
            return ToolChoice(mode="required", names=(_name_of(value),))
        case {"type": "allowed_tools", "allowed_tools": allowed} | (
            {"type": "allowed_tools"} as allowed
        ):
            return _allowed_tools(allowed)
    raise problem("must be none, auto, required, a function, or allowed_tools")


def _allowed_tools(value: object) -> ToolChoice:
    match value:
        case {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools}:
            return ToolChoice(mode=mode, names=tuple(map(_name_of, tools)))
    raise problem("needs a mode, auto or required, and a list of tools")


def _name_of(value: object) -> str:
    match value:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise problem("needs the name of a function")


def among_tools(choice: ToolChoice, info: ValidationInfo) -> ToolChoice:
    """Check that chosen tools are in the field `tools`, unless that field has a fault itself."""
    if "tools" not in info.data:
        return choice
    known = [it.tool.name for it in info.data["tools"]]
    for name in choice.names or ():
        if name not in known:
            raise problem("names {name}, which is not in tools", name=json.dumps(name[:100]))
    if choice.mode == "required" and not known:
        raise problem("needs tools")
    return choice


Choice: TypeAlias = Annotated[ToolChoice, PlainValidator(_tool_choice)]


class _CalledFunction(Fields):
    """A function that was called, and how."""

    name: _Name
    arguments: Annotated[str, BeforeValidator(_arguments)] = ""


class _Call(Fields):
    """A call in an assistant's message."""

    id: str = Field("", max_length=256)
    type: Annotated[str, one_of("function")] = "function"
    function: _CalledFunction
    index: object = None  # of a streamed answer, which some clients put together

    @property
    def call(self) -> ToolCall:
        """The call."""
        return ToolCall(self.id, self.function.name, self.function.arguments)


def can_go_on(message: Message) -> bool:
    """Whether an answer can continue a message: an assistant's text without calls."""
    return message.role == "assistant" and bool(message.content) and not message.tool_calls


class ChatMessage(Fields):
    """A message of chat: a text or the texts of parts, an assistant's calls, a tool's result."""

    role: Annotated[str, one_of("system", "developer", "user", "assistant", "tool")]
    name: object = None  # a participant's or tool's name, for templates that use it
    tool_calls: list[_Call] = Field([], max_length=MOST_TOOL_CALLS)
    tool_call_id: str = Field("", max_length=256)
    # Two names of one thing: the older one, and that of newer servers.
    reasoning_content: str = ""
    reasoning: str = ""
    # Fields of answers, which return in the history of a conversation.
    annotations: NoList = None
    refusal: NoText = None
    # Two names of others for a last message that is continued.
    partial: bool = False
    prefix: bool = False
    content: Content | None = Field(None, validate_default=True)

    @field_validator("tool_calls", "reasoning_content", "reasoning")
    @classmethod
    def _is_of_an_assistant(cls, value: object, info: ValidationInfo) -> object:
        if value and info.data.get("role", "assistant") != "assistant":
            raise problem("is only for messages of the assistant")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _is_of_a_tool(cls, value: str, info: ValidationInfo) -> str:
        if value and info.data.get("role", "tool") != "tool":
            raise problem("is only for messages of the role tool")
        return value

    @field_validator("content")
    @classmethod
    def _is_there(cls, value: object, info: ValidationInfo) -> object:
        others = ("tool_calls", "reasoning_content", "reasoning")
        if value is None and not any(info.data.get(it) for it in others):
            raise problem("is needed")
        return value

    @property
    def is_begun(self) -> bool:
        """Whether it says by itself that it is continued."""
        return self.partial or self.prefix

    @property
    def message(self) -> Message:
        """The message."""
        return Message(
            role=cast("Role", self.role),
            content=self.content,
            name=self.name if isinstance(self.name, str) else "",
            reasoning=self.reasoning_content or self.reasoning,
            tool_calls=tuple(it.call for it in self.tool_calls),
            tool_call_id=self.tool_call_id,
        )


class PromptEnding(Fields):
    """How a conversation's prompt ends: where an answer begins, or within one."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, validate_default=True)

    @field_validator("continue_final_message")
    @classmethod
    def _is_possible(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        messages = info.data.get("messages", [])
        if any(it.is_begun for it in messages[:-1]):
            raise problem("is possible for the last message alone")
        if not value and not (messages and messages[-1].is_begun):
            return value
        if info.data.get("add_generation_prompt"):
            raise problem("needs `add_generation_prompt: false`")
        if not messages or not can_go_on(messages[-1].message):
            raise problem("needs a last message of the assistant, with text")
        return True

    @property
    def continues_last(self) -> bool:
        """Whether the answer goes on with the last message."""
        return self.continue_final_message is True

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt has the beginning of the next answer."""
        return self.add_generation_prompt is not False
