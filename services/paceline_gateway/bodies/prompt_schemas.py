"""The schemas of requests with one text or conversation: the page's stream, and tokenizing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

from pydantic import (
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from paceline_gateway.bodies.conversation_schemas import (
    ChatMessage,
    PromptEnding,
    TemplateOptions,
    Tools,
)
from paceline_gateway.bodies.fields import Fields, problem
from paceline_gateway.bodies.parameter_types import (
    MOST_UINT32,
    Content,
    NoList,
    NoText,
    one_of,
    only,
)
from paceline_gateway.bodies.request_schemas import AnyRequest
from paceline_gateway.conversations.conversation import Conversation, Message, Role

if TYPE_CHECKING:
    from paceline import GenerateOptions


class TextMessage(Fields):
    """A message of a conversation: a text, or the texts of parts."""

    role: Annotated[str, one_of("system", "developer", "user", "assistant")]
    content: Content
    name: object = None  # a participant's name, for templates that use it
    # Fields of answers, which return in the history of a conversation.
    annotations: NoList = None
    reasoning_content: NoText = None
    refusal: NoText = None
    tool_calls: NoList = None

    @property
    def message(self) -> Message:
        """The message."""
        return Message(
            role=cast("Role", self.role),
            content=self.content,
            name=self.name if isinstance(self.name, str) else "",
        )


def _there_without_prompt(value: list[Fields], info: ValidationInfo) -> list[Fields]:
    if bool(value) == (info.data.get("prompt") is not None):
        raise problem("needed without `prompt`, and only without it")
    return value


class LiveBody(AnyRequest):
    """POST /paceline/generate: one text or conversation, as a stream with its timeline's events."""

    prompt: str | None = None
    messages: list[TextMessage] = Field(default_factory=list, validate_default=True)
    max_tokens: int | None = Field(None, ge=1, le=MOST_UINT32)
    stream: Annotated[bool, only(True)] = True

    _are_there = field_validator("messages")(_there_without_prompt)

    @property
    def conversation(self) -> Conversation:
        """The conversation, where there is no prompt."""
        return Conversation(messages=tuple(it.message for it in self.messages))

    def options(self) -> GenerateOptions:
        """Return the options for the client library."""
        options = super().options()
        options["stream_timeline"] = True
        if self.max_tokens is not None:
            options["max_tokens"] = self.max_tokens
        return options


class _TokenizedText(Fields):
    """A text whose tokens are asked for, and the model."""

    model: str | None = None
    prompt: str | None = None


class TokenizeBody(PromptEnding, _TokenizedText):
    """POST /tokenize: a text or a conversation, in vLLM's form."""

    messages: list[ChatMessage] = Field(default_factory=list, validate_default=True)
    tools: Tools = Field(default_factory=list)
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    _are_there = field_validator("messages")(_there_without_prompt)

    @property
    def conversation(self) -> Conversation:
        """The conversation, where there is no prompt."""
        return Conversation(
            messages=tuple(it.message for it in self.messages),
            tools=tuple(it.tool for it in self.tools),
            template_options=self.chat_template_kwargs,
            continues_last=self.continues_last,
            opens_answer=self.opens_answer,
        )


def _one_by_one(value: object, handler: ValidatorFunctionWrapHandler) -> list[int]:
    """Look at each by itself: the library lets no other thread run until it has seen all."""
    if isinstance(value, list) and all(type(it) is int and 0 <= it <= MOST_UINT32 for it in value):
        return value
    return cast("list[int]", handler(value))  # names the fault


class DetokenizeBody(Fields):
    """POST /detokenize, in vLLM's form."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=MOST_UINT32)]], WrapValidator(_one_by_one)]
