"""DrafterService: drafting, translated between the wire and the host."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from paceline.v1 import drafter_service_pb2, drafter_service_pb2_grpc, model_service_pb2
from paceline_model_server import translation
from paceline_model_server.application import ModelRole
from paceline_serving.security import peer_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paceline_engine.sessions.host import ModelHost
    from paceline_model_server.records import CallRecorder


class DrafterServicer(drafter_service_pb2_grpc.DrafterServiceServicer):
    """Drafts tokens; the contract is in drafter_service.proto."""

    def __init__(self, host: ModelHost, recorder: CallRecorder) -> None:
        self._host = host
        self._recorder = recorder

    async def Draft(  # noqa: N802 - gRPC's name
        self, request: drafter_service_pb2.DraftRequest, context: Any
    ) -> AsyncIterator[drafter_service_pb2.DraftResponse]:
        """Stream the next tokens until the window is full.

        Cancellation:
            It arrives as CancelledError, or as GeneratorExit at the `yield`; either way the host's
            generator is closed before this one is.
        """
        call, options = translation.draft_request(
            request, model=self._host.description, caller=peer_name(context.auth_context())
        )
        phase = "draft" if call.base_length else "prefill"
        drafting = self._host.draft(call, options)
        with self._recorder.record("Draft", call, depth=0, rows=0) as record:
            async with aclosing(drafting) as chunks:
                async for drafted in chunks:
                    record.rows += len(drafted.proposal)
                    self._recorder.count_answer(record, drafted.timing, phase=phase)
                    yield translation.draft_response(call.sequence, drafted)
                    phase = "draft"


ROLE = ModelRole(
    name="drafter",
    wire=model_service_pb2.MODEL_ROLE_DRAFTER,
    service="paceline.v1.DrafterService",
    servicer=DrafterServicer,
    add_servicer=drafter_service_pb2_grpc.add_DrafterServiceServicer_to_server,
)
