"""`paceline bench load`: many streams at once on a fixed set of targets."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Annotated, Self

import psutil
from pydantic import BeforeValidator, Field, model_validator

from paceline import AsyncClient, Strategy
from paceline_bench.charts import save_figure
from paceline_bench.load import NAMES, Load, LoadedSystem, Reference, measure
from paceline_bench.load_report import draw, findings, tables
from paceline_bench.report import write_json
from paceline_cli.local_system import LocalSystem, LocalSystemConfig
from paceline_cli.options import PictureFile, read_options
from paceline_cli.screen import progress
from paceline_cli.up import running_system
from paceline_serving.settings import Settings, option

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from paceline_bench.load import LoadRow

__all__ = ["LoadSettings", "main"]

_EXAMPLES = """
paceline bench load
paceline bench load --streams 1,4,16 --tokens 32 --targets 2
paceline bench load --acceptance 0.3 --strategies auto         beside plain decoding
paceline bench load --drafter-ms 20 --json load.json --chart load.svg
"""
_STRATEGIES = {name.lower(): strategy for strategy, name in NAMES.items()}
_PLAIN = NAMES[Strategy.AUTOREGRESSIVE].lower()
# More than the streams of a run can hold at once, those that are being closed included.
_SESSIONS = 1024
_REQUESTS = 4096
# The prompt's forward takes so many times as long as a token's.
_FIRST_FORWARD = 1.5
_WARM_UP = (Strategy.AUTOREGRESSIVE, *(4 * [Strategy.DISTRIBUTED]))


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


_Numbers = Annotated[tuple[Annotated[int, Field(ge=1, le=512)], ...], BeforeValidator(_split)]
_Words = Annotated[tuple[str, ...], BeforeValidator(_split)]


class LoadSettings(Settings):
    """Put 1 to 64 streams at once on a fixed set of simulated targets, with every strategy.

    Models wait instead of computing; processes and gRPC are real. The output says where this
    machine was short of CPU. The exit code is 0 if every output was plain decoding's, else 1.
    """

    streams: _Numbers = Field(
        "1,2,4,8,16,32,64", validate_default=True, description="streams at the same time"
    )
    strategies: _Words = Field(
        ",".join(_STRATEGIES),
        validate_default=True,
        description="strategies to load it with; non-si is always one of them",
    )
    orchestrators: _Numbers = Field(
        "1,2", validate_default=True, description="orchestrators to spread the streams over"
    )
    tokens: int = Field(48, ge=2, le=4096, description="tokens of each request")
    requests: int = Field(2, ge=1, le=100, description="requests of each stream, one after another")
    targets: int = Field(4, ge=1, le=64, description="target processes")
    drafters: int = Field(1, ge=1, le=8, description="drafter processes")
    target_ms: float = Field(40, gt=0, le=10_000, description="a target's forward")
    drafter_ms: float = Field(4, gt=0, le=10_000, description="a drafter's forward")
    acceptance: float = Field(0.8, ge=0, le=1, description="how often a draft token is right")
    json_file: Path | None = option(None, description="where to keep the results", flag="json")
    chart: PictureFile | None = Field(None, description="where to draw them, as .svg or .png")

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        for name in self.strategies:
            if name not in _STRATEGIES:
                raise ValueError(
                    f"there is no strategy {name!r}; there are {', '.join(_STRATEGIES)}"
                )
        return self


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        LoadSettings, arguments, program="paceline bench load", examples=_EXAMPLES
    )
    rows = asyncio.run(_load(settings))
    print(tables(rows))
    print("\n".join(findings(rows)))
    if settings.json_file is not None:
        write_json(
            settings.json_file,
            [{**asdict(row), "limit": row.limit} for row in rows],
            system=settings.model_dump(mode="json", exclude={"json_file", "chart"}),
        )
    if settings.chart is not None:
        save_figure(draw(rows, title=_title(settings)), settings.chart)
    return 0 if all(row.identical for row in rows) else 1


async def _load(settings: LoadSettings) -> list[LoadRow]:
    rows: list[LoadRow] = []
    loads = _loads(settings)
    async with running_system(_config(settings)) as models:
        with progress("loading", total=len(settings.orchestrators) * len(loads)) as step:
            for count in sorted(settings.orchestrators):
                async with _orchestrators(count, models, settings) as system:
                    async for row in _measured(system, loads):
                        rows.append(row)
                        step(_line(row))
    return rows


def _loads(settings: LoadSettings) -> list[Load]:
    """Return the loads in their order: each number of streams begins with plain decoding."""
    strategies = [
        each for name, each in _STRATEGIES.items() if name in (_PLAIN, *settings.strategies)
    ]
    return [
        Load(strategy, streams, streams * settings.requests, settings.tokens)
        for streams in sorted(settings.streams)
        for strategy in strategies
    ]


async def _measured(system: LoadedSystem, loads: Sequence[Load]) -> AsyncIterator[LoadRow]:
    reference = Reference()
    for load in loads:
        if load.strategy is Strategy.AUTOREGRESSIVE:
            reference = Reference()
        yield await measure(system, load, reference)


@asynccontextmanager
async def _orchestrators(
    count: int, models: LocalSystem, settings: LoadSettings
) -> AsyncIterator[LoadedSystem]:
    """Start orchestrators for models that run, and let each learn what those are like."""
    async with AsyncExitStack() as stack:
        fronts = [
            await stack.enter_async_context(LocalSystem(_front(models))) for _ in range(count)
        ]
        clients = [
            await stack.enter_async_context(AsyncClient(front.orchestrator_address))
            for front in fronts
        ]
        await _warm_up(clients, settings)
        pids = tuple(front.orchestrator.pid for front in fronts)
        yield LoadedSystem(
            clients=tuple(clients),
            orchestrator_pids=pids,
            idle_bytes=tuple(psutil.Process(pid).memory_info().rss for pid in pids),
            target_metrics=tuple(target.metrics_address for target in models.targets),
        )


async def _warm_up(clients: Sequence[AsyncClient], settings: LoadSettings) -> None:
    for client in clients:
        for strategy in _WARM_UP:
            await client.generate(
                "Warm up:", strategy=strategy, max_tokens=settings.tokens, ignore_eos=True
            ).collect()


def _config(settings: LoadSettings) -> LocalSystemConfig:
    return LocalSystemConfig(
        targets=settings.targets,
        drafters=settings.drafters,
        target_arguments=_model(settings.target_ms),
        drafter_arguments=(
            *_model(settings.drafter_ms),
            f"--simulated-acceptance-rate={settings.acceptance}",
        ),
    )


def _front(models: LocalSystem) -> LocalSystemConfig:
    """Describe an orchestrator for models that run; a fresh one has nothing left of other loads."""
    return LocalSystemConfig(
        targets=0,
        drafters=0,
        more_targets=tuple(f"{it.name}={it.address}" for it in models.targets),
        more_drafters=tuple(f"{it.name}={it.address}" for it in models.drafters),
        orchestrator_arguments=(f"--request-limit={_REQUESTS}",),
    )


def _model(step_ms: float) -> tuple[str, ...]:
    return (
        "--backend=simulated",
        f"--simulated-tpot-seconds={step_ms / 1e3!r}",
        f"--simulated-ttft-seconds={_FIRST_FORWARD * step_ms / 1e3!r}",
        f"--session-limit={_SESSIONS}",
        f"--queue-limit={_SESSIONS}",
        f"--token-budget={_SESSIONS << 12}",
    )


def _title(settings: LoadSettings) -> str:
    return (
        f"{settings.targets} x target ({settings.target_ms:g} ms), "
        f"{settings.drafters} x drafter ({settings.drafter_ms:g} ms), "
        f"acceptance {settings.acceptance:.0%}, {settings.tokens} tokens"
    )


def _line(row: LoadRow) -> str:
    return f"{row.stream_count} x {row.strategy}: {row.tokens_per_second:.0f} tokens/s"
