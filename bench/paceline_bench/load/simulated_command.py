"""`paceline bench load`: simulated models under load, with every strategy."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from paceline import AsyncClient, Strategy
from paceline_bench.charts import save_figure
from paceline_bench.load.chart import draw
from paceline_bench.load.measurement import LoadedSystem, measure, stream_memories
from paceline_bench.load.settings import (
    LEAST_OF_A_STREAM,
    MOST_OF_A_STREAM,
    PARTS,
    REQUESTS,
    SESSIONS,
    STRATEGIES,
    RealSettings,
)
from paceline_bench.load.streams import Load, decode_plainly, warm_up
from paceline_bench.load.tables import findings, scaling_findings, tables
from paceline_bench.report import load_average, write_json
from paceline_local.running import running_system
from paceline_local.screen import progress
from paceline_local.system import LocalSystem, LocalSystemConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from paceline_bench.load.measurement import LoadRow
    from paceline_bench.load.settings import LoadSettings
    from paceline_bench.load.streams import Prompt

_PLAIN = Strategy.AUTOREGRESSIVE.abbreviation.lower()
# Several orchestrators are loaded with what is compared and with what users get.
_STRATEGIES_OF_SEVERAL = (Strategy.AUTOREGRESSIVE, Strategy.AUTO)
# Targets so fast, and orchestrators so slow, that these are the limit even where all share two
# cores: a target and a client take twice as much CPU for a token as an orchestrator does.
_SCALING_TARGET_MS, _SCALING_DRAFTER_MS = 2.0, 0.2
_SCALING_SHARE = 0.15
# With a fixed amount of work for each token, which AUTO has not.
_SCALING_STRATEGIES = (Strategy.AUTOREGRESSIVE, Strategy.SPECULATIVE)
# The prompt's forward takes so many times as long as a token's.
_FIRST_FORWARD = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part of the benchmark: models, and what is put on them.

    Attributes:
        target_ms: A target's forward.
        drafter_ms: A drafter's forward.
        target_row_ms: More for each row of a target's forward beyond its first.
        drafter_row_ms: The same at a drafter.
        orchestrator_share: The share of the time in which each orchestrator may run.
        loads: In their order, by number of orchestrators. Each number of streams begins with plain
            decoding.
    """

    target_ms: float
    drafter_ms: float
    target_row_ms: float = 0.0
    drafter_row_ms: float = 0.0
    orchestrator_share: float = 1.0
    loads: dict[int, list[Load]]


def run_simulated(settings: LoadSettings) -> int:
    """Measure, tell, and keep; return the exit code."""
    load_at_start = load_average()
    measured = asyncio.run(_run(settings))
    scaling, rows = (measured.get(name, []) for name in PARTS)
    scaling_records, records = ([row.record() for row in each] for each in (scaling, rows))
    memory = [asdict(each) for each in stream_memories(rows)]
    servers = (settings.targets, settings.drafters) if settings.per_gpu else None
    if scaling:
        print(f"# Scaling: {_scaling_title(settings)}\n")
        print(
            tables(scaling_records, servers=servers),
            *scaling_findings(scaling_records),
            "",
            sep="\n",
        )
    if rows:
        print(f"# Strategies: {_title(settings)}\n")
        print(tables(records, servers=servers), *findings(records, memory), sep="\n")
    if settings.json_file is not None:
        write_json(
            settings.json_file,
            records,
            load_at_start=load_at_start,
            system=settings.model_dump(
                mode="json", exclude={"json_file", "chart", *RealSettings.model_fields}
            ),
            memory=memory,
            scaling={
                "target_ms": _SCALING_TARGET_MS,
                "drafter_ms": _SCALING_DRAFTER_MS,
                "orchestrator_share": _scaling_share(settings),
                "rows": scaling_records,
            },
        )
    if settings.chart is not None:
        figure = draw(
            records, scaling_records, title=_title(settings), scaling_title=_scaling_title(settings)
        )
        save_figure(figure, settings.chart)
    return 0 if all(row.identical for row in (*scaling, *rows)) else 1


async def _run(settings: LoadSettings) -> dict[str, list[LoadRow]]:
    """Return the rows of each part; outputs of all are compared with those of one plain run."""
    expected: dict[Prompt, tuple[int, ...]] | None = None
    rows: dict[str, list[LoadRow]] = {}
    for name, part in _parts(settings).items():
        async with running_system(_config(settings, part)) as models:
            if expected is None:
                async with AsyncClient(models.orchestrator_address) as client:
                    expected = await decode_plainly(
                        client, _prompts(settings), max_tokens=settings.tokens
                    )
            total = sum(map(len, part.loads.values()))
            with progress(f"loading ({name})", total=total) as step:
                rows[name] = []
                async for row in _measured(part, models, settings=settings, expected=expected):
                    rows[name].append(row)
                    step(_line(row))
    return rows


def _parts(settings: LoadSettings) -> dict[str, _Part]:
    """Return what is to be done; first what gives the reference quickly."""
    scaling = _Part(
        target_ms=_SCALING_TARGET_MS,
        drafter_ms=_SCALING_DRAFTER_MS,
        orchestrator_share=_scaling_share(settings),
        loads={
            count: _loads(settings, settings.scaling_streams, _SCALING_STRATEGIES)
            for count in sorted(settings.orchestrators)
        },
    )
    asked_for = [
        each for name, each in STRATEGIES.items() if name in (_PLAIN, *settings.strategies)
    ]
    of_several = [each for each in asked_for if each in _STRATEGIES_OF_SEVERAL]
    fewest = min(settings.orchestrators)
    strategies = _Part(
        target_ms=settings.target_ms,
        drafter_ms=settings.drafter_ms,
        target_row_ms=settings.target_row_ms,
        drafter_row_ms=settings.drafter_row_ms,
        loads={
            count: _loads(settings, settings.streams, asked_for if count == fewest else of_several)
            for count in sorted(settings.orchestrators)
        },
    )
    parts = dict(zip(PARTS, (scaling, strategies), strict=True))
    return {name: part for name, part in parts.items() if name in settings.parts}


def _scaling_share(settings: LoadSettings) -> float:
    """Return how much each orchestrator gets: they run one after the other."""
    return min(_SCALING_SHARE, 1 / max(settings.orchestrators))


def _loads(
    settings: LoadSettings, stream_counts: Iterable[int], strategies: Sequence[Strategy]
) -> list[Load]:
    return [
        Load(
            prompts=_prompts(settings),
            strategy=strategy,
            stream_count=count,
            request_count=max(
                LEAST_OF_A_STREAM * count, min(settings.requests, MOST_OF_A_STREAM * count)
            ),
            max_tokens=settings.tokens,
        )
        for count in sorted({*stream_counts})
        for strategy in strategies
    ]


def _prompts(settings: LoadSettings) -> tuple[str, ...]:
    """Return so many prompts that no two streams have the same at the same time."""
    count = max(*settings.streams, *settings.scaling_streams)
    return tuple(f"Request {index}:" for index in range(count))


async def _measured(
    part: _Part,
    models: LocalSystem,
    *,
    settings: LoadSettings,
    expected: Mapping[Prompt, tuple[int, ...]],
) -> AsyncIterator[LoadRow]:
    plain: LoadRow | None = None
    for count, loads in part.loads.items():
        async with _orchestrators(count, part, models=models, settings=settings) as system:
            for load in loads:
                if load.strategy is Strategy.AUTOREGRESSIVE:
                    plain = row = await measure(system, load, expected=expected)
                else:
                    row = await measure(system, load, expected=expected, plain=plain)
                yield row


@asynccontextmanager
async def _orchestrators(
    count: int, part: _Part, *, models: LocalSystem, settings: LoadSettings
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
        await warm_up(clients, max_tokens=settings.tokens)
        yield LoadedSystem(
            clients=tuple(clients),
            orchestrator_pids=tuple(front.orchestrator.pid for front in fronts),
            target_metrics=tuple(target.metrics_address for target in models.targets),
            orchestrator_share=part.orchestrator_share,
        )


def _config(settings: LoadSettings, part: _Part) -> LocalSystemConfig:
    return LocalSystemConfig(
        targets=settings.targets,
        drafters=settings.drafters,
        target_arguments=_model(part.target_ms, row_ms=part.target_row_ms),
        drafter_arguments=(
            *_model(part.drafter_ms, row_ms=part.drafter_row_ms),
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
        orchestrator_arguments=(f"--request-limit={REQUESTS}",),
    )


def _model(step_ms: float, *, row_ms: float) -> tuple[str, ...]:
    return (
        "--backend=simulated",
        f"--simulated-tpot-seconds={step_ms / 1e3!r}",
        f"--simulated-row-seconds={row_ms / 1e3!r}",
        f"--simulated-ttft-seconds={_FIRST_FORWARD * step_ms / 1e3!r}",
        f"--session-limit={SESSIONS}",
        f"--queue-limit={SESSIONS}",
        f"--token-budget={SESSIONS << 12}",
    )


def _title(settings: LoadSettings) -> str:
    target, drafter = (
        f"{step_ms:g} ms" + (f" + {row_ms:g} a row" if row_ms else "")
        for step_ms, row_ms in (
            (settings.target_ms, settings.target_row_ms),
            (settings.drafter_ms, settings.drafter_row_ms),
        )
    )
    return (
        f"{settings.targets} x target ({target}), "
        f"{settings.drafters} x drafter ({drafter}), "
        f"acceptance {settings.acceptance:.0%}, {settings.tokens} tokens"
    )


def _scaling_title(settings: LoadSettings) -> str:
    return (
        f"targets of {_SCALING_TARGET_MS:g} ms; "
        f"each orchestrator may run in {_scaling_share(settings):.0%} of the time"
    )


def _line(row: LoadRow) -> str:
    return f"{row.stream_count} x {row.strategy}: {row.tokens_per_second:.0f} tokens/s"
