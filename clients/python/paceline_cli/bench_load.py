"""`paceline bench load`: many streams at once on a fixed set of targets."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline import AsyncClient, Strategy
from paceline.limits import MOST_DRAFTERS, MOST_TARGETS
from paceline_bench.charts import save_figure
from paceline_bench.load.chart import draw
from paceline_bench.load.streams import (
    Load,
    LoadedSystem,
    decode_plainly,
    measure,
    stream_memories,
)
from paceline_bench.load.tables import findings, scaling_findings, tables
from paceline_bench.report import load_average, write_json
from paceline_cli.choices import names_of, numbers_to
from paceline_cli.local_system import LocalSystem, LocalSystemConfig
from paceline_cli.options import PictureFile, read_options
from paceline_cli.screen import progress
from paceline_cli.up import running_system
from paceline_serving.settings import Settings, StringList, flag_of, option

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from paceline_bench.load.streams import LoadRow, Prompt

__all__ = ["REQUESTS", "SESSIONS", "STRATEGIES", "LoadSettings", "main", "warm_up"]

_EXAMPLES = """
paceline bench load
paceline bench load --streams 1,4,16 --requests 20 --targets 2
paceline bench load --parts scaling                            one orchestrator and two
paceline bench load --acceptance 0.3 --strategies auto         beside plain decoding
paceline bench load --drafter-ms 20 --json load.json --chart load.svg
paceline bench load --backend transformers                     the bundled models, beside others
"""
STRATEGIES = {
    strategy.abbreviation.lower(): strategy
    for strategy in (
        Strategy.AUTOREGRESSIVE,
        Strategy.SPECULATIVE,
        Strategy.DISTRIBUTED,
        Strategy.AUTO,
    )
}
"""By the names that options have for them."""
_PLAIN = Strategy.AUTOREGRESSIVE.abbreviation.lower()
SESSIONS = 1024
"""More than the streams of a run can hold at once, those that are being closed included."""
REQUESTS = 4096
"""More than the requests that a run can have at once."""
# Below 100 a load's p99 is left out; with few streams so many requests would take minutes.
_MOST_OF_A_STREAM, _LEAST_OF_A_STREAM = 10, 2
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
_PARTS = ("scaling", "strategies")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "simulated": {
        "streams": "1,2,4,8,16,32,64",
        "strategies": ",".join(STRATEGIES),
        "tokens": 24,
        "requests": 100,
        "targets": 4,
    },
    "transformers": {
        "streams": "1,4,16,64",
        "strategies": "non-si,si,auto",
        "tokens": 64,
        "requests": 4,
        "targets": 1,
    },
}
_WARM_UP = (Strategy.AUTOREGRESSIVE, *(4 * [Strategy.DISTRIBUTED]))


_Numbers = Annotated[tuple[int, ...], numbers_to(512)]
_StrategyNames = Annotated[StringList, names_of(STRATEGIES, kind="strategy", needed=True)]
_PartNames = Annotated[StringList, names_of(_PARTS, kind="part", needed=True)]


def _of_both(name: str, description: str, **limits: Any) -> Any:
    """Declare an option that has another default with real models."""
    simulated, real = (each[name] for each in _DEFAULTS.values())
    words = f"{description} (default: {simulated}; with real models {real})"
    return Field(description=words, **limits)


class _Simulated(Settings):
    """Simulated models."""

    parts: _PartNames = Field(",".join(_PARTS), validate_default=True, description="what to do")
    scaling_streams: _Numbers = Field(
        "32,64",
        validate_default=True,
        description="streams at the same time, for scaling; many, or they are the limit",
    )
    orchestrators: _Numbers = Field(
        "1,2",
        validate_default=True,
        description="orchestrators to spread the streams over; all strategies are for the smallest "
        "number, the others get non-si and auto",
    )
    target_ms: float = Field(40, gt=0, le=10_000, description="a target's forward")
    drafter_ms: float = Field(4, gt=0, le=10_000, description="a drafter's forward")
    target_row_ms: float = Field(
        0, ge=0, le=10_000, description="more for each row of a target's forward beyond its first"
    )
    drafter_row_ms: float = Field(
        0, ge=0, le=10_000, description="more for each row of a drafter's forward beyond its first"
    )
    acceptance: float = Field(0.8, ge=0, le=1, description="how often a draft token is right")
    per_gpu: bool = Field(False, description="also tokens/s over the GPUs, one for each server")


class _Real(Settings):
    """Real models."""

    prompt_tokens: int = Field(64, ge=1, le=4096, description="tokens of each prompt")
    rounds: int = Field(3, ge=1, le=100, description="how often each takes its turn")
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of each model")
    models: Path | None = Field(None, description="folder with the bundled models, if elsewhere")


_OWN: dict[str, type[Settings]] = {"simulated": _Simulated, "transformers": _Real}


class LoadSettings(_Real, _Simulated):
    """Put 1 to 64 streams at once on a fixed set of targets, with every strategy.

    Simulated models wait instead of computing; processes and gRPC are real. The part `strategies`
    compares these on targets that fill up. In `scaling` orchestrators are the limit: targets are
    fast, and each orchestrator may run in a seventh of the time only, so that two have what they
    need even on two cores. All of it takes about twelve minutes, scaling alone one. The output says
    where this machine was short of CPU.

    With real models (--backend transformers) what is compared is who decodes as many texts at once,
    in turn on the same cores: the services, our engine in this process, and transformers' generate
    and its continuous batching; greedily, with the bundled models. It takes some ten minutes.

    The exit code is 0 if every output of ours was plain decoding's, else 1.
    """

    backend: Literal["simulated", "transformers"] = Field(
        "simulated", description="simulated models, or real ones"
    )
    streams: _Numbers = _of_both("streams", "streams at the same time")
    strategies: _StrategyNames = _of_both(
        "strategies", "strategies to load it with; non-si is always one of them"
    )
    tokens: int = _of_both("tokens", "tokens of each request", ge=2, le=4096)
    requests: int = _of_both(
        "requests",
        f"requests of each load; but {_LEAST_OF_A_STREAM} to {_MOST_OF_A_STREAM} of each stream, "
        "with real models 1 or more",
        ge=1,
        le=10_000,
    )
    targets: int = _of_both("targets", "target processes", ge=1, le=MOST_TARGETS)
    drafters: int = Field(1, ge=1, le=MOST_DRAFTERS, description="drafter processes")
    json_file: Path | None = option(None, description="where to keep the results", flag="json")
    chart: PictureFile | None = Field(None, description="where to draw them, as .svg or .png")

    @model_validator(mode="before")
    @classmethod
    def _fit_the_backend(cls, values: dict[str, Any]) -> dict[str, Any]:
        backend = values.get("backend", "simulated")
        for other, section in _OWN.items():
            if other != backend and (foreign := sorted({*section.model_fields} & {*values})):
                flag = flag_of(foreign[0], section.model_fields[foreign[0]])
                raise ValueError(f"{flag} goes with --backend {other} only")
        return {**_DEFAULTS.get(backend, {}), **values}


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


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        LoadSettings, arguments, program="paceline bench load", examples=_EXAMPLES
    )
    if settings.backend == "transformers":
        from paceline_cli.bench_load_peers import run_beside_peers

        return run_beside_peers(settings)
    load_at_start = load_average()
    measured = asyncio.run(_run(settings))
    scaling, rows = (measured.get(name, []) for name in _PARTS)
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
                mode="json", exclude={"json_file", "chart", *_Real.model_fields}
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
        figure = draw(rows, scaling, title=_title(settings), scaling_title=_scaling_title(settings))
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
                async for row in _measured(part, models, settings, expected):
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
    parts = dict(zip(_PARTS, (scaling, strategies), strict=True))
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
                _LEAST_OF_A_STREAM * count, min(settings.requests, _MOST_OF_A_STREAM * count)
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
    settings: LoadSettings,
    expected: Mapping[Prompt, tuple[int, ...]],
) -> AsyncIterator[LoadRow]:
    plain: LoadRow | None = None
    for count, loads in part.loads.items():
        async with _orchestrators(count, part, models, settings) as system:
            for load in loads:
                if load.strategy is Strategy.AUTOREGRESSIVE:
                    plain = row = await measure(system, load, expected=expected)
                else:
                    row = await measure(system, load, expected=expected, plain=plain)
                yield row


@asynccontextmanager
async def _orchestrators(
    count: int, part: _Part, models: LocalSystem, settings: LoadSettings
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


async def warm_up(clients: Sequence[AsyncClient], *, max_tokens: int) -> None:
    """Let each orchestrator learn what its models are like."""
    for client in clients:
        for strategy in _WARM_UP:
            await client.generate(
                "Warm up:", strategy=strategy, max_tokens=max_tokens, ignore_eos=True
            ).collect()


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
