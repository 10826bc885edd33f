"""`paceline health`: ask servers whether they serve."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import Field

from paceline.channel import open_async_channel
from paceline.errors import PacelineError
from paceline.responses import parsed
from paceline.status import decode
from paceline_cli.connection import tls_of
from paceline_local.options import ConnectionSettings, read_options
from paceline_serving.one_line import on_one_line
from paceline_serving.settings import StringList, option

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXAMPLES = """
paceline health                                    the orchestrator on this machine
paceline health 127.0.0.1:50061 127.0.0.1:50071    any servers
paceline health && paceline generate "def "
"""


class HealthSettings(ConnectionSettings):
    """Ask servers whether they serve. The exit code is 0 if all of them do, otherwise 1."""

    servers: StringList = option(
        (), description="addresses to ask; without any: --address", kind="arguments"
    )
    timeout_seconds: float = Field(5.0, description="seconds to wait for an answer", gt=0)


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        HealthSettings, arguments, program="paceline health", examples=_EXAMPLES
    )
    return asyncio.run(_ask_all(settings))


async def _ask_all(settings: HealthSettings) -> int:
    addresses = settings.servers or (settings.address,)
    async with asyncio.TaskGroup() as tasks:
        asked = [
            (address, tasks.create_task(_ask(address, settings), name=f"health of {address}"))
            for address in addresses
        ]
    for address, task in asked:
        print(f"{address}  {on_one_line(task.result())}")
    return 0 if all(task.result() == "SERVING" for _, task in asked) else 1


async def _ask(address: str, settings: HealthSettings) -> str:
    try:
        channel = open_async_channel(address, tls=tls_of(settings), insecure=settings.insecure)
        async with channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            response = parsed(await stub.Check(request, timeout=settings.timeout_seconds))
    except grpc.RpcError as broken:
        return decode(broken).message
    except PacelineError as error:
        return error.message
    statuses = health_pb2.HealthCheckResponse.ServingStatus
    is_known = response.status in statuses.values()
    return str(statuses.Name(response.status)) if is_known else f"status {response.status}"
