"""Reads the wire's messages into the client's data."""

from __future__ import annotations

from dataclasses import fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError

from paceline.errors import InternalError
from paceline.generation import (
    ChatTemplate,
    Chunk,
    Finished,
    FinishReason,
    ModelForwards,
    PromptChunk,
    ServerInfo,
    Started,
    Statistics,
    Strategy,
    SystemInfo,
    TimelineEvent,
    TimelineEventKind,
    TokenLogprob,
    TokenOrigin,
    Tokens,
    Usage,
    VerificationRule,
)
from paceline.v1 import model_service_pb2, sampling_pb2
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

_T = TypeVar("_T")
_Record = TypeVar("_Record")
_Word = TypeVar("_Word", bound=StrEnum)
_Message = TypeVar("_Message")
_PART_ITEMS = 1 << 15


def parsed(message: _Message | DecodeError | None) -> _Message:
    """Refuse a message that could not be parsed: grpc.aio logs such a message, and yields None.

    Raises:
        InternalError: The message could not be parsed.
    """
    if message is None or isinstance(message, DecodeError):
        raise InternalError("the server's answer cannot be decoded as the expected message")
    return message


def read_started(message: orchestrator_pb.GenerationStarted) -> Started:
    """Read the first message."""
    return _read(
        Started,
        message,
        strategy=_word(Strategy, orchestrator_pb.Strategy, message.strategy),
        promise=_promise(message.promise),
    )


def read_chunk(message: orchestrator_pb.GenerationChunk) -> Chunk:
    """Read final tokens."""
    origins = (_word(TokenOrigin, orchestrator_pb.TokenOrigin, it) for it in message.origins)
    return _read(
        Chunk,
        message,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(message.logprobs),
        origins=tuple(origins),
        top_logprobs=_likeliest(message.top_logprobs),
        token_bytes=tuple(message.token_bytes),
        text_lengths=tuple(message.text_lengths),
    )


def read_prompt_chunk(message: orchestrator_pb.PromptChunk) -> PromptChunk:
    """Read tokens of the prompt."""
    return _read(
        PromptChunk,
        message,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(message.logprobs),
        top_logprobs=_likeliest(message.top_logprobs),
        token_bytes=tuple(message.token_bytes),
    )


def read_timeline_event(message: orchestrator_pb.TimelineEvent) -> TimelineEvent:
    """Read a timeline event."""
    return _read(
        TimelineEvent,
        message,
        kind=_word(TimelineEventKind, orchestrator_pb.TimelineEventKind, message.kind),
        token_ids=tuple(message.token_ids),
    )


def read_finished(message: orchestrator_pb.GenerationFinished) -> Finished:
    """Read the last message."""
    statistics = message.statistics
    return _read(
        Finished,
        message,
        finish_reason=_word(FinishReason, orchestrator_pb.FinishReason, message.finish_reason),
        promise=_promise(message.promise),
        usage=_read(Usage, message),
        statistics=_read(
            Statistics,
            statistics,
            fallbacks={
                _name_or_number(orchestrator_pb.FallbackKind, it.kind, noun="fallback"): it.count
                for it in statistics.fallbacks
            },
            drafter_models=tuple(_read(ModelForwards, it) for it in statistics.drafter_models),
        ),
        timeline=tuple(read_timeline_event(event) for event in message.timeline),
    )


def read_system_info(message: orchestrator_pb.GetSystemInfoResponse) -> SystemInfo:
    """Read the models and servers of an orchestrator."""
    servers = tuple(
        _read(
            ServerInfo,
            server,
            role=_name_or_number(model_service_pb2.ModelRole, server.role, noun="role"),
            standing=_standing(server.standing),
        )
        for server in message.servers
    )
    defaults = {it.name: value for it, value in message.sampling_defaults.ListFields()}
    return _read(
        SystemInfo,
        message,
        servers=servers,
        sampling_defaults=defaults,
        lora_adapters={it.name: it.fingerprint for it in message.lora_adapters},
    )


def read_tokens(message: orchestrator_pb.TokenizeResponse) -> Tokens:
    """Read the tokens of a text."""
    return Tokens(
        token_ids=tuple(_in_parts(message.token_ids)),
        token_bytes=tuple(_in_parts(message.token_bytes)),
    )


def _in_parts(items: Sequence[_T]) -> Iterator[_T]:
    """Yield items; other threads run meanwhile, also if there are a million."""
    for start in range(0, len(items), _PART_ITEMS):
        yield from items[start : start + _PART_ITEMS]


def read_chat_template(message: orchestrator_pb.GetSystemChatTemplateResponse) -> ChatTemplate:
    """Read the model's chat template."""
    template = message.chat_template
    return _read(
        ChatTemplate,
        template,
        model_fingerprint=message.model_fingerprint,
        named_tokens=dict(template.named_tokens),
        special_tokens=tuple(template.special_tokens),
        added_token_ids=dict(template.added_token_ids),
    )


def _read(record: type[_Record], message: Any, **converted: object) -> _Record:
    """Take each field from `converted`, otherwise from the message's field of the same name."""
    names = [field.name for field in fields(record)]  # type: ignore[arg-type]
    plain = {name: getattr(message, name) for name in names if name not in converted}
    return record(**plain, **converted)


def _likeliest(
    places: Iterable[sampling_pb2.LikeliestTokens],
) -> tuple[tuple[TokenLogprob, ...], ...]:
    return tuple(
        tuple(
            map(TokenLogprob, it.token_ids, it.logprobs, it.token_bytes)
            if it.token_bytes
            else map(TokenLogprob, it.token_ids, it.logprobs)
        )
        for it in places
    )


def _standing(number: int) -> str:
    """Name a server's standing; empty if an older orchestrator does not send it."""
    if not number:
        return ""
    return _name_or_number(orchestrator_pb.ServerStanding, number, noun="standing")


def _promise(number: int) -> VerificationRule:
    return _word(VerificationRule, sampling_pb2.VerificationRule, number)


def _word(words: type[_Word], wire: _EnumTypeWrapper[Any], number: int) -> _Word:
    """Find the word for a number of the wire; UNKNOWN if this client has none."""
    return words.__members__.get(_name(wire, number), words["UNKNOWN"])


def _name_or_number(wire: _EnumTypeWrapper[Any], number: int, *, noun: str) -> str:
    """Name a number of the wire in small letters; "role 12" if this client has no name for it."""
    return _name(wire, number).lower() or f"{noun} {number}"


def _name(wire: _EnumTypeWrapper[Any], number: int) -> str:
    """Find a number's name without its prefix; empty for 0, and if this client knows none."""
    value = wire.DESCRIPTOR.values_by_number.get(number) if number else None
    prefix = wire.DESCRIPTOR.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return value.name.removeprefix(prefix) if value else ""
