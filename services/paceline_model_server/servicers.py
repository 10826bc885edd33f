"""The services that drafters and targets share: the model's description, and sessions."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from paceline.errors import DrainingError, UnsupportedError
from paceline.v1 import (
    model_service_pb2,
    model_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
)
from paceline_model_server import translation
from paceline_serving.security import peer_name
from paceline_serving.version import VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paceline_engine.sessions.host import ModelHost

_log = logging.getLogger(__name__)

_TOKENIZER_CHUNK_BYTES = 256 * 1024


class ModelServicer(model_service_pb2_grpc.ModelServiceServicer):
    """Describes the model, and has its tokenizer; the contract is in model_service.proto."""

    def __init__(self, host: ModelHost, *, role: model_service_pb2.ModelRole.ValueType) -> None:
        self._host = host
        self._role = role

    async def GetModelInfo(  # noqa: N802 - gRPC's names
        self, _request: model_service_pb2.GetModelInfoRequest, _context: Any
    ) -> model_service_pb2.GetModelInfoResponse:
        """Describe the model, with its measured latencies."""
        host = self._host
        info = translation.model_info(host.description, latencies=host.latencies())
        info.role = self._role
        info.session_limit = host.limits.session_limit
        info.token_budget = host.limits.token_budget
        info.incarnation = host.incarnation
        info.version = VERSION
        info.exchanges_calls = True
        return info

    async def GetTokenizer(  # noqa: N802
        self, _request: model_service_pb2.GetTokenizerRequest, _context: Any
    ) -> AsyncIterator[model_service_pb2.GetTokenizerResponse]:
        """Stream the tokenizer's bytes; the first chunk names them."""
        content = self._host.tokenizer_bytes()
        if content is None:
            raise UnsupportedError("this model has no tokenizer: send token ids")
        for start in range(0, len(content), _TOKENIZER_CHUNK_BYTES):
            chunk = model_service_pb2.GetTokenizerResponse(
                data=content[start : start + _TOKENIZER_CHUNK_BYTES]
            )
            if start == 0:
                chunk.tokenizer_fingerprint = self._host.description.tokenizer_fingerprint
                chunk.total_bytes = len(content)
            yield chunk

    async def GetChatTemplate(  # noqa: N802
        self, _request: model_service_pb2.GetChatTemplateRequest, _context: Any
    ) -> model_service_pb2.GetChatTemplateResponse:
        """Return the model's chat template."""
        template = self._host.chat_template()
        if template is None:
            raise UnsupportedError("this model has no chat template: it continues text")
        return model_service_pb2.GetChatTemplateResponse(
            chat_template=translation.chat_template(template)
        )


class SessionServicer(session_service_pb2_grpc.SessionServiceServicer):
    """Keeps sessions; the contract is in session_service.proto.

    Attributes:
        draining: Whether new sessions are refused; the calls of open ones go on.
    """

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self.draining = False

    async def OpenSession(  # noqa: N802
        self, request: session_service_pb2.OpenSessionRequest, context: Any
    ) -> session_service_pb2.OpenSessionResponse:
        """Reserve memory for a session and name it."""
        if self.draining:
            raise DrainingError("this server is shutting down")
        spec = translation.session_spec(
            request.spec, model=self._host.description, owner=peer_name(context.auth_context())
        )
        await self._host.prepare_session(spec)
        grant = self._host.open_session(spec)
        _log.debug(
            "session opened",
            extra={"request_id": spec.request_id, "reserve_length": spec.reserve_length},
        )
        return session_service_pb2.OpenSessionResponse(grant=translation.session_grant(grant))

    async def RenewSession(  # noqa: N802
        self, request: session_service_pb2.RenewSessionRequest, context: Any
    ) -> session_service_pb2.RenewSessionResponse:
        """Renew a session's lease, and return which of its calls is live."""
        caller = peer_name(context.auth_context())
        lease_seconds = self._host.renew_session(request.session_id, caller=caller)
        return session_service_pb2.RenewSessionResponse(
            lease=translation.duration(lease_seconds),
            live_sequence=self._host.live_sequence(request.session_id, caller=caller) or 0,
        )

    async def CloseSession(  # noqa: N802
        self, request: session_service_pb2.CloseSessionRequest, context: Any
    ) -> session_service_pb2.CloseSessionResponse:
        """End a session and free its memory."""
        caller = peer_name(context.auth_context())
        self._host.close_session(request.session_id, caller=caller)
        return session_service_pb2.CloseSessionResponse()
