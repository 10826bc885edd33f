"""The bodies of completions and chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, ValidationInfo, field_validator

from paceline import (
    FillIn,
    GenerateOptions,
    Grammar,
)
from paceline_contract.limits import (
    MOST_TOP_LOGPROBS,
)
from paceline_gateway.bodies.conversation_schemas import (
    ChatMessage,
    Choice,
    PromptEnding,
    TemplateOptions,
    Tools,
    among_tools,
    with_effort,
)
from paceline_gateway.bodies.fields import problem, unsupported
from paceline_gateway.bodies.parameter_types import (
    MOST_UINT32,
    Effort,
    NoList,
    Prompt,
    Prompts,
    ResponseFormat,
    only,
)
from paceline_gateway.bodies.request_schemas import Body, PacelineOptions
from paceline_gateway.conversations.conversation import Conversation, ToolChoice

if TYPE_CHECKING:
    from collections.abc import Mapping


class CompletionPacelineOptions(PacelineOptions):
    """Paceline's own parameters for a prompt that the caller wrote."""

    parse_special_tokens: bool | None = None


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Prompts
    paceline: CompletionPacelineOptions | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    best_of: int | None = None
    max_tokens: int | None = Field(None, ge=0, le=MOST_UINT32)
    suffix: str = ""
    echo: bool = False

    @field_validator("best_of")
    @classmethod
    def _chooses_nothing(cls, value: int | None, info: ValidationInfo) -> int | None:
        count = info.data.get("n", value)  # best_of equal to n selects nothing
        if value not in {None, 1, count}:
            raise unsupported("is not supported; the accepted value is n")
        return value

    @property
    def default_max_tokens(self) -> int:
        """OpenAI's default."""
        return 16

    @field_validator("suffix")
    @classmethod
    def _follows_text(cls, value: str, info: ValidationInfo) -> str:
        prompts = info.data.get("prompt", [])
        if value and not all(isinstance(it, str) for it in prompts):
            raise problem("needs a prompt that is text")
        return value

    @field_validator("echo")
    @classmethod
    def _is_possible(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("suffix"):
            raise problem("needs a prompt without `suffix`")
        return value

    @property
    def given_names(self) -> Mapping[str, str]:
        """The names of this request: with an echo it asks for a prompt's log probabilities, too."""
        names = super().given_names
        return names if self.prompt_logprobs is not None else {**names, "prompt_logprobs": "echo"}

    @property
    def echoes(self) -> bool:
        """Whether each answer begins with its prompt."""
        return self.echo

    @property
    def echoed_logprobs(self) -> int | None:
        """How many likeliest tokens are told at each position of an echo; None: nothing is told."""
        return self.logprobs

    def written_prompt(self, index: int) -> str | None:
        """Return a prompt that was given as text; None: it was not."""
        prompt = self.prompt[index]
        return prompt if isinstance(prompt, str) else None

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, or the gap between the prompt and the suffix."""
        return [
            FillIn(it, self.suffix) if self.suffix and isinstance(it, str) else it
            for it in self.prompt
        ]

    def options(self) -> GenerateOptions:
        """Return the options for the client library."""
        options = super().options()
        if self.max_tokens is not None:
            options["max_tokens"] = self.max_tokens
        options["logprobs"] = self.logprobs is not None
        options["top_logprobs"] = self.logprobs or 0
        options.update(self._token_options(logprobs=self.logprobs is not None))
        if self.echo and (self.logprobs is not None or self.max_tokens == 0):
            options["prompt_logprobs"] = max(self.prompt_logprobs or 0, self.logprobs or 0)
        if self.echo and any(isinstance(it, list) for it in self.prompt):
            options["include_prompt"] = options["include_token_bytes"] = True
        # The author of a whole prompt writes its special tokens, too. Around a gap the tokenizer
        # adds its own, and the texts are a file's.
        options.setdefault("parse_special_tokens", not self.suffix)
        return options


class ChatBody(PromptEnding, Body):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_UINT32)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    functions: NoList = None
    response_format: ResponseFormat = None
    tools: Tools = Field(default_factory=list)
    tool_choice: Choice = ToolChoice()
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict)
    reasoning_effort: Effort | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=MOST_UINT32)  # vLLM's
    modalities: Annotated[object, only(["text"])] = None

    @field_validator("top_logprobs")
    @classmethod
    def _is_beside_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise problem("needs `logprobs: true`")
        return value

    _is_among_the_tools = field_validator("tool_choice")(among_tools)

    @property
    def conversation(self) -> Conversation:
        """The conversation."""
        return Conversation(
            messages=tuple(it.message for it in self.messages),
            tools=tuple(it.tool for it in self.tools),
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            template_options=with_effort(self.chat_template_kwargs, self.reasoning_effort),
            continues_last=self.continues_last,
            opens_answer=self.opens_answer,
            most_thought=self.thinking_token_budget,
        )

    @property
    def given_names(self) -> Mapping[str, str]:
        """The names of this request; of two lengths the newer one counts, and of two formats."""
        names = {} if self.response_format is not None else dict(super().given_names)
        return names | (
            {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        )

    @property
    def grammar(self) -> Grammar | None:
        """What the answer has to follow, if anything."""
        return self.response_format or self.structured_outputs

    def options(self) -> GenerateOptions:
        """Return the options for the client library."""
        options = super().options()
        options["logprobs"] = self.logprobs
        options["top_logprobs"] = self.top_logprobs or 0
        options.update(self._token_options(logprobs=self.logprobs))
        most = self.max_completion_tokens or self.max_tokens
        if most is not None:
            options["max_tokens"] = most
        return options
