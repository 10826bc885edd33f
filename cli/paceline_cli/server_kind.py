"""Finds the kind of the server at an address, for an error message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from paceline.channel import open_async_channel
from paceline.v1 import (
    model_service_pb2,
    model_service_pb2_grpc,
    orchestrator_service_pb2,
    orchestrator_service_pb2_grpc,
)
from paceline_cli.connection import tls_of

if TYPE_CHECKING:
    from paceline_local.options import ClientTlsSettings

ROLE_NAMES = {
    model_service_pb2.MODEL_ROLE_DRAFTER: "a drafter",
    model_service_pb2.MODEL_ROLE_TARGET: "a target",
}
_ASK_SECONDS = 5.0


async def kind_of_server(address: str, settings: ClientTlsSettings) -> str:
    """Return "a target", "a drafter", "an orchestrator", or that it is none of these."""
    channel = open_async_channel(address, tls=tls_of(settings), insecure=settings.insecure)
    async with channel:
        models = model_service_pb2_grpc.ModelServiceStub(channel)
        orchestrator = orchestrator_service_pb2_grpc.OrchestratorServiceStub(channel)
        try:
            info = await models.GetModelInfo(
                model_service_pb2.GetModelInfoRequest(), timeout=_ASK_SECONDS
            )
        except grpc.RpcError:
            pass
        else:
            return ROLE_NAMES.get(info.role, "a model server")
        try:
            await orchestrator.GetSystemInfo(
                orchestrator_service_pb2.GetSystemInfoRequest(), timeout=_ASK_SECONDS
            )
        except grpc.RpcError:
            return "a server of another kind"
        return "an orchestrator"
