"""Drafters and targets in this process, behind real gRPC with the whole interceptor chain."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from paceline.errors import PacelineError
from paceline.status import decode
from paceline.v1 import (
    drafter_service_pb2,
    drafter_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    proposal_pb2,
    sampling_pb2,
    session_service_pb2,
    session_service_pb2_grpc,
    target_service_pb2,
    target_service_pb2_grpc,
)
from paceline_drafter.servicer import ROLE as DRAFTER
from paceline_model_server.application import ModelApplication
from paceline_serving.exchanging_channel import ExchangingChannel
from paceline_serving.interceptors import TracedChannel
from paceline_serving.lifecycle import ServerProcess
from paceline_serving.server_settings import ServerSettings
from paceline_serving.telemetry import new_registry
from paceline_serving.transport import POD_CHANNEL_OPTIONS
from paceline_target.servicer import ROLE as TARGET
from support.ports import free_address
from support.prefix_digest import prefix_digest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from paceline_engine.sessions.host import ModelHost

__all__ = ["DRAFTER", "TARGET", "ModelClient", "decoded", "serving"]

_TIMEOUT_SECONDS = 60.0


@asynccontextmanager
async def serving(
    role: Any,
    host: ModelHost,
    *,
    begin: bool = True,
    hang_limit_seconds: float | None = None,
    **settings: Any,
) -> AsyncIterator[ServerProcess]:
    """Run a model server in this process; with `begin=False` the caller begins it."""
    registry = new_registry()
    process = ServerProcess(
        lambda process: ModelApplication(
            role,
            host,
            process=process,
            registry=registry,
            hang_limit_seconds=hang_limit_seconds,
            debug_calls=True,
            look_seconds=0.01,
        ),
        ServerSettings.model_validate({"listen": free_address(), **settings}),
        registry=registry,
    )
    if begin:
        await process.begin()
    try:
        yield process
    finally:
        await process.finish(drain=False)


@contextmanager
def decoded() -> Iterator[None]:
    """Raise what a server raised."""
    try:
        yield
    except grpc.RpcError as error:
        raise decode(error) from None


def _patient_channel(address: str, credentials: Any) -> grpc.aio.Channel:
    """Open a channel as orchestrators do, that takes no busy machine for a frozen server."""
    options = [
        *POD_CHANNEL_OPTIONS,
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),
        # Else it may share a connection that failed to a server which had this port before.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials, options)


class ModelClient:
    """Calls of one drafter or target, with everything valid unless said otherwise.

    Attributes:
        info: What the server said of itself.
        opened: Every session that was opened.
        host: The server's model, where that is within reach.
    """

    def __init__(
        self, role: Any, address: str, *, credentials: Any = None, by_messages: bool = False
    ) -> None:
        self.channel: Any = _patient_channel(address, credentials)
        if by_messages:
            self.channel = ExchangingChannel(TracedChannel(self.channel))
            self.channel.exchanges = True
        self.model = model_service_pb2_grpc.ModelServiceStub(self.channel)
        self.sessions = session_service_pb2_grpc.SessionServiceStub(self.channel)
        stub = (
            drafter_service_pb2_grpc.DrafterServiceStub
            if role is DRAFTER
            else target_service_pb2_grpc.TargetServiceStub
        )
        self.stub: Any = stub(self.channel)
        self.info = model_service_pb2.GetModelInfoResponse()
        self.opened: list[str] = []
        self.host: ModelHost | None = None

    async def learn(self) -> ModelClient:
        with decoded():
            self.info = await self.model.GetModelInfo(
                model_service_pb2.GetModelInfoRequest(), timeout=_TIMEOUT_SECONDS
            )
        return self

    def spec(self, **spec: Any) -> session_service_pb2.SessionSpec:
        defaults = {
            "expected_model_fingerprint": self.info.fingerprint,
            "reserve_length": 64,
            "request_id": "request-1",
        }
        return session_service_pb2.SessionSpec(**{**defaults, **spec})

    async def open_with(
        self, spec: session_service_pb2.SessionSpec
    ) -> session_service_pb2.SessionGrant:
        request = session_service_pb2.OpenSessionRequest(spec=spec)
        with decoded():
            answer = await self.sessions.OpenSession(request, timeout=_TIMEOUT_SECONDS)
        self.opened.append(answer.grant.session_id)
        grant: session_service_pb2.SessionGrant = answer.grant
        return grant

    async def open(self, **spec: Any) -> str:
        return (await self.open_with(self.spec(**spec))).session_id

    async def renew(self, session_id: str) -> float:
        request = session_service_pb2.RenewSessionRequest(session_id=session_id)
        with decoded():
            answer = await self.sessions.RenewSession(request, timeout=_TIMEOUT_SECONDS)
        return answer.lease.ToTimedelta().total_seconds()

    async def close(self, session_id: str) -> None:
        request = session_service_pb2.CloseSessionRequest(session_id=session_id)
        with decoded():
            await self.sessions.CloseSession(request, timeout=_TIMEOUT_SECONDS)

    def call(
        self, session_id: str, sequence: int, *, held: Sequence[int] = (), new: Sequence[int] = ()
    ) -> session_service_pb2.SessionCall:
        return session_service_pb2.SessionCall(
            session_id=session_id,
            sequence=sequence,
            base_length=len(held),
            base_digest=prefix_digest(held) if held else b"",
            token_ids=new,
            expected_model_fingerprint=self.info.fingerprint,
        )

    async def verify(
        self,
        call: session_service_pb2.SessionCall,
        token_ids: Sequence[int] = (),
        *,
        parents: Sequence[int] = (),
        distributions: Sequence[sampling_pb2.SparseDistribution] = (),
        **fields: Any,
    ) -> target_service_pb2.VerifyResponse:
        proposal = proposal_pb2.Proposal(
            token_ids=token_ids, parents=parents, distributions=distributions
        )
        request = target_service_pb2.VerifyRequest(call=call, proposal=proposal, **fields)
        return await self.verify_with(request)

    async def verify_with(self, request: Any) -> target_service_pb2.VerifyResponse:
        with decoded():
            answer: Any = await self.stub.Verify(request, timeout=_TIMEOUT_SECONDS)
        return answer

    async def decode(
        self, call: session_service_pb2.SessionCall, max_tokens: int, **fields: Any
    ) -> list[target_service_pb2.DecodeResponse]:
        request = target_service_pb2.DecodeRequest(call=call, max_tokens=max_tokens, **fields)
        return await self.decode_with(request)

    async def decode_with(self, request: Any) -> list[target_service_pb2.DecodeResponse]:
        with decoded():
            return [each async for each in self.stub.Decode(request, timeout=_TIMEOUT_SECONDS)]

    async def draft(
        self, call: session_service_pb2.SessionCall, max_tokens: int, **fields: Any
    ) -> list[drafter_service_pb2.DraftResponse]:
        request = drafter_service_pb2.DraftRequest(call=call, max_tokens=max_tokens, **fields)
        return await self.draft_with(request)

    async def draft_with(self, request: Any) -> list[drafter_service_pb2.DraftResponse]:
        with decoded():
            return [each async for each in self.stub.Draft(request, timeout=_TIMEOUT_SECONDS)]

    async def error_of(self, call: Any) -> PacelineError:
        """Await what has to fail, and return the error."""
        try:
            await call
        except PacelineError as error:
            return error
        raise AssertionError("it succeeded")
