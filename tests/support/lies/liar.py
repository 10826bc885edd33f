"""A model server that lies on demand, over gRPC or the tests' own network.

What it is without a lie is a fake of `fake_models` or `virtual_servers`: a liar stands between that
one's handlers and the wire, where it changes bytes, messages and statuses.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from paceline.v1.session_service_pb2 import RenewSessionResponse
from support.fake_models import FakeModelServer
from support.lies.conversation import EndingError, Question
from support.lies.list_of_lies import FieldLie

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from google.protobuf.message import Message

    from support.lies.conversation import ConversationLie

    Lie = FieldLie | ConversationLie

_WORK = ("Verify", "Decode", "Draft")


class Liar:
    """Tells one lie, or none, in all the answers of the servers whose handlers it stands before.

    Attributes:
        lie: The present one.
        told: How often each method was answered with it.
        asked: How often each method was called, since the last `begin`.
    """

    def __init__(self) -> None:
        self.lie: Lie | None = None
        self.told: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self._before: dict[str, bytes] = {}
        self._sequences: dict[str, int] = {}

    def begin(self, lie: Lie | None) -> None:
        """Tell this lie from now on, or the truth."""
        self.lie = lie
        self.told.clear()
        self.asked.clear()

    def before(self, server: Any) -> _Registry:
        """Return what a fake registers its handlers with, instead of a gRPC server or a link."""
        return _Registry(self, server)

    def lying(self, method: str, handler: Any) -> Any:
        """Return a handler that answers as this one does, but for the lie."""
        name = method.rpartition("/")[2]

        async def answer(request: Any, context: Any) -> bytes:
            async with aclosing(self._answers(name, handler, request, context)) as answers:
                async for content in answers:
                    return content
            raise AssertionError("a call with one answer has none")

        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            async with aclosing(self._answers(name, handler, request, context)) as answers:
                async for content in answers:
                    yield content

        make, answering = (
            (grpc.unary_stream_rpc_method_handler, stream)
            if handler.response_streaming
            else (grpc.unary_unary_rpc_method_handler, answer)
        )
        return make(answering, request_deserializer=handler.request_deserializer)

    async def _answers(
        self, name: str, handler: Any, request: Any, context: Any
    ) -> AsyncIterator[bytes]:
        self.asked[name] += 1
        self._note_sequence(request)
        honest = _honest(handler, request, context)
        async with aclosing(honest):
            try:
                async with aclosing(self._told(name, request, honest)) as answers:
                    async for content in answers:
                        yield content
            except EndingError as end:
                await context.abort(end.code, end.text, end.trailers)

    async def _told(
        self, name: str, request: Any, honest: AsyncIterator[Message]
    ) -> AsyncIterator[bytes]:
        lie = self.lie
        if lie is not None and name == "RenewSession" and getattr(lie, "says_it_has_the_call", 0):
            sequence = self._sequences.get(request.session_id, 0)
            yield RenewSessionResponse(live_sequence=sequence).SerializeToString()
        elif lie is not None and lie.method == "RenewSession" and name in _WORK:
            await asyncio.Event().wait()  # only who is late is asked
        elif lie is None or lie.method != name:
            async for answer in honest:
                self._before[name] = answer.SerializeToString()
                yield self._before[name]
        elif isinstance(lie, FieldLie):
            async for answer in honest:
                self.told[name] += 1
                yield lie.distort(answer)
        else:
            self.told[name] += 1
            asked = Question(request, honest, self._before.get(name, b""))
            async with aclosing(lie.tell(asked)) as answers:
                async for content in answers:
                    yield content

    def _note_sequence(self, request: Any) -> None:
        call = getattr(request, "call", None)
        if call is not None:
            self._sequences[call.session_id] = call.sequence


@dataclass
class LyingModelServer(FakeModelServer):
    """A fake model server on a socket that a liar stands before."""

    liar: Liar = field(default_factory=Liar)

    def register(self, server: Any) -> None:
        """Add its services, with the liar before them."""
        super().register(self.liar.before(server))


class _Registry:
    """Stands for a gRPC server, or a link, where generated code adds handlers."""

    def __init__(self, liar: Liar, server: Any) -> None:
        self._liar = liar
        self._server = server

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        lying = {name: self._liar.lying(name, it) for name, it in handlers.items()}
        self._server.add_registered_method_handlers(service, lying)
        generic = grpc.method_handlers_generic_handler(service, lying)
        self._server.add_generic_rpc_handlers((generic,))

    def add_generic_rpc_handlers(self, _handlers: object) -> None:
        """Nothing: the registered ones are added in both forms."""


async def _honest(handler: Any, request: Any, context: Any) -> AsyncIterator[Message]:
    if not handler.response_streaming:
        yield await handler.unary_unary(request, context)
        return
    async with aclosing(handler.unary_stream(request, context)) as answers:
        async for answer in answers:
            yield answer
