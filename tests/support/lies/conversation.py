"""Lies about a conversation: how many messages there are, when they come, and how a call ends.

A lie takes the honest answers of a call and yields the bytes that go out instead. It may raise
`EndingError`, which is a status that no server of ours would say so.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from paceline.status import DETAILS_KEY
from paceline.v1.error_reason_pb2 import ErrorReason
from paceline.v1.session_service_pb2 import RenewSessionResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from google.protobuf.message import Message

METHODS = {
    "GetModelInfo": False,
    "GetTokenizer": True,
    "GetChatTemplate": False,
    "OpenSession": False,
    "RenewSession": False,
    "CloseSession": False,
    "Draft": True,
    "Verify": False,
    "Decode": True,
    "Watch": True,
}
"""Every method of a model server, and whether its answer is a stream."""

_SOON_SECONDS = 0.001
_LATE_SECONDS = 0.5  # half of the least patience of an orchestrator
_CODES = tuple(code for code in grpc.StatusCode if code is not grpc.StatusCode.OK)
# Trailers have room for 8 KiB.
_LONG_TEXT = "no " * 500


class EndingError(Exception):
    """A call ends with this status."""

    def __init__(self, code: grpc.StatusCode, text: str = "a liar says so", details: bytes = b""):
        super().__init__(code, text)
        self.code = code
        self.text = text
        self.trailers = ((DETAILS_KEY, details),) if details else ()


@dataclass
class Question:
    """What a liar is asked, and what an honest server answers.

    Attributes:
        request: The message.
        answers: The honest answers; asked for, they take their time.
        before: What the liar last answered to this method, honestly.
    """

    request: Any
    answers: AsyncIterator[Message]
    before: bytes = b""


_Tell: TypeAlias = "Callable[[Question], AsyncIterator[bytes]]"


@dataclass(frozen=True, eq=False)
class ConversationLie:
    """One way in which the answer to one method is none, whatever its fields say.

    Attributes:
        method: Such as "Verify".
        kind: What is wrong.
        tell: Answers.
        is_status: Whether it is just another end.
        keeps_the_call: Whether it looks like work that goes on: the server has the call in sight.
        says_it_has_the_call: Whether meanwhile RenewSession says so, for ever.
    """

    method: str
    kind: str
    tell: _Tell
    is_status: bool = False
    keeps_the_call: bool = False
    says_it_has_the_call: bool = False

    def __str__(self) -> str:
        return f"{self.method}: {self.kind}"


@cache
def conversation_lies() -> tuple[ConversationLie, ...]:
    """Return each lie at each method that it fits, always in the same order."""
    lies = [
        ConversationLie(method, kind, tell, keeps_the_call=kind in _KEPT)
        for method, is_stream in METHODS.items()
        for kind, tell in {**_OF_ALL, **(_OF_STREAMS if is_stream else {})}.items()
    ]
    lies += [
        ConversationLie(
            method,
            "no answer, and for ever it has the call",
            _never,
            keeps_the_call=True,
            says_it_has_the_call=True,
        )
        for method in ("Verify", "Decode", "Draft")
    ]
    lies += [
        ConversationLie(
            method,
            kind,
            tell,
            is_status=True,
        )
        for kind, tell in _statuses().items()
        for method in METHODS
    ]
    return tuple(lies)


# --- what is no answer ------------------------------------------------------------------------


async def _never(_asked: Question) -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def _instead(content: bytes, asked: Question) -> AsyncIterator[bytes]:
    async for _ in asked.answers:
        yield content


async def _the_one_before(asked: Question) -> AsyncIterator[bytes]:
    async for answer in asked.answers:
        before, asked.before = asked.before, answer.SerializeToString()
        yield before


async def _hangs_up(asked: Question) -> AsyncIterator[bytes]:
    """End in the middle, without a word."""
    async for answer in asked.answers:
        yield answer.SerializeToString()
        break
    raise EndingError(grpc.StatusCode.UNAVAILABLE, "Socket closed")


async def _late(asked: Question) -> AsyncIterator[bytes]:
    async for answer in asked.answers:
        await asyncio.sleep(_LATE_SECONDS)
        yield answer.SerializeToString()


# Of another call, of another message, of none.
_OF_ALL: dict[str, _Tell] = {
    "no answer": _never,
    "an empty message": partial(_instead, b""),
    "undecodable": partial(_instead, b"\xff\xff\xff\xff"),
    "cut off": partial(_instead, b"\x0a\x7f\x01"),
    "another message": partial(
        _instead, RenewSessionResponse(lease=Duration(seconds=15)).SerializeToString()
    ),
    "the answer before": _the_one_before,
    "late": _late,
    "it hangs up": _hangs_up,
}


# --- streams ----------------------------------------------------------------------------------


async def _ends_at_once(_asked: Question) -> AsyncIterator[bytes]:
    return
    yield b""


async def _one_message_only(asked: Question) -> AsyncIterator[bytes]:
    async for answer in asked.answers:
        yield answer.SerializeToString()
        return


async def _first_left_out(asked: Question) -> AsyncIterator[bytes]:
    is_first = True
    async for answer in asked.answers:
        if not is_first:
            yield answer.SerializeToString()
        is_first = False


async def _each_twice(asked: Question) -> AsyncIterator[bytes]:
    async for answer in asked.answers:
        yield answer.SerializeToString()
        yield answer.SerializeToString()


async def _last_again_and_again(asked: Question) -> AsyncIterator[bytes]:
    content = b""
    async for answer in asked.answers:
        content = answer.SerializeToString()
        yield content
    while True:
        await asyncio.sleep(_SOON_SECONDS)
        yield content


async def _without_end(content: bytes, _asked: Question) -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(_SOON_SECONDS)
        yield content


async def _no_end(asked: Question) -> AsyncIterator[bytes]:
    async for answer in asked.answers:
        yield answer.SerializeToString()
    await asyncio.Event().wait()


async def _stops_after_one(asked: Question) -> AsyncIterator[bytes]:
    async for answer in asked.answers:
        yield answer.SerializeToString()
        break
    await asyncio.Event().wait()


async def _undecodable_second(asked: Question) -> AsyncIterator[bytes]:
    async for answer in asked.answers:
        yield answer.SerializeToString()
        yield b"\xff\xff\xff\xff"


_OF_STREAMS: dict[str, _Tell] = {
    "it ends at once": _ends_at_once,
    "it ends after a message": _one_message_only,
    "its first message is left out": _first_left_out,
    "each message comes twice": _each_twice,
    "its last message comes again and again": _last_again_and_again,
    "empty messages come without end": partial(_without_end, b""),
    "undecodable messages come without end": partial(_without_end, b"\xff\xff\xff\xff"),
    "undecodable from the second message on": _undecodable_second,
    "it never ends": _no_end,
    "nothing comes after a message": _stops_after_one,
}


_KEPT = ("it never ends", "nothing comes after a message")


# --- statuses ---------------------------------------------------------------------------------


async def _ends_with(ending: Callable[[], EndingError], _asked: Question) -> AsyncIterator[bytes]:
    raise ending()
    yield b""


def _statuses() -> dict[str, _Tell]:
    """Return each status with each reason and with each kind of garbage, as lies."""
    reasons = [None, *ErrorReason.keys(), "OF_NO_VERSION"]
    told: dict[str, _Tell] = {}
    for code, reason in product(_CODES, reasons):
        short = (reason or "no reason").removeprefix("ERROR_REASON_")
        details = _details(code, short) if reason else b""
        told[f"{code.name} / {short}"] = _ending(code, details)
    for code, (kind, details) in product(_CODES, _garbage().items()):
        told[f"{code.name} with {kind}"] = _ending(code, details)
    for (reason, code), (kind, wait) in product(_RETRIES.items(), _odd_waits().items()):
        details = _details(code, reason, wait=wait)
        told[f"{reason}, to be asked again after {kind}"] = _ending(code, details)
    for kind, held in _odd_lengths().items():
        details = _details(grpc.StatusCode.OUT_OF_RANGE, "PREFIX_NOT_HELD", held_length=held)
        told[f"PREFIX_NOT_HELD, with {kind}"] = _ending(grpc.StatusCode.OUT_OF_RANGE, details)
    return told


def _ending(code: grpc.StatusCode, details: bytes) -> _Tell:
    return partial(_ends_with, partial(EndingError, code, details=details))


_RETRIES = {
    "OVERLOADED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "CACHE_EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "LOADING": grpc.StatusCode.UNAVAILABLE,
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "NO_TARGET": grpc.StatusCode.UNAVAILABLE,
}


def _details(
    code: grpc.StatusCode, reason: str, *, wait: Duration | None = None, **metadata: str
) -> bytes:
    status = Status(code=code.value[0], message="a liar says so")
    info = ErrorInfo(reason=reason, domain="paceline", metadata=metadata)
    status.details.add().Pack(info)
    if wait is not None:
        status.details.add().Pack(RetryInfo(retry_delay=wait))
    return status.SerializeToString()


def _garbage() -> dict[str, bytes]:
    """Return details that are none."""
    of_no_type = AnyMessage(type_url="type.googleapis.com/no.such.Type", value=b"\xff")
    no_info = AnyMessage(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")
    return {
        "undecodable details": b"\xff\xff\xff\xff",
        "empty details": b"\x00",
        "details of no type": Status(details=[of_no_type]).SerializeToString(),
        "an undecodable reason": Status(code=3, details=[no_info]).SerializeToString(),
        "a long text": Status(code=13, message=_LONG_TEXT).SerializeToString(),
        "a hundred details": Status(details=[no_info] * 100).SerializeToString(),
    }


def _odd_waits() -> dict[str, Duration]:
    return {
        "no time": Duration(),
        "a negative time": Duration(seconds=-5),
        "ten thousand years": Duration(seconds=315_576_000_000),
        "more than a Duration holds": Duration(seconds=(1 << 63) - 1, nanos=(1 << 31) - 1),
        "less than one": Duration(seconds=-(1 << 63), nanos=-(1 << 31)),
    }


def _odd_lengths() -> dict[str, str]:
    return {
        "a negative length": "-1",
        "no number": "many",
        "a huge length": str(1 << 70),
    }
