"""`paceline bench gateway`: the cost of HTTP, compared with gRPC."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import aiohttp
from pydantic import Field

from paceline import AsyncClient
from paceline_bench.gateway.transports import COLUMNS, TRANSPORTS, Endpoints, row, take_turn
from paceline_bench.options import numbers_to
from paceline_bench.report import load_average, write_json
from paceline_bench.table import markdown
from paceline_local.options import ResultFile, read_options
from paceline_local.running import running_system
from paceline_local.screen import progress
from paceline_local.server import ANY_PORT
from paceline_local.system import LocalSystemConfig, reachable
from paceline_serving.settings import Settings, option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_bench.gateway.transports import Turn
    from paceline_local.system import LocalSystem

_EXAMPLES = """
paceline bench gateway
paceline bench gateway --streams 1,8 --repeats 3 --target-ms 20 --json gateway.json
"""


class GatewayBenchSettings(Settings):
    """Send the same requests through gRPC and through a gateway, in turn, and compare the times.

    Plain decoding on one simulated target, so that each token is a message of its own. Times are
    heard by this process; CPU is what the servers use for a token that goes through the gateway.
    The exit code is 0 if HTTP and gRPC gave the same texts, otherwise 1.
    """

    streams: Annotated[tuple[int, ...], numbers_to(1024)] = Field(
        "1,64", validate_default=True, description="requests at the same time"
    )
    tokens: int = Field(48, ge=2, le=4096, description="tokens of each request")
    repeats: int = Field(7, ge=1, le=1000, description="turns of gRPC and of HTTP")
    target_ms: float = Field(40, gt=0, le=10_000, description="ms of a forward")
    json_file: ResultFile | None = option(None, description="file for the results", flag="json")


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        GatewayBenchSettings, arguments, program="paceline bench gateway", examples=_EXAMPLES
    )
    load_at_start = load_average()
    rows = asyncio.run(_run(settings))
    print(markdown(rows, COLUMNS))
    print(
        "Times and CPU in ms, CPU for each token. TTFT: to the first token; TPOT: each later one."
    )
    if settings.json_file is not None:
        system = settings.model_dump(mode="json", exclude={"json_file"})
        write_json(settings.json_file, rows, load_at_start=load_at_start, system=system)
    return 0 if all(each["identical"] for each in rows) else 1


async def _run(settings: GatewayBenchSettings) -> list[dict[str, Any]]:
    async with (
        running_system(_config(settings)) as system,
        AsyncClient(system.orchestrator_address) as client,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        endpoints = await _endpoints(system, client, session)
        total = len(settings.streams) * settings.repeats
        with progress("both transports in turn", total=total) as step:
            return [
                await _measure(endpoints, each, settings=settings, step=step)
                for each in settings.streams
            ]


async def _endpoints(
    system: LocalSystem, client: AsyncClient, session: aiohttp.ClientSession
) -> Endpoints:
    assert system.gateway is not None
    return Endpoints(
        client=client,
        session=session,
        url=f"http://{reachable(system.gateway.address)}",
        model=(await client.info()).model_name,
        pids=(system.gateway.pid, system.orchestrator.pid),
    )


async def _measure(
    endpoints: Endpoints,
    streams: int,
    *,
    settings: GatewayBenchSettings,
    step: Callable[[str], None],
) -> dict[str, Any]:
    """Let the transports take turns; the first of each opens connections, and is not counted."""
    turns: list[tuple[Turn, Turn]] = []
    for number in range(settings.repeats + 1):
        # Who begins changes: what the turn before left behind is shared fairly, too.
        order = TRANSPORTS if number % 2 else TRANSPORTS[::-1]
        took = {
            transport: await take_turn(
                endpoints, transport, streams=streams, max_tokens=settings.tokens
            )
            for transport in order
        }
        if number:
            turns.append((took["gRPC"], took["HTTP"]))
            step(f"{streams} at once")
    return row(streams, turns, max_tokens=settings.tokens)


def _config(settings: GatewayBenchSettings) -> LocalSystemConfig:
    seconds = settings.target_ms / 1e3
    return LocalSystemConfig(
        targets=1,
        drafters=0,
        target_arguments=(
            "--backend=simulated",
            f"--simulated-tpot-seconds={seconds!r}",
            f"--simulated-ttft-seconds={seconds!r}",
        ),
        gateway_listen=ANY_PORT,
    )
