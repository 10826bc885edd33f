"""TargetService: verification, translated between the wire and the host."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from paceline.v1 import model_service_pb2, target_service_pb2, target_service_pb2_grpc
from paceline_model_server import translation
from paceline_model_server.application import ModelRole
from paceline_model_server.servicers import SessionServicer
from paceline_serving.security import peer_name

if TYPE_CHECKING:
    from paceline_engine.calls import PrefixCall, Verdict
    from paceline_model_server.records import CallRecord

__all__ = ["ROLE", "TargetServicer"]


class TargetServicer(SessionServicer, target_service_pb2_grpc.TargetServiceServicer):
    """Judges blocks of draft tokens; the contract is in target_service.proto."""

    open_response = target_service_pb2.TargetServiceOpenSessionResponse
    renew_response = target_service_pb2.TargetServiceRenewSessionResponse
    close_response = target_service_pb2.TargetServiceCloseSessionResponse

    async def Verify(  # noqa: N802 - gRPC's name
        self, request: target_service_pb2.VerifyRequest, context: Any
    ) -> target_service_pb2.VerifyResponse:
        """Judge a block in one forward.

        Cancellation:
            A cancelled call leaves the host's queue, or gives up its forward where it can.
        """
        model, caller = self._host.description, peer_name(context.auth_context())
        call, block, options = translation.verify_request(request, model=model, caller=caller)
        rows = len(call.token_ids) + len(block)
        with self._recorder.record("Verify", call, depth=options.depth, rows=rows) as record:
            verdict = await self._host.verify(call, block, options=options)
        # Counted when the answer is on its way.
        asyncio.get_running_loop().call_soon(self._count, record, call, len(block), verdict)
        return translation.verify_response(call.sequence, verdict)

    def _count(
        self, record: CallRecord, call: PrefixCall, drafted_count: int, verdict: Verdict
    ) -> None:
        phase = "verify" if call.base_length else "prefill"
        self._recorder.count_answer(record, verdict.timing, phase=phase)
        self._recorder.count_verdict(
            record, drafted_count=drafted_count, accepted_count=verdict.accepted_count
        )


ROLE = ModelRole(
    name="target",
    wire=model_service_pb2.MODEL_ROLE_TARGET,
    service="paceline.v1.TargetService",
    servicer=TargetServicer,
    add_servicer=target_service_pb2_grpc.add_TargetServiceServicer_to_server,
)
