"""A generation's options in Python's types, and the wire's request from them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypedDict

from paceline.errors import InvalidFieldError
from paceline.generation import DispatchPolicy, DrafterKind, Strategy, VerificationRule
from paceline.grammar import Grammar
from paceline.prompts import FillIn, Prompt, PromptPart
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb
from paceline.v1 import sampling_pb2

__all__ = [
    "DispatchName",
    "DrafterName",
    "GenerateOptions",
    "Prompt",
    "RuleName",
    "StrategyName",
    "build_request",
    "option_of",
]

# The words for type checkers and editors; the enums take the same words.
StrategyName: TypeAlias = Literal[
    "auto",
    "autoregressive",
    "non-si",
    "speculative",
    "si",
    "distributed",
    "dsi",
    "self_speculative",
    "self",
    "self-si",
]
DrafterName: TypeAlias = Literal["server", "max_gram", "max-gram", "server_and_max_gram", "both"]
RuleName: TypeAlias = Literal["exact", "rejection"]
DispatchName: TypeAlias = Literal["work_conserving", "blocks"]


class GenerateOptions(TypedDict, total=False):
    """All options of a generation. An option that is left out has the server's default.

    Limits are checked by the server, and reported as `InvalidFieldError`.

    Attributes:
        max_tokens: Most tokens to generate. Default 256, or fewer if the context has less room.
        stop: End before the first of these strings.
        temperature: 0 (the default) is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the fewest likeliest tokens whose probabilities add up to this; 1 keeps all.
        min_p: Keep tokens with at least this fraction of the likeliest token's probability.
        logit_bias: Numbers in [-100, 100] to add to the logits of token ids.
        presence_penalty: Taken once from the logit of each token that the answer has already.
        frequency_penalty: Taken from it for each time that the answer has the token.
        repetition_penalty: Makes tokens of prompt and answer less likely if above 1, the default.
        min_tokens: The text does not end by itself before it has so many tokens.
        grammar: What the text has to follow: a JSON schema, a regular expression, or others.
        seed: The same seed gives the same text, with every strategy. Default: a random seed,
            which `started` has.
        strategy: Default AUTO.
        lookahead: Draft tokens in a verification. Default: the planner's choice.
        targets: Most targets to use. Default: the planner's choice.
        drafters: Most drafters to use. Default 1.
        width: Number of tokens that drafters find at a position; with 2 or more, targets judge
            trees, and corrections are found ahead. Default 1; with AUTO the planner's choice.
        branches: Number of runners-up that each drafter forward also extends. Default 0.
        drafter: The drafter. Default: servers, and Max-Gram while there is no drafter server.
        rule: The promise about the output. Default EXACT.
        dispatch: When blocks are sent to targets, and whether SI drafts ahead. Default
            WORK_CONSERVING.
        ignore_eos: Continue after an end-of-text token.
        logprobs: Return each token's log probability.
        top_logprobs: Number of likeliest tokens to return at each position, at most 20.
        prompt_logprobs: Return each prompt token's log probability, and so many of the likeliest
            tokens at its position, at most 20. With it `max_tokens` may be 0.
        include_token_bytes: Return the bytes of each token that is told.
        include_prompt: Return the prompt's tokens, which `prompt_logprobs` also does.
        predicted_text: What the answer will probably be: Max-Gram drafts from it.
        lora: The name of the LoRA adapter to generate with. Default: none, the model alone.
        add_special_tokens: Let the tokenizer add its special tokens to a text prompt. Default true.
        parse_special_tokens: Parse special tokens written in a text prompt, or in the texts around
            a gap; each `PromptPart` has its own. Default false.
        include_timeline: Put every draft and verification into `finished.timeline`.
        stream_timeline: Yield them in `events()` as they happen.
        request_id: A name for logs. Default: chosen.
        resume_token_ids: Tokens of this generation received earlier; needs their seed.
    """

    max_tokens: int
    stop: str | Sequence[str]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logit_bias: Mapping[int, float]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    min_tokens: int
    grammar: Grammar
    seed: int
    strategy: Strategy | StrategyName
    lookahead: int
    targets: int
    drafters: int
    width: int
    branches: int
    drafter: DrafterKind | DrafterName
    rule: VerificationRule | RuleName
    dispatch: DispatchPolicy | DispatchName
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: int
    include_token_bytes: bool
    include_prompt: bool
    predicted_text: str
    lora: str
    add_special_tokens: bool
    parse_special_tokens: bool
    include_timeline: bool
    stream_timeline: bool
    request_id: str
    resume_token_ids: Sequence[int]


_WIRE_NAMES: Final = {
    "targets": "target_count",
    "drafters": "drafter_count",
    "rule": "verification_rule",
    "dispatch": "dispatch_policy",
    "stop": "stop_strings",
}
_OPTIONS: Final = {field: name for name, field in _WIRE_NAMES.items()}
_PROMPTS: Final = frozenset({"text", "token_ids", "parts", "fill_in"})
_LISTS: Final = frozenset({"ids", "stop", "resume_token_ids"})
_SAMPLING: Final = frozenset(
    field.name for field in sampling_pb2.SamplingParameters.DESCRIPTOR.fields
)
_ENUMS: Final = {
    "strategy": (Strategy, orchestrator_pb.Strategy, "STRATEGY_"),
    "drafter": (DrafterKind, orchestrator_pb.DrafterKind, "DRAFTER_KIND_"),
    "rule": (VerificationRule, sampling_pb2.VerificationRule, "VERIFICATION_RULE_"),
    "dispatch": (DispatchPolicy, orchestrator_pb.DispatchPolicy, "DISPATCH_POLICY_"),
}


def build_request(prompt: Prompt, options: GenerateOptions) -> orchestrator_pb.GenerateRequest:
    """Build the wire's request.

    Raises:
        InvalidFieldError: A field cannot hold the value; the server checks all other limits.
        TypeError: There is no option of that name.
    """
    request = orchestrator_pb.GenerateRequest()
    if isinstance(prompt, bytes):  # which would be token ids, byte by byte
        raise InvalidFieldError.of("prompt", "must be text or token ids, not bytes")
    if isinstance(prompt, str):
        _assign(request, "text", prompt)
    elif isinstance(prompt, FillIn):
        request.fill_in.SetInParent()
        _assign(request.fill_in, "prefix", prompt.prefix)
        _assign(request.fill_in, "suffix", prompt.suffix)
    elif isinstance(prompt, Sequence) and isinstance(next(iter(prompt), None), PromptPart):
        _assign_parts(request, prompt)
    else:
        request.token_ids.SetInParent()
        _assign(request.token_ids, "ids", prompt)
    for name, value in options.items():
        if name not in GenerateOptions.__annotations__:
            raise TypeError(f"there is no option {name!r}")
        if value is not None:
            target = request.sampling if name in _SAMPLING else request
            _assign(target, name, value)
    return request


def option_of(field: str) -> str:
    """Return the option that sets a field of the wire; the prompt's fields are `prompt`.

    Args:
        field: As an error names it, such as `sampling.top_k`.
    """
    name = field.removeprefix("sampling.").partition(".")[0].partition("[")[0]
    return "prompt" if name in _PROMPTS else _OPTIONS.get(name, name)


def _assign_parts(request: orchestrator_pb.GenerateRequest, parts: Sequence[object]) -> None:
    for part in parts:
        if not isinstance(part, PromptPart):
            raise InvalidFieldError.of("prompt", "must be parts alone, or token ids alone")
        message = request.parts.parts.add()
        _assign(message, "text", part.text)
        _assign(message, "parse_special_tokens", part.parse_special_tokens)


def _assign(message: Any, name: str, value: object) -> None:
    field = _WIRE_NAMES.get(name, name)
    try:
        if name in _ENUMS:
            value = _enum_number(name, value)
        if name == "stop" and isinstance(value, str):
            value = [value]
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"must be finite, not {value}")
        if name in _LISTS:
            getattr(message, field).extend(value)
        elif name == "logit_bias":
            _assign_biases(message.logit_bias, value)
        elif name == "grammar":
            _assign_grammar(message.grammar, value)
        else:
            setattr(message, field, value)
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise InvalidFieldError.of(name, str(error)) from error


def _assign_grammar(message: sampling_pb2.Grammar, value: object) -> None:
    if not isinstance(value, Grammar):
        raise TypeError(f"must be a Grammar, not {value!r}")
    if value.json_schema is not None:
        schema = value.json_schema
        message.json_schema = schema if isinstance(schema, str) else json.dumps(schema)
    elif value.choices is not None:
        message.choices.texts.extend(value.choices)
    elif value.regex is not None:
        message.regex = value.regex
    elif value.lark is not None:
        message.lark = value.lark


def _assign_biases(biases: Any, value: object) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"must be a mapping of token ids to numbers, not {value!r}")
    for token, bias in value.items():
        if not math.isfinite(bias):
            raise ValueError(f"must be finite, not {bias}")
        biases[token] = bias


def _enum_number(name: str, value: object) -> int:
    words, wire, prefix = _ENUMS[name]
    member = words.accepted().get(value) if isinstance(value, str) else None
    if member is None:
        raise ValueError(f"must be one of {words.told()}, not {value!r}")
    return wire.Value(prefix + member.name)
