"""`paceline bench rounds`: what a round and a token cost beyond forwards."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from typing import TYPE_CHECKING

from pydantic import Field

from paceline_bench.report import load_average, write_json
from paceline_bench.rounds.measurement import CASES, Forwards, time_rounds, time_streams
from paceline_bench.rounds.tables import rounds_table, streams_table
from paceline_local.options import ResultFile, read_options
from paceline_local.running import running_system
from paceline_local.screen import progress
from paceline_local.system import LocalSystem, LocalSystemConfig
from paceline_serving.settings import Settings, option

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from paceline_bench.rounds.measurement import Rounds, Streams

_EXAMPLES = """
paceline bench rounds
paceline bench rounds --repeats 3 --streams 0
paceline bench rounds --busy 2 --json rounds.json
"""
_STREAM_TARGETS, _STREAM_TARGET_MS, _STREAM_DRAFTER_MS = 4, 20.0, 2.0


class RoundsSettings(Settings):
    """Measure what a round and a token cost beyond forwards, by RPCs and by messages of a stream.

    Simulated models sleep for 0, 0.5, 7 and 33 ms. Two orchestrators, one of each kind, take turns
    with the same model servers. Then many streams at once show the CPU time of a token. The machine
    should be idle. Beside a round stands a bare message: one there and back on an open gRPC stream
    between two processes with nothing else in them. The exit code is 0 if the texts of each prompt
    were the same in all requests, else 1.
    """

    repeats: int = Field(10, ge=1, le=1000, description="measurements of each kind, in turn")
    streams: int = Field(64, ge=0, le=1024, description="requests at the same time; 0: none")
    busy: int = Field(0, ge=0, le=64, description="processes that compute beside")
    json_file: ResultFile | None = option(None, description="file for the results", flag="json")


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        RoundsSettings, arguments, program="paceline bench rounds", examples=_EXAMPLES
    )
    with _busy(settings.busy):
        return asyncio.run(_measure(settings))


async def _measure(settings: RoundsSettings) -> int:
    load_at_start = load_average()
    rounds: list[Rounds] = []
    streams: list[Streams] = []
    with progress("rounds", total=len(CASES)) as step:
        for case in CASES:
            async with _systems(case, targets=1) as (servers, orchestrators):
                rounds += await time_rounds(case, servers, orchestrators, repeats=settings.repeats)
            step(str(case))
    if settings.streams:
        case = Forwards(_STREAM_TARGET_MS, _STREAM_DRAFTER_MS)
        async with _systems(case, targets=_STREAM_TARGETS) as (servers, systems):
            with progress("streams", total=settings.repeats) as step:
                streams = await time_streams(
                    servers,
                    systems,
                    strategies=("autoregressive", "speculative"),
                    stream_count=settings.streams,
                    repeats=settings.repeats,
                    on_repeat=step,
                )
    rows = [{**asdict(it.case), **asdict(it)} for it in rounds]
    stream_rows = [asdict(it) for it in streams]
    print(rounds_table(rows), end="")
    if streams:
        print("\n" + streams_table(stream_rows), end="")
    if settings.json_file is not None:
        write_json(
            settings.json_file,
            rows=rows,
            streams=stream_rows,
            busy=settings.busy,
            load_at_start=load_at_start,
        )
    return 0 if all(row["is_identical"] for row in (*rows, *stream_rows)) else 1


@asynccontextmanager
async def _systems(
    case: Forwards, *, targets: int
) -> AsyncIterator[tuple[LocalSystem, dict[str, LocalSystem]]]:
    """Start model servers, and an orchestrator for each transport of calls."""
    config = LocalSystemConfig(
        targets=targets,
        drafters=1,
        target_arguments=_flags(case.target_ms),
        drafter_arguments=(*_flags(case.drafter_ms), "--simulated-acceptance-rate=0.8"),
    )
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(running_system(config))
        alone = LocalSystemConfig(
            targets=0,
            drafters=0,
            more_targets=tuple(f"{it.name}={it.address}" for it in servers.targets),
            more_drafters=tuple(f"{it.name}={it.address}" for it in servers.drafters),
            orchestrator_arguments=("--no-exchange-calls",),
        )
        by_rpcs = await stack.enter_async_context(LocalSystem(alone))
        yield servers, {"RPCs": by_rpcs, "messages": servers}


def _flags(forward_ms: float) -> tuple[str, ...]:
    seconds = forward_ms / 1e3
    return (
        "--backend=simulated",
        "--debug-calls",
        f"--simulated-ttft-seconds={seconds!r}",
        f"--simulated-tpot-seconds={seconds!r}",
    )


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep processes computing during the block."""
    context = get_context("spawn")
    processes = [context.Process(target=_compute, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def _compute() -> None:
    while True:
        pass
