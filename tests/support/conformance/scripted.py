"""An orchestrator that says what a case's script has it say, byte for byte if need be."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from google.rpc import error_details_pb2, status_pb2

from paceline.status import DETAILS_KEY
from paceline.v1 import orchestrator_service_pb2 as pb
from support.ports import free_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.conformance.relay import Relay

_SERVICE = "paceline.v1.OrchestratorService"
_DETAILS = error_details_pb2.DESCRIPTOR  # known by name to whoever parses an Any


@dataclass
class Call:
    """What the server saw of one call of Generate."""

    request: dict[str, Any]
    arrived_at: float
    peer: str
    number: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    ended_at: float = 0.0
    sent_count: int = 0
    cancelled: bool = False
    ended: bool = False


@dataclass
class ScriptedOrchestrator:
    """Answers the n-th call of Generate by the n-th script, the last one for all that follow.

    Attributes:
        server: A case's `server`; see the vectors' README.
        relay: What can cut the connection, if the case does.
        calls: What came, to this one or to others that share the script.
        number: Which of them it is.
        info_metadata: What came with each call of GetSystemInfo.
    """

    server: dict[str, Any]
    credentials: grpc.ServerCredentials | None = None
    relay: Relay | None = None
    calls: list[Call] = field(default_factory=list)
    number: int = 0
    info_metadata: list[dict[str, str]] = field(default_factory=list)
    address: str = ""
    _server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Serve; after `stop`, on the same port."""
        handlers = {
            "Generate": grpc.unary_stream_rpc_method_handler(self._generate),
            "GetSystemInfo": grpc.unary_unary_rpc_method_handler(self._system_info),
        }
        options = (("grpc.max_receive_message_length", -1),)
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, handlers),)
        )
        self.address = self.address or free_address()
        if self.credentials is None:
            self._server.add_insecure_port(self.address)
        else:
            self._server.add_secure_port(self.address, self.credentials)
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(grace=None)

    async def drain(self) -> None:
        """Say GOAWAY, listen no more and let running calls finish, beside the next orchestrator.

        Return when the old connections are closed: a request that crosses a GOAWAY on its way is
        not every transport's to repeat. The relay leads to the next one before that. Two servers
        that share a port would not do: a client that connects anew at the GOAWAY may get to the one
        that is about to listen no more, and lose the request that it sends there.
        """
        leaving = self._server
        assert leaving is not None
        assert self.relay is not None
        self.address = ""
        await self.start()
        self.relay.upstream = self.address
        await leaving.stop(grace=60)

    def saw(self) -> dict[str, Any]:
        """Return what the vectors can expect to have been seen."""
        pauses = [
            later.arrived_at - earlier.ended_at
            for earlier, later in zip(self.calls, self.calls[1:], strict=False)
        ]
        return {
            "calls": len(self.calls),
            "requests": [call.request for call in self.calls],
            "cancelled": [call.cancelled for call in self.calls],
            "sent": [call.sent_count for call in self.calls],
            "pauses_seconds": pauses,
            "connections": len({call.peer for call in self.calls}),
            "orchestrators": [call.number for call in self.calls],
            "metadata": [call.metadata for call in self.calls],
            "info_metadata": self.info_metadata,
        }

    async def _generate(self, raw: bytes, context: Any) -> None:
        request = pb.GenerateRequest.FromString(raw)
        as_json = MessageToDict(request, preserving_proto_field_name=True)
        call = Call(
            as_json,
            arrived_at=time.monotonic(),
            peer=f"{self.number} {context.peer()}",
            number=self.number,
            metadata=_metadata(context),
        )
        scripts = self.server["script"]
        script = scripts[min(len(self.calls), len(scripts) - 1)]
        self.calls.append(call)
        try:
            for step in script:
                await self._do(step, call=call, context=context)
        except asyncio.CancelledError:
            call.cancelled = True
            raise
        except grpc.aio.BaseError as gone:  # the cancel came while a message was being sent
            call.cancelled = not isinstance(gone, grpc.aio.AbortError)
            raise
        finally:
            call.ended, call.ended_at = True, time.monotonic()

    async def _do(self, step: dict[str, Any], *, call: Call, context: Any) -> None:
        match step:
            case {"hold": True}:
                await asyncio.Event().wait()
            case {"headers": True}:
                await context.send_initial_metadata(())
            case {"cut": True}:
                assert self.relay is not None
                self.relay.end()
                await asyncio.Event().wait()
            case {"status": status}:
                await _abort(context, status, step.get("details_hex"))
            case _:
                for message in _messages(step, call.request):
                    await context.write(message)
                    call.sent_count += 1

    async def _system_info(self, raw: bytes, context: Any) -> bytes:
        pb.GetSystemInfoRequest.FromString(raw)
        self.info_metadata.append(_metadata(context))
        answer = self.server.get("system_info", {})
        if "status" in answer:
            await _abort(context, answer["status"], answer.get("details_hex"))
        if "raw" in answer:
            return bytes.fromhex(answer["raw"])
        return ParseDict(answer, pb.GetSystemInfoResponse()).SerializeToString()


def _metadata(context: Any) -> dict[str, str]:
    """Return what came along; bytes as hexadecimal digits."""
    return {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in context.invocation_metadata()
    }


def _messages(step: dict[str, Any], request: dict[str, Any]) -> Iterator[bytes]:
    """Serialize what a step says: one message, or the many of `chunks`."""
    if "raw" in step:
        yield bytes.fromhex(step["raw"])
    elif "chunks" in step:
        many = step["chunks"]
        resumed = len(request.get("resume_token_ids", ())) if many.get("resumes") else 0
        for position in range(many["from"] + resumed, many["from"] + many["count"]):
            text = f"{position} ".ljust(many.get("text_length", 0), ".")
            chunk = pb.GenerationChunk(position=position, token_ids=[position], text=text)
            yield pb.GenerateResponse(chunk=chunk).SerializeToString()
    else:
        message = ParseDict(step, pb.GenerateResponse())
        yield message.SerializeToString()


async def _abort(context: Any, status: dict[str, Any], details_hex: str | None) -> None:
    code = grpc.StatusCode[status["code"]]
    if details_hex is not None:
        details = bytes.fromhex(details_hex)
    elif "details" in status:
        whole = ParseDict({**status, "code": code.value[0]}, status_pb2.Status())
        details = whole.SerializeToString()
    else:
        details = None
    trailers = () if details is None else ((DETAILS_KEY, details),)
    await context.abort(code, status.get("message", ""), trailers)
