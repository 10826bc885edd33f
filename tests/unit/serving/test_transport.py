"""Connections: over a line that is no quiet machine's loopback, and as long as calls need them."""

from __future__ import annotations

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import orchestrator_service_pb2_grpc as pb_grpc
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_serving.transport import pod_channel
from support.connection_relay import ConnectionRelay
from support.fake_orchestrator import FakeOrchestrator, serving
from support.orchestrating import new_orchestrator

ROUND_TRIP_SECONDS = 0.6


async def test_a_server_is_reached_over_a_round_trip_of_600_ms():
    async with serving(FakeOrchestrator()) as fake, ConnectionRelay(fake.address) as relay:
        relay.delay(round_trip_seconds=ROUND_TRIP_SECONDS)
        channel = pod_channel(relay.address, credentials=None)
        try:
            stub = pb_grpc.OrchestratorServiceStub(channel)
            info = await stub.GetSystemInfo(pb.GetSystemInfoRequest(), timeout=30)
        finally:
            await channel.close()
    assert info.model_name == "fake"


async def test_an_orchestrators_connection_that_grew_old_lasts_as_long_as_a_call_may_take():
    settings = OrchestratorSettings(targets=("localhost:1",), call_limit_seconds=3600)
    _, application = new_orchestrator(settings)
    assert dict(application.options)["grpc.max_connection_age_grace_ms"] == 3_600_000
