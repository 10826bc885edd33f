"""`paceline simulate`: papers' offline results, on a virtual clock and by formulas."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from paceline_bench.options import check_rank_decay, numbers_to
from paceline_bench.parallel import compute_all
from paceline_bench.report import write_json
from paceline_bench.simulate.claims import (
    RATIOS,
    check_claims,
    per_gpu_claim,
    summarise,
    write_cells,
)
from paceline_bench.simulate.ewif_table import ewif_table
from paceline_bench.simulate.heads_command import show_heads
from paceline_bench.simulate.heatmaps import Experiment, Grid, columns, fill_column
from paceline_bench.simulate.table1 import MOMENTS, table1
from paceline_bench.simulate.trees_command import TreeOptions, show_trees
from paceline_bench.table import Column, print_table
from paceline_contract.limits import MOST_BRANCHES, MOST_TARGETS, MOST_WIDTH
from paceline_local.options import ResultFile, read_options
from paceline_local.screen import progress
from paceline_protocol.draft_shape import Shape
from paceline_protocol.task import DispatchPolicy
from paceline_serving.settings import RateList, Settings, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_bench.simulate.heatmaps import Cell, GridColumn

_EXAMPLES = """
paceline simulate                                 everything, on a coarse grid: seconds
paceline simulate table1                          an exact check of the protocol
paceline simulate ewif                            the gain of cascades, by the formulas
paceline simulate figure2 --grid full             the paper's grid: a minute or two on two cores
paceline simulate --grid full --json all.json     both figures, and the findings as JSON
paceline simulate figure2 --dispatch work_conserving --targets 3
paceline simulate figure7 --repeats 50 --image svg
paceline simulate trees --widths 2,4              the gain of trees: some minutes
paceline simulate trees --sp 7 --target-row 0.02  each further row takes 2 % of a forward
paceline simulate table2 --rank-decay 0.3         trees on the rows of the paper's Table 2
paceline simulate table2 --self-rates 0.6,0.4     and a target that drafts for itself
paceline simulate heads --sp 1,2,4                heads (EAGLE-3) at the target, or as services
"""
_TREES, _HEADS = frozenset({"trees", "table2"}), frozenset({"heads"})
_GOES_WITH = dict.fromkeys(
    (
        "widths",
        "branches",
        "rank_decay",
        "target_row",
        "drafter_row",
        "self_rates",
        "self_nodes",
    ),
    _TREES,
)
_GOES_WITH |= {"sp": _TREES | _HEADS, "head_latency": _HEADS, "head_decay": _HEADS}
_FIGURES = {"figure2": ("Figure 2", None), "figure7": ("Figure 7", 5)}  # title and lookahead
_PANELS = {"figure2": tuple(RATIOS), "figure7": tuple(RATIOS)[:3]}


class SimulateSettings(Settings):
    """Reproduce the DSI paper's offline results: Table 1, and the heat maps of Figures 2 and 7.

    The decoding methods that serve users run on a virtual clock, where a forward takes its latency
    and nothing else takes any time. Figure 2 compares non-SI, SI and DSI over drafter latency and
    acceptance rate, each with its best lookahead, DSI within Equation 1 of the paper:
    ceil(target latency / (lookahead * drafter latency)) <= targets. Figure 7 does so with a
    lookahead of 5. Pictures and tables (CSV) go into a folder; the paper's claims are checked, and
    the exit code is 1 if Table 1 is not reproduced exactly. `ewif` is Table 1 of the paper on
    cascades: expected walltime improvement factors, by its formula. Not part of `all`: `trees`,
    heat maps of what token trees add to SI and DSI, and `table2`, the same for the rows of Table 2,
    ideal and without the prompt; with hit rates beside a target that drafts for itself. `heads`
    compares EAGLE-3 heads at the target with the same heads as drafter services.
    """

    what: Literal["all", "table1", "ewif", "figure2", "figure7", "trees", "table2", "heads"] = (
        option("all", kind="argument", description="results to reproduce")
    )
    grid: Literal["coarse", "full"] = Field(
        "coarse", description="step of both axes: 5 per cent, or 1 per cent as in the paper"
    )
    tokens: int = Field(
        100, ge=2, le=1000, description="tokens of a generation; time grows with their square"
    )
    repeats: int = Field(5, ge=1, le=1000, description="generations in each cell")
    widths: Annotated[tuple[int, ...], numbers_to(MOST_WIDTH)] = Field(
        "4",
        validate_default=True,
        description="trees: tokens at a position, the chain's and its runners-up",
    )
    branches: int = Field(
        3,
        ge=0,
        le=MOST_BRANCHES,
        description="trees: tokens beside the chain's that a draft forward extends",
    )
    rank_decay: Annotated[str, BeforeValidator(check_rank_decay)] = Field(
        "0.4",
        description="trees: probability that the next runner-up is right where the drafter is"
        " wrong, or 'llama' for a published vector",
    )
    sp: Annotated[tuple[int, ...], numbers_to(MOST_TARGETS)] = Field(
        "1,2,7", validate_default=True, description="trees, heads: SP degrees, targets of DSI"
    )
    target_row: float = Field(
        0, ge=0, le=10, description="trees: price of each further row, in the target's forwards"
    )
    drafter_row: float = Field(
        0, ge=0, le=10, description="trees: the same in the drafter's forwards"
    )
    self_rates: RateList = Field(
        (),
        max_length=16,
        description="trees: also a target that drafts for itself: how often its guess for the"
        " token after its own next token is right, then for the token after that, and"
        " so on",
    )
    self_nodes: int = Field(
        16,
        ge=1,
        le=256,
        description="trees: guesses that such a target proposes, the likeliest tree",
    )
    head_latency: float = Field(
        0.05, gt=0, le=1, description="heads: a forward of the head, in the target's"
    )
    head_decay: float = Field(
        0.9,
        gt=0,
        le=1,
        description="heads: by what the rate is multiplied with each token beyond the published"
        " ones",
    )
    per_gpu: bool = Field(
        False, description="also tokens in a target forward's time over the GPUs in use"
    )
    targets: int = Field(7, ge=1, le=MOST_TARGETS, description="targets of DSI: its SP degree")
    dispatch: Literal["blocks", "work_conserving"] = Field(
        "blocks",
        description="blocks of exactly the lookahead, as in the paper, or as Paceline serves: a"
        " free target takes all waiting tokens, and Equation 1 does not bind",
    )
    image: Literal["png", "svg"] = Field("png", description="format of the pictures")
    output_directory: Path = Field(Path("simulation"), description="directory for the files")
    json_file: ResultFile | None = option(
        None, description="file for the numbers in the figures", flag="json"
    )

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        for name, whats in _GOES_WITH.items():
            if name in self.model_fields_set and self.what not in whats:
                flag, wanted = name.replace("_", "-"), " and ".join(sorted(whats, reverse=True))
                raise ValueError(f"--{flag} goes with {wanted}, not {self.what}")
        if self.per_gpu and self.what in {"table1", "ewif", "heads"}:
            raise ValueError(f"--per-gpu goes with pictures and rows, not {self.what}")
        return self


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        SimulateSettings, arguments, program="paceline simulate", examples=_EXAMPLES
    )
    settings.output_directory.mkdir(parents=True, exist_ok=True)
    if settings.what in _TREES:
        show_trees(_tree_options(settings))
        return 0
    if settings.what in _HEADS:
        show_heads(
            latency=settings.head_latency,
            decay=settings.head_decay,
            target_counts=settings.sp,
            token_count=settings.tokens,
            repeats=settings.repeats,
            json_file=settings.json_file,
        )
        return 0
    is_exact = settings.what not in {"all", "table1"} or _show_table1()
    is_exact = (settings.what not in {"all", "ewif"} or _show_ewif()) and is_exact
    figures = [figure for figure in _FIGURES if settings.what in {"all", figure}]
    rows = [_show_figure(figure, settings) for figure in figures]
    if settings.json_file is not None:
        write_json(settings.json_file, rows, table1_is_exact=is_exact)
        print(f"{settings.json_file} has what they show.")
    return 0 if is_exact else 1


def _show_table1() -> bool:
    rows = table1()
    columns = (Column("", "name"), *map(_moment_column, range(len(MOMENTS))))
    print("Table 1: tokens that are final by a time, in target forwards; lookahead 1, drafter 1/7")
    print_table(rows, columns)
    is_exact = all(row.ours == row.paper for row in rows)
    print("All as in the paper.\n" if is_exact else "NOT as in the paper.\n")
    return is_exact


def _moment_column(at: int) -> Column:
    return Column(f"t = {MOMENTS[at]}", lambda row: _beside_paper(row.ours[at], row.paper[at]))


def _beside_paper(ours: object, paper: object) -> str:
    return f"{ours}" if ours == paper else f"[bold red]{ours}[/], not {paper}"


_EWIF_COLUMNS = (
    Column("data", "data"),
    Column(
        "draft tokens",
        lambda row: ", then ".join(f"{count} by {drafter.name}" for drafter, count in row.stages),
    ),
    Column("factor", lambda row: _beside_paper(row.ours, row.paper)),
    Column("in reversed order", lambda row: row.reversed_order if len(row.stages) > 1 else ""),
)


def _show_ewif() -> bool:
    rows = ewif_table()
    print("Table 1 of the cascades' paper: expected walltime improvement, plain decoding is 1")
    print_table(rows, _EWIF_COLUMNS)
    is_exact = all(row.ours == row.paper for row in rows)
    print("All as in the paper.\n" if is_exact else "NOT as in the paper.\n")
    return is_exact


def _show_figure(name: str, settings: SimulateSettings) -> dict[str, Any]:
    """Compute a figure, draw it, tell what it shows, and return that as a JSON row."""
    title, lookahead = _FIGURES[name]
    experiment = Experiment(
        token_count=settings.tokens,
        repeats=settings.repeats,
        target_count=settings.targets,
        lookahead=lookahead,
        dispatch=DispatchPolicy(settings.dispatch),
    )
    grid = Grid.full() if settings.grid == "full" else Grid.coarse()
    cells = _compute(title, columns(experiment, grid))
    print(f"{title}: {_conditions(experiment)}\nBy the exact expectation over all draws:")
    summary = summarise(cells)
    for claim in check_claims(summary):
        print(f"- {claim}")
    if settings.per_gpu:
        print(f"- {per_gpu_claim(cells, target_count=experiment.target_count)}")
    picture = settings.output_directory / f"{name}.{settings.image}"
    heading = f"{title} of the DSI paper, by the protocol on a virtual clock\n"
    _draw(cells, picture, panels=_PANELS[name], title=heading + _conditions(experiment))
    write_cells(picture.with_suffix(".csv"), cells)
    print(f"{picture} and {picture.with_suffix('.csv').name} have them all.\n")
    return {"figure": name, **asdict(experiment), "dispatch": settings.dispatch} | asdict(summary)


def _tree_options(settings: SimulateSettings) -> TreeOptions:
    return TreeOptions(
        is_grid=settings.what == "trees",
        is_full=settings.grid == "full",
        shapes=tuple(
            Shape(width, settings.branches) if width > 1 else Shape() for width in settings.widths
        ),
        rank_decay=settings.rank_decay,
        target_counts=settings.sp,
        rows=(settings.target_row, settings.drafter_row),
        token_count=settings.tokens,
        repeats=settings.repeats,
        self_rates=settings.self_rates,
        self_nodes=settings.self_nodes,
        per_gpu=settings.per_gpu,
        directory=settings.output_directory,
        image=settings.image,
        json_file=settings.json_file,
    )


def _draw(cells: Sequence[Cell], picture: Path, *, panels: Sequence[str], title: str) -> None:
    # Here, because loading it takes most of a second.
    from paceline_bench.charts import save_figure
    from paceline_bench.simulate.pictures import draw_heatmaps

    save_figure(draw_heatmaps(cells, panels=panels, title=title), picture)


def _compute(title: str, work: Sequence[GridColumn]) -> list[Cell]:
    with progress(title, total=len(work)) as step:
        filled = compute_all(
            fill_column,
            work,
            on_done=lambda column: step(f"drafter at {column.drafter_percent} %"),
        )
    return [cell for column in filled for cell in column]


def _conditions(experiment: Experiment) -> str:
    lookahead = f"lookahead {experiment.lookahead}" if experiment.lookahead else "best lookahead"
    served = experiment.dispatch is DispatchPolicy.WORK_CONSERVING
    return (
        f"{lookahead}; {experiment.repeats} generations of {experiment.token_count} tokens a cell;"
        f" DSI on {experiment.target_count} targets, {'as served' if served else 'in blocks'}"
    )
