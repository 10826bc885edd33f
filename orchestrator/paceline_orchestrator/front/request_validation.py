"""What a client asks for, checked before anything reaches a model.

First what can be said of the request by itself, all violations at once; then, with the model known
and the prompt tokenised, whether it fits that model.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from paceline.errors import (
    ContextLengthExceededError,
    FieldViolation,
    InvalidFieldError,
    UnsupportedError,
)
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_contract.limits import (
    MOST_BIAS,
    MOST_BIASED_TOKENS,
    MOST_BRANCHES,
    MOST_DRAFTERS,
    MOST_GRAMMAR_BYTES,
    MOST_LOOKAHEAD,
    MOST_PROMPT_LOGPROBS,
    MOST_TARGETS,
    MOST_TOP_LOGPROBS,
    MOST_WIDTH,
    most_text_bytes,
)
from paceline_contract.names import NAME_RULE, is_name
from paceline_contract.sampling import NEUTRAL_VALUES, SAMPLING_INTERVALS
from paceline_orchestrator.fleet.fitting import unapplied
from paceline_orchestrator.front.prompts import is_prompt_longer
from paceline_serving.wire_format import unknown_field

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_orchestrator.fleet.wire import ModelFacts

_STOP_STRINGS = 64
_STOP_STRING_BYTES = 1024
_SEED_BITS = 53
_DEFAULT_MAX_TOKENS = 256

_EMPTY = "the prompt is empty, and must be one token or more"

_Request = pb.GenerateRequest


def _grammar_bytes(grammar: sampling_pb2.Grammar) -> int:
    """Count the bytes of a grammar's definition; 0 where it has none."""
    kind = grammar.WhichOneof("definition")
    if kind == "choices":
        return sum(len(text.encode()) + 4 for text in grammar.choices.texts)
    return len(getattr(grammar, kind).encode()) if kind else 0


# Field, its limits in words, and whether they hold. An absent field holds its default.
_CHECKS: tuple[tuple[str, str, Callable[[_Request], bool]], ...] = (
    ("prompt", "is required", lambda it: it.WhichOneof("prompt") is not None),
    ("text", _EMPTY, lambda it: not it.HasField("text") or bool(it.text)),
    (
        "parts",
        "must be one part or more, each with a text",
        lambda it: (
            not it.HasField("parts")
            or (bool(it.parts.parts) and all(part.text for part in it.parts.parts))
        ),
    ),
    (
        "token_ids",
        _EMPTY,
        lambda it: not it.HasField("token_ids") or bool(it.token_ids.ids),
    ),
    (
        "max_tokens",
        "must be 1 or more, or with prompt_logprobs 0",
        lambda it: (
            not it.HasField("max_tokens") or it.max_tokens >= 1 or it.HasField("prompt_logprobs")
        ),
    ),
    (
        "stop_strings",
        f"must be at most {_STOP_STRINGS}, each 1 to {_STOP_STRING_BYTES} bytes of UTF-8",
        lambda it: (
            len(it.stop_strings) <= _STOP_STRINGS
            and all(0 < len(text.encode()) <= _STOP_STRING_BYTES for text in it.stop_strings)
        ),
    ),
    *(
        (
            f"sampling.{name}",
            f"must be in {interval}",
            lambda it, name=name, interval=interval: (
                not it.sampling.HasField(name) or getattr(it.sampling, name) in interval
            ),
        )
        for name, interval in SAMPLING_INTERVALS.items()
    ),
    (
        "sampling.logit_bias",
        f"must be at most {MOST_BIASED_TOKENS} tokens, each in [-{MOST_BIAS:g}, {MOST_BIAS:g}]",
        lambda it: (
            len(it.sampling.logit_bias) <= MOST_BIASED_TOKENS
            and all(-MOST_BIAS <= bias <= MOST_BIAS for bias in it.sampling.logit_bias.values())
        ),
    ),
    (
        "sampling.grammar",
        f"must be a definition of 1 to {MOST_GRAMMAR_BYTES} bytes of UTF-8",
        lambda it: (
            not it.sampling.HasField("grammar")
            or 0 < _grammar_bytes(it.sampling.grammar) <= MOST_GRAMMAR_BYTES
        ),
    ),
    (
        "ignore_eos",
        "must be false with a grammar, which says where the text ends",
        lambda it: not (it.ignore_eos and it.sampling.HasField("grammar")),
    ),
    (
        "sampling.min_tokens",
        "must be at most max_tokens",
        lambda it: not it.HasField("max_tokens") or it.sampling.min_tokens <= it.max_tokens,
    ),
    ("seed", f"must be in [0, 2^{_SEED_BITS})", lambda it: it.seed < 2**_SEED_BITS),
    ("strategy", "is unknown", lambda it: it.strategy in pb.Strategy.values()),
    ("drafter", "is unknown", lambda it: it.drafter in pb.DrafterKind.values()),
    *(
        (
            name,
            f"must be in [1, {most}]",
            lambda it, name=name, most=most: (
                not it.HasField(name) or 1 <= getattr(it, name) <= most
            ),
        )
        for name, most in (
            ("lookahead", MOST_LOOKAHEAD),
            ("target_count", MOST_TARGETS),
            ("drafter_count", MOST_DRAFTERS),
            ("width", MOST_WIDTH),
        )
    ),
    *(
        (
            name,
            f"must be in [0, {MOST_TOP_LOGPROBS}]",
            lambda it, name=name: getattr(it, name) <= MOST_TOP_LOGPROBS,
        )
        for name in ("top_logprobs", "prompt_logprobs")
    ),
    ("branches", f"must be in [0, {MOST_BRANCHES}]", lambda it: it.branches <= MOST_BRANCHES),
    ("branches", "needs a width of 2 or more", lambda it: not it.branches or it.width > 1),
    (
        "verification_rule",
        "is unknown",
        lambda it: it.verification_rule in sampling_pb2.VerificationRule.values(),
    ),
    (
        "dispatch_policy",
        "is unknown",
        lambda it: it.dispatch_policy in pb.DispatchPolicy.values(),
    ),
    (
        "resume_token_ids",
        "needs a seed, unless the temperature is 0",
        lambda it: not it.resume_token_ids or it.HasField("seed") or is_greedy(it),
    ),
    ("request_id", f"must be {NAME_RULE}", lambda it: is_name(it.request_id)),
    ("lora", f"must be {NAME_RULE}", lambda it: is_name(it.lora)),
)


def check(request: pb.GenerateRequest) -> None:
    """Check what can be said of a request by itself.

    Raises:
        InvalidFieldError: Names every field that is out of its limits.
    """
    violations = tuple(
        FieldViolation(field, limits) for field, limits, holds in _CHECKS if not holds(request)
    )
    if violations:
        text = "; ".join(f"{it.field}: {it.description}" for it in violations)
        raise InvalidFieldError(text, violations=violations)


def check_abilities(request: pb.GenerateRequest) -> None:
    """Check what no target's word would change: what this version can do at all.

    That is which sampling it knows, and what a verification rule can judge.

    Raises:
        UnsupportedError: No server can do it.
    """
    if unknown := unknown_field(request.sampling):  # servers that know it would heed it
        raise UnsupportedError(f"sampling: this version does not know {unknown}")
    if _is_rejection(request) and request.width > 1 and not is_greedy(request):
        raise UnsupportedError("width: must be 1 under REJECTION, which judges chains only")


def _is_rejection(request: pb.GenerateRequest) -> bool:
    return request.verification_rule == sampling_pb2.VERIFICATION_RULE_REJECTION


def check_lengths(request: pb.GenerateRequest, model: ModelFacts) -> None:
    """Check how long the text is and how many token ids there are, before they are worked on.

    Raises:
        ContextLengthExceededError: More than the model's context has room for.
    """
    most_bytes = most_text_bytes(model.context_length)
    if is_prompt_longer(request, most_bytes):
        raise ContextLengthExceededError.of(
            request.WhichOneof("prompt") or "prompt",
            f"must be at most {most_bytes} bytes of UTF-8 for a context of {model.context_length}"
            " tokens",
        )
    if len(request.predicted_text.encode()) > most_bytes:
        raise InvalidFieldError.of("predicted_text", f"must be at most {most_bytes} bytes of UTF-8")
    for field, count in (
        ("token_ids.ids", len(request.token_ids.ids)),
        ("resume_token_ids", len(request.resume_token_ids)),
    ):
        if count + _needs_room(request) > model.context_length:
            raise ContextLengthExceededError.of(field, _too_long(request, model, count))


def check_tokens(
    request: pb.GenerateRequest, model: ModelFacts, *, prompt: tuple[int, ...]
) -> None:
    """Check that a request with this prompt, tokenised, makes sense to this model.

    Raises:
        InvalidFieldError: A field is out of the model's limits.
        UnsupportedError: The model's servers do not know the verification rule or the sampling, or
            it knows no trees.
    """
    size = model.vocabulary_size
    if not prompt:
        raise InvalidFieldError.of("text", _EMPTY)
    for field, token_ids in (
        ("token_ids.ids", prompt),
        ("resume_token_ids", request.resume_token_ids),
    ):
        if max(token_ids, default=0) >= size:
            raise InvalidFieldError.of(field, f"must be in [0, {size})")
    _check_sampling(request, model)
    _check_scoring(request, model, prompt_length=len(prompt))
    # The last one may be: then only the stream's last message was missed.
    if not (request.ignore_eos or model.eos_token_ids.isdisjoint(request.resume_token_ids[:-1])):
        raise InvalidFieldError.of("resume_token_ids", "must not go on after an end-of-text token")
    if _is_rejection(request) and not model.rejection_sampling:
        raise UnsupportedError("verification_rule: this model's servers know EXACT only")


def _check_sampling(request: pb.GenerateRequest, model: ModelFacts) -> None:
    size = model.vocabulary_size
    if request.sampling.top_k > size:
        raise InvalidFieldError.of("sampling.top_k", f"must be in [0, {size}]")
    if max(request.sampling.logit_bias, default=0) >= size:
        raise InvalidFieldError.of("sampling.logit_bias", f"must be of tokens in [0, {size})")
    used = used_parameters(request)
    if missing := unapplied(used, model, model):
        raise UnsupportedError(_told_unapplied(missing, used, model))


def _told_unapplied(missing: frozenset[str], used: frozenset[str], model: ModelFacts) -> str:
    """Say which of the parameters in use no target applies, at all or together with the others."""
    name, *more = sorted(missing)
    words = f"sampling.{name}: no target of this model applies it"
    if not unapplied(frozenset({name}), model, model):
        words += f" together with {', '.join(sorted(used - missing))}"
    return words + (f", nor {', '.join(more)}" if more else "")


def _check_scoring(request: pb.GenerateRequest, model: ModelFacts, *, prompt_length: int) -> None:
    if not request.HasField("prompt_logprobs"):
        return
    if not model.scores_prompts:
        raise UnsupportedError("prompt_logprobs: this model's servers score no prompts")
    most = MOST_PROMPT_LOGPROBS // prompt_length - 1
    if request.prompt_logprobs > most:
        raise InvalidFieldError.of(
            "prompt_logprobs",
            f"must be at most {most} with a prompt of {prompt_length} tokens"
            if most >= 0
            else f"needs a prompt of at most {MOST_PROMPT_LOGPROBS} tokens",
        )


def allowed_tokens(request: pb.GenerateRequest, model: ModelFacts, *, prompt_length: int) -> int:
    """Return how many tokens a request may generate, resumed ones included.

    Raises:
        ContextLengthExceededError: Prompt and max_tokens, or the resumed tokens, do not fit the
            model's context.
        InvalidFieldError: More tokens are resumed than `max_tokens`.
    """
    room = model.context_length - prompt_length
    if room < _needs_room(request):
        raise ContextLengthExceededError.of("prompt", _too_long(request, model, prompt_length))
    if request.max_tokens > room:
        raise ContextLengthExceededError.of(
            "max_tokens", f"must be in [1, {room}] with this prompt"
        )
    limit = request.max_tokens if request.HasField("max_tokens") else min(_DEFAULT_MAX_TOKENS, room)
    if not request.HasField("max_tokens") and len(request.resume_token_ids) > room:
        raise ContextLengthExceededError.of(
            "resume_token_ids", f"must be at most {room} with this prompt"
        )
    if len(request.resume_token_ids) > limit:
        raise InvalidFieldError.of("resume_token_ids", f"must be at most max_tokens ({limit})")
    if request.sampling.min_tokens > limit:
        raise InvalidFieldError.of("sampling.min_tokens", f"must be at most max_tokens ({limit})")
    return limit


def _needs_room(request: pb.GenerateRequest) -> bool:
    """Whether it needs room for a token of the answer: it may only score its prompt."""
    return not request.HasField("max_tokens") or request.max_tokens > 0


def _too_long(request: pb.GenerateRequest, model: ModelFacts, token_count: int) -> str:
    word = "less than" if _needs_room(request) else "at most"
    return f"must be {word} {model.context_length} tokens, and is {token_count}"


def used_parameters(request: pb.GenerateRequest) -> frozenset[str]:
    """Return the names of the sampling parameters that may change something."""
    given = request.sampling.ListFields()
    return frozenset(it.name for it, value in given if value != NEUTRAL_VALUES[it.name])


def is_greedy(request: pb.GenerateRequest) -> bool:
    """Whether the request asks for the most likely tokens, so that no seed matters."""
    return request.sampling.temperature == 0


def seed_of(request: pb.GenerateRequest) -> int:
    """Return the request's seed, or choose one."""
    return request.seed if request.HasField("seed") else secrets.randbits(_SEED_BITS)
