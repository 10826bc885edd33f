"""`paceline simulate trees` and `table2`: what token trees add to SI and DSI, in simulated time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from paceline_bench.options import shares_of
from paceline_bench.parallel import compute_all
from paceline_bench.protocol_runs import own_guesses
from paceline_bench.report import write_json
from paceline_bench.simulate.tree_tables import gains_table, grid_findings, self_finding
from paceline_bench.simulate.trees import (
    TreeJob,
    compare_trees,
    grid_jobs,
    steady,
    write_gains,
)
from paceline_bench.simulated_servers import TABLE2
from paceline_local.screen import progress
from paceline_protocol.draft_shape import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline_bench.simulate.trees import Gain

_COARSE = (0.03, 0.05, 0.1, 0.2, 0.4, 0.7), (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
_FULL = (0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7), tuple(n / 20 for n in range(4, 20))


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """What to simulate.

    Attributes:
        is_grid: Whether over a grid; else the rows of Table 2.
        is_full: Whether the grid is the fine one.
        shapes: Of the trees.
        rank_decay: As it was given.
        target_counts: Targets of DSI.
        rows: The price of a target's and of a drafter's row, in its own forwards.
        token_count: Tokens of a generation.
        repeats: Generations.
        self_rates: Hit rates of a target that drafts for itself; none: there is none.
        self_nodes: How many guesses it proposes.
        per_gpu: Whether to tell what each GPU is worth.
        directory: Where the files go.
        image: The pictures' format.
        json_file: Where to keep everything, or None.
    """

    is_grid: bool
    is_full: bool
    shapes: tuple[Shape, ...]
    rank_decay: str
    target_counts: tuple[int, ...]
    rows: tuple[float, float]
    token_count: int
    repeats: int
    self_rates: tuple[float, ...]
    self_nodes: int
    per_gpu: bool
    directory: Path
    image: str
    json_file: Path | None


def show_trees(options: TreeOptions) -> None:
    """Simulate, tell, and write the files."""
    work = _grid(options) if options.is_grid else _paper_rows(options)
    with progress("simulating", total=len(work)) as step:
        found = compute_all(compare_trees, work, on_done=lambda job: step(_label(job)))
    gains = list(dict.fromkeys(gain for own in found for gain in own))  # SI has no SP degree
    name = "trees" if options.is_grid else "table2"
    print(_conditions(options))
    if options.is_grid:
        for line in grid_findings(gains):
            print(f"- {line}")
        _draw(gains, options)
    if options.self_rates:
        print(f"- {self_finding(gains)}")
    if not options.is_grid or options.per_gpu:
        print(gains_table(gains, per_gpu=options.per_gpu))
    write_gains(options.directory / f"{name}.csv", gains)
    print(f"{options.directory / name}.csv has them all.")
    if options.json_file is not None:
        write_json(options.json_file, [asdict(gain) for gain in gains])
        print(f"{options.json_file} has them as JSON.")


def _job(options: TreeOptions, *, target_count: int) -> TreeJob:
    target_row, drafter_row = options.rows
    shares = shares_of(options.rank_decay)
    return TreeJob(
        name="",
        servers=steady(
            0.1, 0.5, target_count=target_count, target_row=target_row, drafter_row=drafter_row
        ),
        shapes=options.shapes,
        shares=shares,
        token_count=options.token_count,
        repeats=options.repeats,
        guesses=own_guesses(options.self_rates, node_count=options.self_nodes, shares=shares),
    )


def _grid(options: TreeOptions) -> list[TreeJob]:
    drafters, rates = _FULL if options.is_full else _COARSE
    return [
        job
        for count in options.target_counts
        for job in grid_jobs(_job(options, target_count=count), drafters=drafters, rates=rates)
    ]


def _paper_rows(options: TreeOptions) -> list[TreeJob]:
    """Return Table 2's rows, decoding alone: their first forwards take no longer than others."""
    target_row, drafter_row = options.rows
    return [
        replace(
            _job(options, target_count=count),
            name=row.name,
            servers=steady(
                float(row.servers.drafter.step / row.servers.target.step),
                row.servers.acceptance_rate,
                target_count=count,
                target_row=target_row,
                drafter_row=drafter_row,
            ),
        )
        for row in TABLE2
        for count in options.target_counts
    ]


def _draw(gains: Sequence[Gain], options: TreeOptions) -> None:
    # Here, because loading it takes most of a second.
    from paceline_bench.charts import save_figure
    from paceline_bench.simulate.tree_pictures import draw_gains

    for shape in options.shapes:
        own = [
            gain
            for gain in gains
            if Shape(gain.width, gain.branches) == shape and gain.strategy == "DSI"
        ]
        picture = options.directory / f"trees-{shape.width}-{shape.branches}.{options.image}"
        words = f"DSI with trees: width {shape.width}, {shape.branches} branches\n"
        save_figure(draw_gains(own, title=words + _conditions(options)), picture)
        print(f"{picture} has the heat maps.")


def _conditions(options: TreeOptions) -> str:
    target_row, drafter_row = options.rows
    priced = f"; rows {target_row:g} and {drafter_row:g}" if target_row or drafter_row else ""
    guessing = ""
    if options.self_rates:
        rates = ", ".join(f"{rate:g}" for rate in options.self_rates)
        guessing = f"; {options.self_nodes} own guesses, right by {rates}"
    return (
        f"{options.repeats} generations of {options.token_count} tokens, decoding alone;"
        f" rank decay {options.rank_decay}{priced}{guessing}"
    )


def _label(job: TreeJob) -> str:
    return f"{job.name}, {job.servers.target_count} target(s)"
