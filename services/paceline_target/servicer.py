"""TargetService: verification, translated between the wire and the host."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from paceline.v1 import model_service_pb2, target_service_pb2, target_service_pb2_grpc
from paceline_contract.proposal import NOTHING
from paceline_model_server import translation
from paceline_model_server.application import ModelRole
from paceline_serving.security import peer_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paceline_contract.calls import PrefixCall
    from paceline_contract.proposal import Proposal
    from paceline_engine.sessions.host import ModelHost
    from paceline_engine.terms.calls import Verdict
    from paceline_model_server.records import CallRecord, CallRecorder


class TargetServicer(target_service_pb2_grpc.TargetServiceServicer):
    """Judges proposals, and decodes; the contract is in target_service.proto."""

    def __init__(self, host: ModelHost, recorder: CallRecorder) -> None:
        self._host = host
        self._recorder = recorder

    async def Verify(  # noqa: N802 - gRPC's name
        self, request: target_service_pb2.VerifyRequest, context: Any
    ) -> target_service_pb2.VerifyResponse:
        """Judge a proposal in one forward.

        Cancellation:
            A cancelled call leaves the host's queue, or gives up its forward where it can.
        """
        model, caller = self._host.description, peer_name(context.auth_context())
        call, proposal, options = translation.verify_request(request, model=model, caller=caller)
        rows = len(call.token_ids) + len(proposal)
        with self._recorder.record("Verify", call, depth=options.depth, rows=rows) as record:
            verdict = await self._host.verify(call, proposal, options=options)
        # Counted after the answer is sent.
        judged = NOTHING if options.score else proposal
        asyncio.get_running_loop().call_soon(self._count, record, call, judged, verdict)
        return translation.verify_response(call.sequence, verdict)

    async def Decode(  # noqa: N802 - gRPC's name
        self, request: target_service_pb2.DecodeRequest, context: Any
    ) -> AsyncIterator[target_service_pb2.DecodeResponse]:
        """Stream the next tokens until the window is full, or the text ends.

        Cancellation:
            As of Draft (`paceline_drafter.servicer`).
        """
        call, options = translation.decode_request(
            request, model=self._host.description, caller=peer_name(context.auth_context())
        )
        phase = "decode" if call.base_length else "prefill"
        decoding = self._host.decode(call, options)
        with self._recorder.record("Decode", call, depth=0, rows=0) as record:
            async with aclosing(decoding) as parcels:
                async for decoded in parcels:
                    record.rows += len(decoded.token_ids)
                    self._recorder.count_answer(record, decoded.timing, phase=phase)
                    yield translation.decode_response(call.sequence, decoded)
                    phase = "decode"

    def _count(
        self, record: CallRecord, call: PrefixCall, proposal: Proposal, verdict: Verdict
    ) -> None:
        phase = "verify" if call.base_length else "prefill"
        self._recorder.count_answer(record, verdict.timing, phase=phase)
        self._recorder.count_verdict(
            record,
            drafted_count=len(proposal),
            accepted_count=len(verdict.accepted_path) if len(proposal) else 0,
        )
        if parents := tuple(proposal.parents):
            record.is_tree = True
            record.runners_up = sum(
                parents.index(parents[index]) != index for index in verdict.accepted_path
            )


ROLE = ModelRole(
    name="target",
    wire=model_service_pb2.MODEL_ROLE_TARGET,
    service="paceline.v1.TargetService",
    servicer=TargetServicer,
    add_servicer=target_service_pb2_grpc.add_TargetServiceServicer_to_server,
)
