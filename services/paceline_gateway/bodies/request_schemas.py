"""The parameters that several kinds of request have; an unsupported one is refused by name.

A parameter that would change the answer and is not supported may be there with the value that
changes nothing. What only serves the caller's books (user, metadata) is ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

from pydantic import Field, ValidationInfo, create_model, field_validator

from paceline import DrafterKind, GenerateOptions, Grammar, Strategy, VerificationRule
from paceline_contract.limits import (
    MOST_BRANCHES,
    MOST_LOOKAHEAD,
    MOST_TARGETS,
    MOST_TOP_LOGPROBS,
    MOST_WIDTH,
)
from paceline_contract.sampling import SAMPLING_INTERVALS
from paceline_gateway.bodies.fields import Fields, problem
from paceline_gateway.bodies.parameter_types import (
    MOST_UINT32,
    Biases,
    FalseOnly,
    Prediction,
    Stops,
    StructuredOutputs,
    only,
    within,
    word_of,
)
from paceline_gateway.bodies.schema_notes import bare_grammar

if TYPE_CHECKING:
    from collections.abc import Mapping


class PacelineOptions(Fields):
    """Paceline's own parameters: the decoding, and limits that OpenAI does not have."""

    strategy: Annotated[str, word_of(Strategy)] = "auto"
    lookahead: Annotated[int, Field(ge=1, le=MOST_LOOKAHEAD)] | None = None
    targets: Annotated[int, Field(ge=1, le=MOST_TARGETS)] | None = None
    drafter: Annotated[str, word_of(DrafterKind)] | None = None
    width: Annotated[int, Field(ge=1, le=MOST_WIDTH)] | None = None
    branches: Annotated[int, Field(ge=0, le=MOST_BRANCHES)] | None = None
    rule: Annotated[str, word_of(VerificationRule)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MOST_UINT32)] | None = None
    min_p: Annotated[float, within("min_p")] | None = None
    ignore_eos: bool = False


class AnyRequest(Fields):
    """The parameters of all kinds of request."""

    model: str
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-1, lt=1 << 64)  # elsewhere -1 is none
    paceline: PacelineOptions | None = None
    # Ignored: the caller's own books.
    user: object = None
    metadata: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None
    # Allowed with the value that changes nothing.
    service_tier: Annotated[object, only("auto", "default")] = None
    store: FalseOnly = None

    def options(self) -> GenerateOptions:
        """Return the options for the client library, without the prompt's own."""
        # A body has fields of these names, or has them not.
        sampling = {name: getattr(self, name, None) for name in SAMPLING_INTERVALS}
        given = {name: value for name, value in sampling.items() if value is not None}
        options = cast("GenerateOptions", given)
        if self.seed is not None and self.seed >= 0:
            options["seed"] = self.seed % (1 << 53)  # elsewhere seeds have 64 bits
        if self.paceline is not None:
            options.update(cast("GenerateOptions", self.paceline.model_dump(exclude_none=True)))
        return options


class StreamOptions(Fields):
    """The options of a stream."""

    include_usage: bool = False
    include_obfuscation: FalseOnly = None


if TYPE_CHECKING:
    _SamplingNumbers = AnyRequest
else:
    # Under their own names, which are OpenAI's or usual: the numbers that it has not by itself.
    _SamplingNumbers = create_model(
        "_SamplingNumbers",
        __base__=AnyRequest,
        **{
            name: (Annotated[float, within(name)] | None, None)
            for name in SAMPLING_INTERVALS
            if name not in AnyRequest.model_fields
        },
    )


class Body(_SamplingNumbers):
    """The common parameters of completions and chat."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=MOST_UINT32)
    n: int = Field(1, ge=1, le=128)
    stop: Stops = Field(default_factory=list)
    logit_bias: Biases = Field(default_factory=dict)
    # Not OpenAI's, but usual.
    min_tokens: int | None = Field(None, ge=0, le=MOST_UINT32)
    structured_outputs: StructuredOutputs | None = None
    top_k: int | None = Field(None, ge=-1, le=MOST_UINT32)
    # vLLM's, of tokens.
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prediction: Prediction = ""

    @field_validator("stream_options")
    @classmethod
    def _is_of_a_stream(
        cls, value: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if value is not None and value.include_usage and not info.data.get("stream"):
            raise problem("needs `stream: true`")
        return value

    @field_validator("prompt_logprobs")
    @classmethod
    def _is_told_whole(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("stream"):
            raise problem("is not told in a stream")
        return value

    @property
    def default_max_tokens(self) -> int | None:
        """The default of `max_tokens`; None: the orchestrator's default."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether each answer begins with its prompt."""
        return False

    @property
    def echoed_logprobs(self) -> int | None:
        """How many likeliest tokens are told at each position of an echo; None: nothing is told."""
        return None

    def written_prompt(self, index: int) -> str | None:  # noqa: ARG002 - of other bodies
        """Return a prompt that was given as text; None: it was not."""
        return None

    def _token_options(self, *, logprobs: bool) -> GenerateOptions:
        """Return the options about single tokens."""
        options: GenerateOptions = {}
        if self.prompt_logprobs is not None:
            options["prompt_logprobs"] = self.prompt_logprobs
        are_named = logprobs or self.prompt_logprobs is not None
        if are_named and not self.return_tokens_as_token_ids:
            options["include_token_bytes"] = True
        if self.return_token_ids:
            options["include_prompt"] = True
        return options

    @property
    def grammar(self) -> Grammar | None:
        """What the answer has to follow, if anything."""
        return self.structured_outputs

    @property
    def includes_usage(self) -> bool:
        """Whether a stream's last chunk has the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def given_names(self) -> Mapping[str, str]:
        """The names that this request has for parameters, by those that errors have otherwise."""
        return {} if self.structured_outputs is None else {"response_format": "structured_outputs"}

    def options(self) -> GenerateOptions:
        """Return the options for the client library."""
        options = super().options()
        options["stop"] = self.stop
        options["logit_bias"] = self.logit_bias
        if self.prediction:
            options["predicted_text"] = self.prediction
        if self.min_tokens is not None:
            options["min_tokens"] = self.min_tokens
        if (grammar := bare_grammar(self.grammar)) is not None:
            options["grammar"] = grammar
        # Paceline's own name for it comes first.
        if self.top_k is not None:
            options.setdefault("top_k", max(0, self.top_k))  # elsewhere -1 keeps all
        return options
