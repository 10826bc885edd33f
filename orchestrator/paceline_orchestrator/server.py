"""One model server, as the orchestrator knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.v1.drafter_service_pb2_grpc import DrafterServiceStub
from paceline.v1.model_service_pb2_grpc import ModelServiceStub
from paceline.v1.target_service_pb2_grpc import TargetServiceStub
from paceline_orchestrator.latency import LatencyMeter

if TYPE_CHECKING:
    import grpc

    from paceline_orchestrator.discovery import Endpoint, Role
    from paceline_orchestrator.wire import ModelFacts

__all__ = ["ModelServer"]


class ModelServer:
    """How to reach it, what it is, what it costs, how loaded it is, and whether it takes work.

    Attributes:
        facts: What it said of its model; None before it was reached.
        latency: What its calls cost.
        session_count: Sessions that this orchestrator has open there.
        health_status: Empty if the server says that it is well, else why not.
        pause_status: Empty, or why it gets no work for a while, though it may be well.
        pause_count: Pauses so far; the newest one counts.
        failure_count: Failed calls since the last good one.
        told_ready: What the pool's listeners know.
    """

    def __init__(self, endpoint: Endpoint, channel: grpc.aio.Channel) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self.models = ModelServiceStub(channel)
        self.drafter = DrafterServiceStub(channel)
        self.target = TargetServiceStub(channel)
        self.facts: ModelFacts | None = None
        self.latency = LatencyMeter()
        self.session_count = 0
        self.health_status = "NOT_REACHED"
        self.pause_status = ""
        self.pause_count = 0
        self.failure_count = 0
        self.told_ready = False

    @property
    def name(self) -> str:
        """Its name in timelines and logs."""
        return self.endpoint.name

    @property
    def role(self) -> Role:
        """What it is for."""
        return self.endpoint.role

    @property
    def ready(self) -> bool:
        """Whether it takes work now."""
        return not self.status

    @property
    def status(self) -> str:
        """Empty if it is ready, else the reason why not."""
        return self.health_status or self.pause_status

    def adopt(self, facts: ModelFacts) -> None:
        """Take over what it says of itself."""
        self.facts = facts
        self.latency.adopt(
            facts.forward_latencies,
            prefill_fixed_ns=facts.prefill_fixed_ns,
            prefill_ns_per_token=facts.prefill_ns_per_token,
        )
