"""What grpc.health.v1 says of a server, and why nothing is heard of one."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from paceline.errors import DeadlineError, PacelineError
from paceline_orchestrator.fleet.wire import answers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import grpc

_CAUSE_SECONDS = 1.0
_CAUSE_CHARACTERS = 200


async def health_changes(channel: grpc.aio.Channel, *, seconds: float) -> AsyncGenerator[bool]:
    """Yield whether a server says that it serves, at once and whenever it changes, for so long.

    Raises:
        PacelineError: It cannot be reached any more, or the time is over.
    """
    stream = HealthStub(channel).Watch(HealthCheckRequest(), timeout=seconds, wait_for_ready=True)
    async with aclosing(answers(stream)) as states:
        async for state in states:
            yield state.status == HealthCheckResponse.SERVING


async def why_unreachable(channel: grpc.aio.Channel) -> str:
    """Say, in the words of the transport, why a server that nothing is heard of cannot be reached.

    A call that waits for the connection never says it: a name that does not exist, a port where
    nobody listens, or a certificate for another name are only told to a call that does not wait.

    Returns:
        At most 200 characters; empty if the server can be reached.
    """
    stream = HealthStub(channel).Watch(HealthCheckRequest(), timeout=_CAUSE_SECONDS)
    try:
        async with aclosing(answers(stream)) as states:
            async for _ in states:
                break
    except DeadlineError:
        return "nothing answers there"
    except PacelineError as error:
        # "failed to connect to all addresses; last error: UNKNOWN: ipv4:...: connect: Connection
        # refused (111)": what went wrong is at the end.
        return error.message.rpartition("last error: ")[2][-_CAUSE_CHARACTERS:]
    return ""
