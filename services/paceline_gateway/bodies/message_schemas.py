"""The schemas of Anthropic's messages, and their translation into a conversation."""

from __future__ import annotations

import json
from itertools import chain, groupby
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)

from paceline import Grammar
from paceline_gateway.bodies.conversation_schemas import (
    MOST_TOOLS,
    FunctionName,
    Parameters,
    among_tools,
    can_go_on,
    check_names,
    tool_kind,
    with_effort,
)
from paceline_gateway.bodies.fields import Fields, known_kind, problem, unsupported
from paceline_gateway.bodies.parameter_types import MOST_UINT32, NoList, one_of, schema_grammar
from paceline_gateway.bodies.request_schemas import AnyRequest
from paceline_gateway.conversations.conversation import (
    Conversation,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from paceline import GenerateOptions

_MOST_ID = 256
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
# What is between two messages of one role, which are one turn.
_BETWEEN = "\n\n"
# Which fields a block of each kind needs. What was redacted cannot be read here.
_NEEDED = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
}
_OF_ASSISTANTS = frozenset({"tool_use", "thinking", "redacted_thinking"})
_OF_USERS = frozenset({"tool_result"})


def _blocks(value: object) -> object:
    """Turn text into a block."""
    if not isinstance(value, str | list):
        raise problem("must be text or a list of blocks")
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class _TextBlock(Fields):
    """A text."""

    type: Annotated[str, one_of("text")]
    text: str
    citations: NoList = None
    cache_control: object = None  # ignored: what a server has computed it keeps by itself


_Texts: TypeAlias = Annotated[
    list[Annotated[_TextBlock, known_kind({"text"}, thing="a block")]],
    BeforeValidator(_blocks),
]


class _Block(Fields):
    """A block of a message, of any kind."""

    type: Annotated[str, one_of(*_NEEDED)]
    text: str | None = None
    citations: NoList = None
    id: str | None = Field(None, min_length=1, max_length=_MOST_ID)
    name: str | None = Field(None, min_length=1, max_length=_MOST_ID)
    input: dict[str, Any] | None = None
    tool_use_id: str | None = Field(None, min_length=1, max_length=_MOST_ID)
    content: _Texts = Field(default_factory=list)
    is_error: bool = False
    thinking: str | None = None
    signature: object = None
    data: object = None
    cache_control: object = None
    caller: object = None  # of a call in an answer: who made it

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        self.check_fields(_NEEDED[self.type])
        return self

    @property
    def call(self) -> ToolCall:
        """The call of a `tool_use`."""
        arguments = json.dumps(self.input, ensure_ascii=False)
        return ToolCall(self.id or "", self.name or "", arguments)

    @property
    def result(self) -> Message:
        """The message of a `tool_result`. Templates have no other place for an error."""
        texts = tuple(it.text for it in self.content)
        if self.is_error:
            texts = (f"Error: {''.join(texts[:1])}", *texts[1:])
        return Message(role="tool", content=_joined(texts), tool_call_id=self.tool_use_id or "")


class _Turn(Fields):
    """A message."""

    role: Annotated[str, one_of("user", "assistant", "system")]
    content: Annotated[
        list[Annotated[_Block, known_kind(_NEEDED, thing="a block")]],
        BeforeValidator(_blocks),
    ]

    @field_validator("content")
    @classmethod
    def _has_blocks_of_its_role(cls, value: list[_Block], info: ValidationInfo) -> list[_Block]:
        role = info.data.get("role")
        for block in value:
            kind = block.type
            if (kind in _OF_ASSISTANTS and role != "assistant") or (
                kind in _OF_USERS and role != "user"
            ):
                raise problem("has a block of the kind {kind}, of another role", kind=kind)
        if not value and role != "assistant":  # whose answer may have said nothing
            raise problem("must have blocks")
        return value

    @property
    def messages(self) -> Iterator[Message]:
        """The messages: results of tools are messages of their own."""
        if self.role == "assistant":
            yield self._answer
            return
        for is_result, blocks in groupby(self.content, lambda it: it.type == "tool_result"):
            if is_result:
                yield from (it.result for it in blocks)
            else:
                texts = tuple(it.text or "" for it in blocks)
                yield Message(
                    role="user" if self.role == "user" else "system", content=_joined(texts)
                )

    @property
    def _answer(self) -> Message:
        texts = tuple(it.text or "" for it in self.content if it.type == "text")
        calls = tuple(it.call for it in self.content if it.type == "tool_use")
        return Message(
            role="assistant",
            content=_joined(texts) if texts else None if calls else "",
            reasoning=_BETWEEN.join(it.thinking for it in self.content if it.thinking),
            tool_calls=calls,
        )


def _joined(texts: tuple[str, ...]) -> str | tuple[str, ...]:
    """Return texts as a template takes them: one text is not a list of one."""
    return texts if len(texts) > 1 else "".join(texts)


def _merged(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Make one message of messages of one role in a row: many templates want roles in turn.

    Cost: linear; a body may have thousands of messages of one role.
    """
    merged: list[Message] = []
    for role, run in groupby(messages, lambda it: it.role):
        of_role = list(run)
        merged += [_one(of_role)] if role in {"user", "assistant"} else of_role
    return tuple(merged)


def _one(run: Sequence[Message]) -> Message:
    """Make one message of some of one role."""
    if len(run) == 1:
        return run[0]
    return Message(
        role=run[0].role,
        content=_together([it.content for it in run if it.content]) or run[-1].content,
        reasoning=_BETWEEN.join(it.reasoning for it in run if it.reasoning),
        tool_calls=tuple(chain.from_iterable(it.tool_calls for it in run)),
    )


def _together(contents: Sequence[str | tuple[str, ...]]) -> str | tuple[str, ...]:
    texts = [it for it in contents if isinstance(it, str)]
    if len(texts) == len(contents):
        return _BETWEEN.join(texts)
    parts: list[str] = []
    for content in contents:
        parts += [_BETWEEN] if parts else []
        parts += [content] if isinstance(content, str) else content
    return tuple(parts)


class _ClientTool(Fields):
    """A tool that the client runs."""

    type: str = "custom"
    name: FunctionName
    description: str = ""
    input_schema: Parameters
    strict: bool | None = None
    cache_control: object = None
    eager_input_streaming: object = None  # arguments are streamed as they come

    @property
    def tool(self) -> Tool:
        """The tool."""
        return Tool(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )


class _Choice(Fields):
    """Which tools may be called."""

    type: Annotated[str, one_of("auto", "any", "tool", "none")]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise problem("needs a name with the type tool, and only with it")
        return self

    @property
    def choice(self) -> ToolChoice:
        """The choice."""
        if self.name is not None:
            return ToolChoice(mode="required", names=(self.name,))
        return ToolChoice(
            mode="none" if self.type == "none" else "required" if self.type == "any" else "auto"
        )


class _Thinking(Fields):
    """Whether the model thinks before it answers."""

    type: Annotated[str, one_of("enabled", "disabled", "adaptive")]
    budget_tokens: int | None = Field(None, ge=1, le=MOST_UINT32)
    display: Annotated[str, one_of("summarized", "omitted")] | None = None

    @property
    def template_options(self) -> dict[str, Any]:
        """The two names that templates have for it; where the model decides, neither."""
        if self.type == "adaptive":
            return {}
        return dict.fromkeys(("enable_thinking", "thinking"), self.type == "enabled")


def _format(value: object, info: ValidationInfo) -> Grammar:
    match value:
        case {"type": "json_schema", "schema": dict() as schema, **more}:
            name = "output_config.format" if info.field_name == "format" else "output_format"
            return schema_grammar(
                schema, f"{name}.schema", info.context, wanted=more.get("lenient", False)
            )
    raise problem("must be an object with the type json_schema and a schema")


_Format: TypeAlias = Annotated[Grammar, PlainValidator(_format)]


class _OutputConfig(Fields):
    """How an answer looks, and how much effort it takes."""

    effort: Annotated[str, one_of(*_EFFORTS)] | None = None
    format: _Format | None = None


def _edits(value: object) -> object:
    """Accept the edit that keeps everything; others would remove what was said."""
    match value:
        case {"edits": list() as edits}:
            if all(
                isinstance(it, dict)
                and it.get("type") == "clear_thinking_20251015"
                and it.get("keep") == "all"
                for it in edits
            ):
                return value
        case {}:
            return value
    raise unsupported("is not supported: it would leave out parts of the conversation")


class CountBody(Fields):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[_Turn] = Field(min_length=1)
    system: _Texts = Field(default_factory=list)
    tools: Annotated[
        list[Annotated[_ClientTool, tool_kind("custom")]],
        Field(max_length=MOST_TOOLS),
        AfterValidator(check_names),
    ] = Field(default_factory=list)
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None  # the older name
    context_management: Annotated[object, PlainValidator(_edits)] = None
    mcp_servers: NoList = None
    cache_control: object = None

    @field_validator("messages")
    @classmethod
    def _can_go_on(cls, value: list[_Turn]) -> list[_Turn]:
        if value and value[-1].role == "assistant" and not can_go_on(*value[-1].messages):
            raise unsupported("must not end with a message of the assistant without text to go on")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _is_among_the_tools(cls, value: _Choice | None, info: ValidationInfo) -> _Choice | None:
        if value is not None:
            among_tools(value.choice, info)
        return value

    @property
    def conversation(self) -> Conversation:
        """The conversation."""
        said_first = tuple(it.text for it in self.system if it.text)
        system = [Message(role="system", content=_joined(said_first))] if said_first else []
        said = [message for turn in self.messages for message in turn.messages]
        chosen = self.tool_choice
        options = {} if self.thinking is None else self.thinking.template_options
        return Conversation(
            messages=(*system, *_merged(said)),
            tools=tuple(it.tool for it in self.tools),
            tool_choice=ToolChoice() if chosen is None else chosen.choice,
            parallel_tool_calls=chosen is None or not chosen.disable_parallel_tool_use,
            template_options=with_effort(options, self.effort),
            continues_last=self.messages[-1].role == "assistant",
            most_thought=None if self.thinking is None else self.thinking.budget_tokens,
            limits_free_thought=False,  # agents send a number with each request
        )

    @property
    def effort(self) -> str | None:
        """How much effort is wanted, if that is told."""
        return None if self.output_config is None else self.output_config.effort

    @property
    def grammar(self) -> Grammar | None:
        """What the answer has to follow, if anything."""
        wanted = None if self.output_config is None else self.output_config.format
        return wanted or self.output_format


class MessagesBody(CountBody, AnyRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=MOST_UINT32)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    top_k: int | None = Field(None, ge=-1, le=MOST_UINT32)
    service_tier: Annotated[str, one_of("auto", "standard_only")] | None = None

    def options(self) -> GenerateOptions:
        """Return the options for the client library."""
        options = super().options()
        options["max_tokens"] = self.max_tokens
        options["stop"] = self.stop_sequences
        if self.top_k is not None:
            options.setdefault("top_k", max(0, self.top_k))
        if self.grammar is not None:
            options["grammar"] = self.grammar
        return options
