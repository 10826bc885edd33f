"""`paceline bench soak`: very many requests, and the memory that processes keep."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from paceline import AsyncClient
from paceline_bench.options import names_of
from paceline_bench.report import load_average, write_json
from paceline_bench.soak.rounds import STRATEGIES, Soak, Watched, references, soak
from paceline_bench.soak.tables import CLIENT, Soaked, add_to_log, log_line, record, soak_table
from paceline_local.options import ResultFile, read_options
from paceline_local.running import running_system
from paceline_local.screen import progress
from paceline_local.system import LocalSystemConfig
from paceline_serving.settings import Settings, StringList, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_bench.soak.rounds import Reading
    from paceline_local.system import LocalSystem

_EXAMPLES = """
paceline bench soak
paceline bench soak --requests 2000 --warm-up 500 --seed 7
paceline bench soak --json soak.json --log bench/LOG.md
paceline bench soak --strategies dsi --leaving 0.3             the cost of withdrawn calls
"""
# So many looks tell a slope from what an allocator does now and then.
_ROUNDS = 50
# Forwards so short that nearly all of the time is spent on what is under test.
_TARGET_SECONDS, _DRAFTER_SECONDS = 0.0005, 0.0001

_StrategyNames = Annotated[StringList, names_of(STRATEGIES, kind="strategy", needed=True)]


class SoakSettings(Settings):
    """Send very many requests through real processes, and measure the memory that these keep.

    The models are simulated, with almost no latency. Requests use every strategy, greedy and
    sampled, and some clients leave in the middle; every output is compared with plain decoding's.
    After each of 50 rounds no request runs, and the memory of each process is read; a line is
    fitted through the values. The exit code is 0 if no server grew by more than the limit and every
    output was right, otherwise 1. This is a promise about memory, not about speed.
    """

    requests: int = Field(50_000, ge=10, description="requests after the warm-up")
    warm_up: int = Field(
        5_000, ge=0, description="requests before the measurement, in which memory grows once"
    )
    streams: int = Field(8, ge=1, le=64, description="requests at the same time")
    tokens: int = Field(6, ge=1, le=4096, description="tokens of each request")
    leaving: float = Field(
        0.1, ge=0, le=1, description="fraction of clients that leave in the middle"
    )
    targets: int = Field(2, ge=1, le=8, description="target processes")
    strategies: _StrategyNames = Field(
        tuple(STRATEGIES), description="strategies of the requests, in turn"
    )
    acceptance: float = Field(0.7, ge=0, le=1, description="how often a draft token is right")
    limit_bytes: float = Field(
        100, ge=0, description="bytes by which each server may grow with each request"
    )
    seed: int = Field(1, ge=0, description="seed of the requests")
    json_file: ResultFile | None = option(None, description="file for the results", flag="json")
    log: ResultFile | None = Field(
        None, description="file whose list of soaks gets a line, such as bench/LOG.md"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        SoakSettings, arguments, program="paceline bench soak", examples=_EXAMPLES
    )
    load_at_start = load_average()
    soaked = asyncio.run(_run(settings))
    line = log_line(soaked)
    print(soak_table(soaked), line, sep="\n")
    if settings.json_file is not None:
        write_json(
            settings.json_file,
            record(soaked),
            load_at_start=load_at_start,
            system=settings.model_dump(mode="json", exclude={"json_file", "log"}),
            wrong_count=soaked.wrong_count,
            held=soaked.held,
        )
    if settings.log is not None:
        add_to_log(line, settings.log)
    return 0 if soaked.held else 1


async def _run(settings: SoakSettings) -> Soaked:
    plan = _plan(settings)
    async with (
        running_system(_config(settings)) as system,
        AsyncClient(system.orchestrator_address) as client,
    ):
        watched = _watched(system)
        readings: dict[str, list[Reading]] = {each.name: [] for each in watched}
        expected = await references(client, plan)
        wrong_count = 0
        with progress("soaking", total=_ROUNDS + 1) as step:
            async for looks, wrong in soak(client, plan, watched=watched, expected=expected):
                wrong_count = wrong
                for name, look in zip(readings, looks, strict=True):
                    readings[name].append(look)
                step(_progress_line(readings["orchestrator"][-1]))
    return Soaked(plan=plan, readings=readings, wrong_count=wrong_count, limit=settings.limit_bytes)


def _plan(settings: SoakSettings) -> Soak:
    return Soak(
        request_count=settings.requests,
        warm_up_count=settings.warm_up,
        round_size=-(-settings.requests // _ROUNDS),
        stream_count=settings.streams,
        max_tokens=settings.tokens,
        leaving_share=settings.leaving,
        strategies=tuple(STRATEGIES[name] for name in settings.strategies),
        seed=settings.seed,
    )


def _watched(system: LocalSystem) -> list[Watched]:
    servers = [Watched(it.name, it.pid, it.metrics_address) for it in system.servers]
    return [*reversed(servers), Watched(CLIENT, os.getpid())]


def _config(settings: SoakSettings) -> LocalSystemConfig:
    return LocalSystemConfig(
        targets=settings.targets,
        target_arguments=_model(_TARGET_SECONDS),
        drafter_arguments=(
            *_model(_DRAFTER_SECONDS),
            f"--simulated-acceptance-rate={settings.acceptance}",
        ),
    )


def _model(step_seconds: float) -> tuple[str, ...]:
    return (
        "--backend=simulated",
        f"--simulated-tpot-seconds={step_seconds!r}",
        f"--simulated-ttft-seconds={step_seconds!r}",
    )


def _progress_line(reading: Reading) -> str:
    return f"{reading.request_count:,} requests: orchestrator {reading.own_bytes / 2**20:.1f} MiB"
