"""`paceline bench table2`: Table 2 of the DSI paper, online."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from math import nan
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from paceline import AsyncClient
from paceline_bench.options import names_of, numbers_to
from paceline_bench.report import load_average, write_json
from paceline_bench.simulated_servers import DEFAULT_VOCABULARY_SIZE, FASTER, TABLE2
from paceline_bench.table2 import measurement as table2
from paceline_bench.table2.echo import summarise_echoes, time_echoes
from paceline_bench.table2.grid import grid_cells, measure_cell
from paceline_bench.table2.grid_tables import grid_report
from paceline_bench.table2.online import OnlineSystem
from paceline_bench.table2.results import kept
from paceline_bench.table2.tables import report
from paceline_contract.limits import MOST_BRANCHES, MOST_LOOKAHEAD, MOST_WIDTH
from paceline_local.options import PictureFile, ResultFile, read_options
from paceline_local.running import running_system
from paceline_local.screen import diagnostics, progress
from paceline_local.system import LocalSystem, LocalSystemConfig
from paceline_protocol.draft_shape import Shape
from paceline_protocol.ranks import DEFAULT_RANK_DECAY
from paceline_serving.settings import Settings, StringList, option

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from paceline_bench.report import Row
    from paceline_bench.simulated_servers import SimulatedServers, Table2Row
    from paceline_bench.table2.measurement import RowResult
    from paceline_protocol.laboratory.simulation import ServerLatency

_EXAMPLES = """
paceline bench table2
paceline bench table2 --rows 2 --repeats 3 --per-gpu
paceline bench table2 --rows vicuna-7b/alpaca,phi3-14b/mbpp --si-lookaheads 3,5
paceline bench table2 --rows 4 --width 4 --branches 3 --rank-decay 0.3
paceline bench table2 --rows starcoder-15b/humaneval --ahead
paceline bench table2 --rows 8b-on-h100
paceline bench table2 --rows phi3-14b/humaneval,phi3-14b/mbpp --extended
paceline bench table2 --json table2.json --chart table2.svg
paceline bench table2 --grid 5 --repeats 5 --json grid.json --chart grid.svg
"""
_ROWS = {row.name: row for row in (*TABLE2, *FASTER)}
_NOT_OF_A_GRID = (
    *("rows", "si_lookaheads", "dsi_lookaheads", "per_gpu"),
    *("width", "ahead", "extended"),
)


def _named(rows: tuple[str, ...]) -> tuple[str, ...]:
    """Name the rows: a single number means so many of the first ones."""
    if len(rows) != 1 or not rows[0].isdecimal():
        return rows
    if not 1 <= int(rows[0]) <= len(TABLE2):
        raise ValueError(f"there are {len(TABLE2)} rows")
    return tuple(_ROWS)[: int(rows[0])]


def _check_grid(size: int) -> int:
    if size == 1:
        raise ValueError("a grid has two or more of each")
    return size


_Lookaheads = Annotated[tuple[int, ...], numbers_to(MOST_LOOKAHEAD)]


class Table2Settings(Settings):
    """Measure Table 2 of the DSI paper with real processes, beside the theory's limits.

    Each row is a drafter and targets whose forwards take as long as the paper measured; they wait
    instead of computing. The machine should be idle. All of it takes somewhat more than an hour,
    a grid of 5 half an hour; both in proportion to the repeats. The exit code is 0 if every output
    equals plain decoding's, otherwise 1.
    """

    rows: Annotated[
        StringList, AfterValidator(_named), names_of(_ROWS, kind="row", needed=True)
    ] = Field(
        str(len(TABLE2)),
        validate_default=True,
        description="number of rows, or the names of some;"
        f" beyond the paper's: {', '.join(row.name for row in FASTER)}",
    )
    repeats: int = Field(10, ge=1, le=1000, description="timed runs of each method, in turn")
    targets: int = Field(7, ge=1, le=32, description="target processes")
    max_tokens: int = Field(50, ge=2, le=1000, description="tokens of each run")
    si_lookaheads: _Lookaheads = Field(
        "1-10", validate_default=True, description="lookaheads to try with SI"
    )
    dsi_lookaheads: _Lookaheads = Field(
        "1-3,5,8",
        validate_default=True,
        description="lookaheads to try with DSI, beside the planner's",
    )
    grid: Annotated[int, AfterValidator(_check_grid)] = Field(
        0,
        ge=0,
        le=21,
        description="instead of the rows, a grid of this many drafter latencies and acceptance"
        " rates; SI has the lookahead that is best in expectation, DSI the planner's",
    )
    width: int = Field(
        1,
        ge=1,
        le=MOST_WIDTH,
        description="SI and DSI also with trees, with this many tokens at a position",
    )
    branches: int = Field(
        0,
        ge=0,
        le=MOST_BRANCHES,
        description="tokens beside the chain's that a draft forward extends",
    )
    rank_decay: float = Field(
        DEFAULT_RANK_DECAY,
        gt=0,
        le=1,
        description="probability that the drafters' next runner-up is right where they are wrong",
    )
    ahead: bool = Field(
        False, description="SI also drafting ahead while its target verifies, with trees, too"
    )
    extended: bool = Field(
        False,
        description="DSI also with the text itself after its drafter; the vocabulary then has two"
        " tokens, so that the text is right half of the time",
    )
    per_gpu: bool = Field(False, description="also tokens/s over the GPUs that would be in use")
    json_file: ResultFile | None = option(None, description="file for the results", flag="json")
    chart: PictureFile | None = Field(None, description="file for the picture, .svg or .png")

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        for name in _NOT_OF_A_GRID:
            if self.grid and name in self.model_fields_set:
                flag = name.replace("_", "-")
                raise ValueError(f"--grid has cells of its own, so --{flag} does not go with it")
        if self.extended and self.width > 1:
            raise ValueError("--extended has two tokens, too few for a --width of 2 or more")
        for name in ("branches", "rank_decay"):
            if self.width == 1 and name in self.model_fields_set:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} goes with a --width of 2 or more")
        return self


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        Table2Settings, arguments, program="paceline bench table2", examples=_EXAMPLES
    )
    return asyncio.run(_grid(settings) if settings.grid else _table2(settings))


async def _table2(settings: Table2Settings) -> int:
    load_at_start = load_average()
    results: list[RowResult] = []
    for row in _chosen(settings):
        results.append(await _measure(row, settings))
        diagnostics().print(str(results[-1]), markup=False)
        _keep(settings.json_file, **kept(results), load_at_start=load_at_start)
    content = kept(results)
    print(report(content, max_tokens=settings.max_tokens, by_gpu=settings.per_gpu), end="")
    if settings.chart is not None:
        from paceline_bench.charts import save_figure
        from paceline_bench.table2.chart import draw_table2

        figure = draw_table2(content["rows"], max_tokens=settings.max_tokens)
        save_figure(figure, settings.chart)
    return 0 if all(result.identical for result in results) else 1


def _chosen(settings: Table2Settings) -> list[Table2Row]:
    rows = (_ROWS[name] for name in dict.fromkeys(settings.rows))
    return [
        replace(
            row,
            servers=replace(
                row.servers,
                target_count=settings.targets,
                rank_decay=settings.rank_decay,
                vocabulary_size=2 if settings.extended else row.servers.vocabulary_size,
            ),
        )
        for row in rows
    ]


async def _measure(row: Table2Row, settings: Table2Settings) -> RowResult:
    shape = Shape(settings.width, settings.branches)
    variants = table2.variants(
        settings.si_lookaheads,
        settings.dsi_lookaheads,
        shape=shape,
        ahead=settings.ahead,
        extended=settings.extended,
    )
    sleeps = table2.sleeps_ns(row.servers)
    bare_calls = await time_echoes(sleeps)
    async with running_system(_config(row.servers)) as system:
        with progress(row.name, total=settings.repeats) as step:
            async with _online(
                system,
                system,
                max_tokens=settings.max_tokens,
                vocabulary_size=row.servers.vocabulary_size,
            ) as online:
                runs = await table2.measure_row(
                    online, variants, repeats=settings.repeats, on_repeat=step
                )
    bare_calls += await time_echoes(sleeps)
    return table2.evaluate(row, runs, echoes=summarise_echoes(bare_calls))


async def _grid(settings: Table2Settings) -> int:
    """Measure cell by cell; the targets are the same for all of them."""
    load_at_start = load_average()
    cells = grid_cells(settings.grid)
    rows: list[Row] = []
    targets_only = replace(_config(cells[0].servers(target_count=settings.targets)), drafters=0)
    async with running_system(targets_only) as targets:
        more_targets = tuple(f"{it.name}={it.address}" for it in targets.targets)
        with progress("grid", total=len(cells)) as step:
            for cell in cells:
                config = _config(cell.servers(target_count=0), more_targets=more_targets)
                async with (
                    LocalSystem(config) as system,
                    _online(system, targets, max_tokens=settings.max_tokens) as online,
                ):
                    rows += await measure_cell(online, cell, repeats=settings.repeats)
                _keep(settings.json_file, rows=rows, load_at_start=load_at_start)
                ratio = rows[-1].get("over_better", nan)
                step(f"{cell.name}: {ratio:.3f} of the better of SI and non-SI")
    print(grid_report(rows), end="")
    if settings.chart is not None:
        from paceline_bench.charts import save_figure
        from paceline_bench.table2.chart import draw_grid

        save_figure(draw_grid(rows), settings.chart)
    return 0 if all(row["identical"] for row in rows) else 1


def _keep(path: Path | None, **content: Any) -> None:
    """Write what there is so far: nobody wants to lose an hour."""
    if path is not None:
        write_json(path, **content)


@asynccontextmanager
async def _online(
    system: LocalSystem,
    targets: LocalSystem,
    *,
    max_tokens: int,
    vocabulary_size: int = DEFAULT_VOCABULARY_SIZE,
) -> AsyncIterator[OnlineSystem]:
    servers = (*system.drafters, *targets.targets)
    async with AsyncClient(system.orchestrator_address) as client:
        yield OnlineSystem(
            client,
            orchestrator_pid=system.orchestrator.pid,
            metrics_addresses={server.name: server.metrics_address for server in servers},
            max_tokens=max_tokens,
            vocabulary_size=vocabulary_size,
        )


def _config(servers: SimulatedServers, *, more_targets: tuple[str, ...] = ()) -> LocalSystemConfig:
    return LocalSystemConfig(
        targets=servers.target_count,
        drafters=1,
        more_targets=more_targets,
        target_arguments=_flags(servers.target, servers),
        drafter_arguments=(
            *_flags(servers.drafter, servers),
            f"--simulated-acceptance-rate={servers.acceptance_rate}",
            f"--simulated-rank-decay={servers.rank_decay}",
        ),
    )


def _flags(latency: ServerLatency, servers: SimulatedServers) -> tuple[str, ...]:
    return (
        "--backend=simulated",
        "--debug-calls",
        f"--simulated-vocabulary-size={servers.vocabulary_size}",
        f"--simulated-ttft-seconds={int(latency.first) / 1e9!r}",
        f"--simulated-tpot-seconds={int(latency.step) / 1e9!r}",
    )
