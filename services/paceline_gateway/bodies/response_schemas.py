"""The schemas of the responses interface: items, tools, and their translation."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Annotated, TypeAlias, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    field_validator,
    model_validator,
)

from paceline_gateway.bodies.conversation_schemas import (
    MOST_TOOLS,
    Choice,
    Function,
    among_tools,
    check_names,
    tool_kind,
    with_effort,
)
from paceline_gateway.bodies.fields import Fields, known_kind, problem, unsupported
from paceline_gateway.bodies.parameter_types import (
    MOST_UINT32,
    Effort,
    FalseOnly,
    NoList,
    NoText,
    TextFormat,
    one_of,
    only,
    texts_of,
)
from paceline_gateway.bodies.request_schemas import AnyRequest
from paceline_gateway.conversations.conversation import (
    Conversation,
    Message,
    Role,
    ToolCall,
    ToolChoice,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from paceline import GenerateOptions, Grammar

_MOST_ID = 256
_MOST_INCLUDED = 64
# Which fields an item of each kind needs.
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_TEXTS = frozenset({"input_text", "output_text", "reasoning_text", "summary_text", "text"})


def _items(value: object) -> object:
    """Turn text into a user's message."""
    if not isinstance(value, str | list):
        raise problem("must be text or a list of items")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _says_something(value: list[InputItem]) -> list[InputItem]:
    """Refuse items of which nothing is left: reasoning that nobody can read."""
    if value and all(_says_nothing(it.message) for it in value):
        raise problem("has nothing but reasoning that cannot be read here")
    return value


def _texts(value: object) -> str | tuple[str, ...]:
    """Return a text, or the texts of parts, of which one alone is a text."""
    texts = texts_of(value, kinds=_TEXTS)
    return texts[0] if isinstance(texts, tuple) and len(texts) == 1 else texts


_Texts: TypeAlias = Annotated[str | tuple[str, ...], PlainValidator(_texts)]


def _never(_value: object) -> object:
    """Refuse what would need stored answers."""
    raise unsupported("is not supported: nothing is stored here; send the whole conversation")


def _not_stored(value: object) -> object:
    if value is not False:
        raise unsupported("must be false: nothing is stored here")
    return value


_Never: TypeAlias = Annotated[object, PlainValidator(_never)]


class InputItem(Fields):
    """An item of the conversation, of any kind."""

    type: Annotated[str, one_of(*_NEEDED)] = "message"
    role: Annotated[str, one_of("system", "developer", "user", "assistant")] | None = None
    content: _Texts | None = None
    name: str | None = None  # a participant's, or a function's
    arguments: str = ""
    call_id: str | None = Field(None, min_length=1, max_length=_MOST_ID)
    output: _Texts | None = None
    summary: _Texts = ""
    # Fields of answers, which return in the history of a conversation.
    annotations: NoList = None
    encrypted_content: object = None
    id: object = None
    reasoning_content: NoText = None
    refusal: NoText = None
    status: object = None
    tool_calls: NoList = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        self.check_fields(_NEEDED[self.type])
        return self

    @property
    def message(self) -> Message:
        """The message; an item of an assistant is a part of one."""
        match self.type:
            case "function_call":
                call = ToolCall(self.call_id or "", self.name or "", self.arguments)
                return Message(role="assistant", content=None, tool_calls=(call,))
            case "function_call_output":
                return Message(role="tool", content=self.output, tool_call_id=self.call_id or "")
            case "reasoning":
                thought = self.content or self.summary
                text = thought if isinstance(thought, str) else "\n\n".join(thought)
                return Message(role="assistant", content=None, reasoning=text)
            case _:
                return Message(
                    role=cast("Role", self.role), content=self.content, name=self.name or ""
                )


def _merged(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Put the items of one answer together: reasoning, then what was said, then calls.

    Cost: linear; a body may have thousands of calls in a row.
    """
    runs: list[list[Message]] = []
    for message in messages:
        if runs and _goes_on(runs[-1], message):
            runs[-1].append(message)
        else:
            runs.append([message])
    return tuple(it for it in map(_one, runs) if not _says_nothing(it))


def _one(run: Sequence[Message]) -> Message:
    """Make one message of the items of an answer."""
    if len(run) == 1:
        return run[0]
    return Message(
        role="assistant",
        content=next((it.content for it in run if it.content is not None), None),
        name=next((it.name for it in run if it.name), ""),
        reasoning=next((it.reasoning for it in run if it.reasoning), ""),
        tool_calls=tuple(chain.from_iterable(it.tool_calls for it in run)),
    )


def _goes_on(run: Sequence[Message], message: Message) -> bool:
    """Whether an item belongs to the same answer as the items before it."""
    first = run[0]
    if first.role != "assistant" or message.role != "assistant":
        return False
    if message.tool_calls:
        return True
    is_thought_alone = len(run) == 1 and first.content is None and not first.tool_calls
    return message.content is not None and is_thought_alone


def _says_nothing(message: Message) -> bool:
    """Whether a message is what is left of reasoning that nobody can read."""
    return (
        message.role == "assistant"
        and message.content is None
        and not message.reasoning
        and not message.tool_calls
    )


class _Tool(Function):
    """A tool that is a function."""

    type: str


class _Reasoning(Fields):
    """How the model thinks before it answers."""

    effort: Effort | None = None
    summary: object = None
    generate_summary: object = None  # the older name


class _Text(Fields):
    """How the answer's text looks."""

    format: TextFormat = None


class ResponseBody(AnyRequest):
    """POST /v1/responses."""

    input: Annotated[
        list[Annotated[InputItem, known_kind(_NEEDED, thing="an item")]],
        BeforeValidator(_items),
        Field(min_length=1),
        AfterValidator(_says_something),
    ]
    instructions: str = ""
    max_output_tokens: int | None = Field(None, ge=1, le=MOST_UINT32)
    reasoning: _Reasoning = _Reasoning()
    text: _Text = _Text()
    thinking_token_budget: int | None = Field(None, ge=0, le=MOST_UINT32)  # vLLM's
    tools: Annotated[
        list[Annotated[_Tool, tool_kind("function")]],
        Field(max_length=MOST_TOOLS),
        AfterValidator(check_names),
    ] = Field(default_factory=list)
    tool_choice: Choice = ToolChoice()
    parallel_tool_calls: bool = True
    include: list[str] = Field(default_factory=list, max_length=_MOST_INCLUDED)
    truncation: Annotated[object, only("disabled")] = None
    background: FalseOnly = None
    stream_options: Annotated[object, only({}, {"include_obfuscation": False})] = None
    store: Annotated[object, PlainValidator(_not_stored)] = None
    previous_response_id: _Never = None

    _is_among_the_tools = field_validator("tool_choice")(among_tools)

    @property
    def conversation(self) -> Conversation:
        """The conversation, with the instructions in front."""
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        return Conversation(
            messages=(*first, *_merged([it.message for it in self.input])),
            tools=tuple(it.tool for it in self.tools),
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            template_options=with_effort({}, self.reasoning.effort),
            most_thought=self.thinking_token_budget,
        )

    @property
    def grammar(self) -> Grammar | None:
        """What the answer has to follow, if anything."""
        return self.text.format

    def options(self) -> GenerateOptions:
        """Return the options for the client library."""
        options = super().options()
        if self.max_output_tokens is not None:
            options["max_tokens"] = self.max_output_tokens
        if self.grammar is not None:
            options["grammar"] = self.grammar
        return options
