"""KEDA's external scaler: how many verifiers are wanted, over gRPC.

By the same service orchestrators ask one another, so that each can answer for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import grpc
from prometheus_client import CollectorRegistry

from paceline.errors import InvalidFieldError
from paceline_orchestrator.fleet.bad_answers import at_most, demand
from paceline_orchestrator.scaling.demand import Demand
from paceline_orchestrator.scaling.externalscaler import externalscaler_pb2 as pb
from paceline_orchestrator.scaling.externalscaler.externalscaler_pb2_grpc import (
    ExternalScalerServicer,
    add_ExternalScalerServicer_to_server,
)
from paceline_serving.interceptors import EdgeInterceptor
from paceline_serving.lifecycle import bind
from paceline_serving.process import side_connection_limit
from paceline_serving.security import AccessPolicy, server_credentials
from paceline_serving.telemetry import RpcMetrics
from paceline_serving.transport import CLIENT_SERVER_OPTIONS, connections_at_most

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from paceline_orchestrator.scaling.autoscaler import Autoscaler
    from paceline_orchestrator.settings import OrchestratorSettings

DESIRED_VERIFIERS = "paceline_desired_verifiers"
REPLICA_DEMAND = "paceline_replica_demand"

_SERVICE = "externalscaler.ExternalScaler"
_CALLERS = frozenset({"operator", "orchestrator"})

_REPLICA = "replica"
_STREAM_VERIFIERS = "stream_verifiers"
_VERIFICATIONS = "verifications"
_ACTIVE = "active"
# Another replica's answer has four values. None asks for more verifiers than this: its requests are
# some hundreds, and each has 64 at most.
_MOST_VALUES = 16
_MOST_WANTED = 1 << 20


class ExternalScaler(ExternalScalerServicer):
    """Answers KEDA, and other orchestrators.

    Args:
        autoscaler: Works out what is wanted, for all replicas and for this one.
    """

    def __init__(self, autoscaler: Autoscaler) -> None:
        self._autoscaler = autoscaler

    async def IsActive(  # noqa: N802 - gRPC's name
        self, _request: pb.ScaledObjectRef, _context: Any
    ) -> pb.IsActiveResponse:
        """Tell whether there is demand."""
        return pb.IsActiveResponse(result=self._autoscaler.is_active)

    async def StreamIsActive(  # noqa: N802
        self, _request: pb.ScaledObjectRef, _context: Any
    ) -> AsyncIterator[pb.IsActiveResponse]:
        """Tell it at once, and whenever it changes."""
        async for is_active in self._autoscaler.activity():
            yield pb.IsActiveResponse(result=is_active)

    async def GetMetricSpec(  # noqa: N802
        self, _request: pb.ScaledObjectRef, _context: Any
    ) -> pb.GetMetricSpecResponse:
        """Tell that one verifier is for one of the metric."""
        spec = pb.MetricSpec(metric_name=DESIRED_VERIFIERS, target_size=1, target_size_float=1.0)
        return pb.GetMetricSpecResponse(metric_specs=[spec])

    async def GetMetrics(  # noqa: N802
        self, request: pb.GetMetricsRequest, _context: Any
    ) -> pb.GetMetricsResponse:
        """Tell how many verifiers are wanted, or what this replica's part in that is."""
        if request.metric_name == DESIRED_VERIFIERS:
            return _response({DESIRED_VERIFIERS: self._autoscaler.answer()})
        if request.metric_name == REPLICA_DEMAND:
            own = self._autoscaler.own_demand()
            return _response(
                {
                    _REPLICA: self._autoscaler.replica_id,
                    _STREAM_VERIFIERS: own.stream_verifiers,
                    _VERIFICATIONS: own.verification_count,
                    _ACTIVE: int(own.is_active),
                }
            )
        raise InvalidFieldError.of(
            "metric_name", f"must be {DESIRED_VERIFIERS} or {REPLICA_DEMAND}"
        )


def _response(values: Mapping[str, int]) -> pb.GetMetricsResponse:
    """Give each value twice, as older and newer KEDAs read it."""
    return pb.GetMetricsResponse(
        metric_values=[
            pb.MetricValue(metric_name=name, metric_value=value, metric_value_float=value)
            for name, value in values.items()
        ]
    )


def read_demand(response: pb.GetMetricsResponse) -> tuple[int, Demand]:
    """Read another replica's answer: its id, and what its streams ask.

    Raises:
        BadAnswerError: It is no such answer, or says what cannot be.
    """
    at_most("metric_values", response.metric_values, _MOST_VALUES)
    values = {it.metric_name: it.metric_value for it in response.metric_values}
    for name in (_REPLICA, _STREAM_VERIFIERS, _VERIFICATIONS, _ACTIVE):
        demand(name in values, name, "is missing")
    for name in (_STREAM_VERIFIERS, _VERIFICATIONS):
        demand(0 <= values[name] <= _MOST_WANTED, name, f"is not in [0, {_MOST_WANTED}]")
    return values[_REPLICA], Demand(
        stream_verifiers=values[_STREAM_VERIFIERS],
        verification_count=values[_VERIFICATIONS],
        is_active=bool(values[_ACTIVE]),
    )


class ScalerServer:
    """Serves it on a port of its own, from before there is any target. A context manager.

    With the certificate and the peers' roles of the orchestrator itself.

    Args:
        autoscaler: What the served `ExternalScaler` answers from.
        settings: Where, and with which certificate.

    Attributes:
        address: Where it listens, once it does.

    Raises:
        OSError: The port or a file cannot be used.
    """

    def __init__(self, autoscaler: Autoscaler, settings: OrchestratorSettings) -> None:
        self._autoscaler = autoscaler
        self._settings = settings
        self.address = ""

    async def __aenter__(self) -> Self:
        roles = self._settings.role_of_peer
        access = AccessPolicy(roles, roles_of_service={_SERVICE: _CALLERS}) if roles else None
        # Its calls are not counted: that would need the counters of the process's own server.
        guard = EdgeInterceptor(
            RpcMetrics(CollectorRegistry()), access=access, unbounded={_SERVICE}
        )
        self._server = grpc.aio.server(
            interceptors=[guard],
            options=(*CLIENT_SERVER_OPTIONS, *connections_at_most(side_connection_limit())),
        )
        add_ExternalScalerServicer_to_server(ExternalScaler(self._autoscaler), self._server)
        credentials = server_credentials(self._settings.server_tls)
        self.address = bind(self._server, self._settings.scaler_listen, credentials=credentials)
        await self._server.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._server.stop(0)
