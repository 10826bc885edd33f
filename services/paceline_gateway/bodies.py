"""The bodies of requests, checked: what is not supported is refused by its name.

A parameter that would change the answer and is not supported may be there with the value that
changes nothing. What only serves the caller's books (user, metadata) is ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from paceline import DrafterKind, GenerateOptions, Strategy, VerificationRule
from paceline.limits import (
    MOST_BRANCHES,
    MOST_LOOKAHEAD,
    MOST_TARGETS,
    MOST_TOP_LOGPROBS,
    MOST_WIDTH,
)
from paceline_gateway.errors import RequestError

__all__ = [
    "Body",
    "ChatBody",
    "CompletionBody",
    "Extension",
    "InputItem",
    "LiveBody",
    "Message",
    "Prompt",
    "ResponseBody",
    "StreamOptions",
    "parse",
]

Prompt: TypeAlias = str | list[int]

_MOST_UINT32 = (1 << 32) - 1
_STRATEGIES = tuple(it.value for it in Strategy if it is not Strategy.UNKNOWN)
_DRAFTERS = tuple(it.value for it in DrafterKind if it is not DrafterKind.UNKNOWN)
_RULES = tuple(it.value for it in VerificationRule if it is not VerificationRule.UNKNOWN)


def _only(*allowed: object) -> Any:
    """Make a type of a parameter that may be there with a value that changes nothing."""

    def check(value: object) -> object:
        if not any(type(value) is type(each) and value == each for each in allowed):
            words = ", ".join(map(json.dumps, allowed))
            raise PydanticCustomError(
                "unsupported", "is not supported; what changes nothing is {words}", {"words": words}
            )
        return value

    return Annotated[object, PlainValidator(check)]


def _number_only(allowed: float) -> Any:
    def check(value: float) -> float:
        if value != allowed:
            raise PydanticCustomError(
                "unsupported", "is not supported; what changes nothing is {it}", {"it": allowed}
            )
        return value

    return Annotated[float, AfterValidator(check)]


def _one_of(*words: str) -> Any:
    def check(value: str) -> str:
        if value not in words:
            raise PydanticCustomError(
                "choice", "must be one of {words}", {"words": ", ".join(words)}
            )
        return value

    return Annotated[str, AfterValidator(check)]


def _prompts(value: object) -> list[Prompt]:
    """Take OpenAI's four forms of a prompt as a list of prompts."""
    if _is_prompt(value):
        return [value]  # type: ignore[list-item]
    if isinstance(value, list) and value and all(map(_is_prompt, value)):
        return value
    raise PydanticCustomError(
        "prompt", "must be text, a list of texts, a list of token ids, or a list of those"
    )


def _is_prompt(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(it) is int and 0 <= it <= _MOST_UINT32 for it in value)
    return isinstance(value, str)


def _items(value: object) -> object:
    """Take text as what the user says."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _stop(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(it, str) for it in value):
        return value
    raise PydanticCustomError("stop", "must be text or a list of texts")


def _text(value: object) -> str:
    """Take a message's content, or its parts put together; other parts than text are refused."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be text or a list of parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in {"text", "input_text", "output_text"} or not isinstance(
            part.get("text"), str
        ):
            raise PydanticCustomError("content", "has a part that is not text")
        texts.append(part["text"])
    return "".join(texts)


class _Fields(BaseModel):
    """The base: strict types, no unknown names; null is as good as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: each for name, each in value.items() if each is not None}
        return value


class Extension(_Fields):
    """What Paceline has besides: how to decode, and limits that OpenAI has no name for."""

    strategy: _one_of(*_STRATEGIES) = "auto"  # type: ignore[valid-type]
    lookahead: Annotated[int, Field(ge=1, le=MOST_LOOKAHEAD)] | None = None
    targets: Annotated[int, Field(ge=1, le=MOST_TARGETS)] | None = None
    drafter: _one_of(*_DRAFTERS) | None = None  # type: ignore[valid-type]
    width: Annotated[int, Field(ge=1, le=MOST_WIDTH)] | None = None
    branches: Annotated[int, Field(ge=0, le=MOST_BRANCHES)] | None = None
    rule: _one_of(*_RULES) | None = None  # type: ignore[valid-type]
    top_k: Annotated[int, Field(ge=0, le=_MOST_UINT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    ignore_eos: bool = False


class _Request(_Fields):
    """What all three kinds of request have."""

    model: str
    stream: bool = False
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    paceline: Extension | None = None
    # Ignored: the caller's own books.
    user: object = None
    metadata: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None
    # Allowed as what changes nothing.
    service_tier: _only("auto", "default") = None  # type: ignore[valid-type]
    store: _only(False) = None  # type: ignore[valid-type]

    def options(self) -> GenerateOptions:
        """Return what the client library is told, but for the prompt's own options."""
        options: GenerateOptions = {"temperature": self.temperature, "top_p": self.top_p}
        if self.paceline is not None:
            extension: GenerateOptions = self.paceline.model_dump(exclude_none=True)  # type: ignore[assignment]
            options.update(extension)
        return options


class StreamOptions(_Fields):
    """What a stream has besides text."""

    include_usage: bool = False
    include_obfuscation: _only(False) = None  # type: ignore[valid-type]


class Body(_Request):
    """What completions and chat have in common."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=_MOST_UINT32)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=0, lt=1 << 53)
    stop: Annotated[list[str], PlainValidator(_stop)] = []
    frequency_penalty: _number_only(0) = 0.0  # type: ignore[valid-type]
    presence_penalty: _number_only(0) = 0.0  # type: ignore[valid-type]
    logit_bias: _only({}) = None  # type: ignore[valid-type]

    @field_validator("stream_options")
    @classmethod
    def _is_of_a_stream(
        cls, value: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("choice", "needs `stream: true`")
        return value

    @property
    def includes_usage(self) -> bool:
        """Whether a stream's last chunk tells how many tokens there were."""
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self) -> GenerateOptions:
        """Return what the client library is told."""
        options = super().options()
        options["stop"] = self.stop
        if self.seed is not None:
            options["seed"] = self.seed
        return options


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    best_of: _only(1) = None  # type: ignore[valid-type]
    echo: _only(False) = None  # type: ignore[valid-type]
    suffix: _only("") = None  # type: ignore[valid-type]

    def options(self) -> GenerateOptions:
        """Return what the client library is told; OpenAI's default is 16 tokens."""
        options = super().options()
        options["max_tokens"] = 16 if self.max_tokens is None else self.max_tokens
        options["logprobs"] = self.logprobs is not None
        options["top_logprobs"] = self.logprobs or 0
        return options


class Message(_Fields):
    """What somebody said."""

    role: _one_of("system", "developer", "user", "assistant")  # type: ignore[valid-type]
    content: Annotated[str, PlainValidator(_text)]
    name: object = None  # of a participant; templates have no place for it


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MOST_UINT32)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    response_format: _only({"type": "text"}) = None  # type: ignore[valid-type]
    tools: _only([]) = None  # type: ignore[valid-type]
    tool_choice: _only("none", "auto") = None  # type: ignore[valid-type]
    parallel_tool_calls: _only(True, False) = None  # type: ignore[valid-type]
    modalities: _only(["text"]) = None  # type: ignore[valid-type]

    @field_validator("top_logprobs")
    @classmethod
    def _is_beside_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("choice", "needs `logprobs: true`")
        return value

    def options(self) -> GenerateOptions:
        """Return what the client library is told."""
        options = super().options()
        options["logprobs"] = self.logprobs
        options["top_logprobs"] = self.top_logprobs or 0
        most = self.max_completion_tokens or self.max_tokens
        if most is not None:
            options["max_tokens"] = most
        return options


class InputItem(Message):
    """What somebody said, as the responses interface has it."""

    type: _one_of("message") = "message"  # type: ignore[valid-type]
    id: object = None
    status: object = None


class ResponseBody(_Request):
    """POST /v1/responses: text in, text out."""

    input: Annotated[list[InputItem], BeforeValidator(_items), Field(min_length=1)]
    instructions: str = ""
    max_output_tokens: int | None = Field(None, ge=1, le=_MOST_UINT32)
    seed: int | None = Field(None, ge=0, lt=1 << 53)  # OpenAI has none here
    text: _only({}, {"format": {"type": "text"}}) = None  # type: ignore[valid-type]
    tools: _only([]) = None  # type: ignore[valid-type]
    tool_choice: _only("none", "auto") = None  # type: ignore[valid-type]
    parallel_tool_calls: _only(True, False) = None  # type: ignore[valid-type]
    truncation: _only("disabled") = None  # type: ignore[valid-type]
    background: _only(False) = None  # type: ignore[valid-type]
    include: _only([]) = None  # type: ignore[valid-type]
    stream_options: _only({}, {"include_obfuscation": False}) = None  # type: ignore[valid-type]

    @property
    def messages(self) -> list[Message]:
        """The conversation, with the instructions in front."""
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        return [*first, *self.input]

    def options(self) -> GenerateOptions:
        """Return what the client library is told."""
        options = super().options()
        if self.max_output_tokens is not None:
            options["max_tokens"] = self.max_output_tokens
        if self.seed is not None:
            options["seed"] = self.seed
        return options


class LiveBody(_Request):
    """POST /paceline/generate: one text, continued as a stream with all that happens behind it."""

    prompt: str
    max_tokens: int | None = Field(None, ge=1, le=_MOST_UINT32)
    seed: int | None = Field(None, ge=0, lt=1 << 53)
    stream: _only(True) = True  # type: ignore[valid-type]

    def options(self) -> GenerateOptions:
        """Return what the client library is told."""
        options = super().options()
        options["stream_timeline"] = True
        if self.max_tokens is not None:
            options["max_tokens"] = self.max_tokens
        if self.seed is not None:
            options["seed"] = self.seed
        return options


BodyT = TypeVar("BodyT", bound=BaseModel)


def parse(body_class: type[BodyT], content: bytes) -> BodyT:
    """Read a body.

    Raises:
        RequestError: It is no JSON, or a parameter is wrong, unknown or not supported; names it.
    """
    try:
        value = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    try:
        return body_class.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        param = _path(problem["loc"])
        raise RequestError(
            f"{param}: {_reason(problem['type'], problem['msg'])}"[:1000],
            param=param[:200],
            code="unsupported_parameter" if problem["type"] in _UNSUPPORTED else None,
        ) from None


_UNSUPPORTED: frozenset[str] = frozenset({"unsupported", "extra_forbidden"})


def _reason(kind: str, message: str) -> str:
    reasons = {"missing": "is needed", "extra_forbidden": "is not supported"}
    return reasons.get(kind, message)


def _path(location: tuple[int | str, ...]) -> str:
    """Write where a value is as OpenAI does: messages[0].content."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
