"""The channel to a model server, over a line that is no quiet machine's loopback."""

from __future__ import annotations

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import orchestrator_service_pb2_grpc as pb_grpc
from paceline_serving.transport import pod_channel
from support.conformance.relay import Relay
from support.fake_orchestrator import FakeOrchestrator, serving

HALF_A_ROUND_TRIP_SECONDS = 0.3


async def test_a_server_is_reached_over_a_round_trip_of_600_ms():
    relay = Relay(delay_seconds=HALF_A_ROUND_TRIP_SECONDS)
    async with serving(FakeOrchestrator()) as fake:
        await relay.start(fake.address)
        channel = pod_channel(relay.address, credentials=None)
        try:
            stub = pb_grpc.OrchestratorServiceStub(channel)
            info = await stub.GetSystemInfo(pb.GetSystemInfoRequest(), timeout=30)
        finally:
            await channel.close()
            await relay.stop()
    assert info.model_name == "fake"
