"""What the heat maps say: the ratios, the paper's claims checked, and the cells as CSV."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from paceline_bench.simulate.heatmaps import Cell

Times: TypeAlias = tuple[float, float, float]  # of non-SI, SI and DSI

Place: TypeAlias = tuple[float, float]  # drafter latency, acceptance rate

# X / Y: how many times as fast as X is Y.
RATIOS: dict[str, Callable[[Times], float]] = {
    "non-SI / SI": lambda times: times[0] / times[1],
    "SI / DSI": lambda times: times[1] / times[2],
    "non-SI / DSI": lambda times: times[0] / times[2],
    "min(SI, non-SI) / DSI": lambda times: min(times[0], times[1]) / times[2],
}
_ROUNDING = 1e-9  # of expectations
_HEADINGS = (
    "drafter_latency",
    "acceptance_rate",
    "si_lookahead",
    "dsi_lookahead",
    "non_si",
    "si",
    "si_error",
    "si_expected",
    "dsi",
    "dsi_error",
    "dsi_expected",
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How DSI fares against a rival, by the exact expectations; cells where equal are no loss.

    Attributes:
        slower_count: Cells in which it is slower.
        worst_loss: The largest part by which it takes longer; 0 if it never does.
        worst_place: Where: drafter latency and acceptance rate.
        slower_lookaheads: DSI's, in the cells in which it is slower.
        best_ratio: The rival's time over its own where that is largest.
        best_place: Where that is.
        mean_ratio: The mean of all cells.
    """

    slower_count: int
    worst_loss: float
    worst_place: Place | None
    slower_lookaheads: tuple[int, ...]
    best_ratio: float
    best_place: Place
    mean_ratio: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What the cells of a grid come to.

    Attributes:
        cell_count: How many there are.
        below_count: Those whose acceptance rate is below the drafter's relative latency.
        si_slower_below_count: Of these, those in which SI is slower than non-SI.
        si_slower_elsewhere_count: Of the others.
        over_non_si: DSI against non-SI.
        over_si: DSI against SI.
        over_both: DSI against the better of the two.
        drawn_best_ratio: The largest against the better of the two, by the means of the repeats.
        drawn_best_place: Where that is.
        drawn_behind_count: Cells in which DSI is behind it by more than two standard errors.
    """

    cell_count: int
    below_count: int
    si_slower_below_count: int
    si_slower_elsewhere_count: int
    over_non_si: Comparison
    over_si: Comparison
    over_both: Comparison
    drawn_best_ratio: float
    drawn_best_place: Place
    drawn_behind_count: int


def summarise(cells: Sequence[Cell]) -> Summary:
    """Compare the strategies over at least one cell."""
    slower = {_place(cell) for cell in cells if cell.si.expected > cell.non_si + _ROUNDING}
    below = {_place(cell) for cell in cells if cell.acceptance_percent < cell.drafter_percent}
    ahead = RATIOS["min(SI, non-SI) / DSI"]
    best = max(cells, key=lambda cell: ahead(cell.means))
    return Summary(
        cell_count=len(cells),
        below_count=len(below),
        si_slower_below_count=len(slower & below),
        si_slower_elsewhere_count=len(slower - below),
        over_non_si=_compare(cells, "non-SI / DSI"),
        over_si=_compare(cells, "SI / DSI"),
        over_both=_compare(cells, "min(SI, non-SI) / DSI"),
        drawn_best_ratio=ahead(best.means),
        drawn_best_place=_place(best),
        drawn_behind_count=sum(cell.gain < -2 * cell.gain_error - _ROUNDING for cell in cells),
    )


def check_claims(summary: Summary) -> list[str]:
    """Hold the paper's claims against what was found; one line each."""
    gain, below_count = summary.over_both, summary.si_slower_below_count
    count, others_count = summary.cell_count, summary.si_slower_elsewhere_count
    return [
        (
            f"SI is slower than non-SI in {below_count + others_count} of {count} cells:"
            f" {below_count} of the {summary.below_count} whose acceptance rate is below the"
            f" drafter's relative latency, and {others_count or 'no'} others"
        ),
        _never_slower(summary.over_non_si, count, rival="non-SI"),
        _never_slower(summary.over_si, count, rival="SI"),
        (
            f"DSI is up to {gain.best_ratio:.2f} times as fast as the better of the two"
            f" ({_words(gain.best_place)}), {gain.mean_ratio:.2f} times on average; the paper's"
            " Figure 2 has up to 1.6"
        ),
        (
            "By the means of the repeats, which are drawn: up to"
            f" {summary.drawn_best_ratio:.2f} times ({_words(summary.drawn_best_place)}), and"
            f" behind by more than two standard errors in {summary.drawn_behind_count} of {count}"
            " cells"
        ),
    ]


def per_gpu_claim(cells: Sequence[Cell], *, target_count: int) -> str:
    """Say what each device makes of it: SI's drafter and target can share one."""
    gain, gpu_count = _compare(cells, "SI / DSI"), target_count + 1
    return (
        f"Per GPU, where SI has 1 and DSI {gpu_count}: DSI makes up to"
        f" {gain.best_ratio / gpu_count:.2f} of SI's tokens ({_words(gain.best_place)}),"
        f" {gain.mean_ratio / gpu_count:.2f} on average"
    )


def write_cells(path: Path, cells: Iterable[Cell]) -> None:
    """Write the cells as CSV: a line each, times in target forwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_HEADINGS)
        writer.writerows(map(_fields, cells))


def _fields(cell: Cell) -> tuple[str, ...]:
    times = (
        cell.non_si,
        *(cell.si.mean, cell.si.error, cell.si.expected),
        *(cell.dsi.mean, cell.dsi.error, cell.dsi.expected),
    )
    return (
        f"{cell.drafter_percent / 100:.2f}",
        f"{cell.acceptance_percent / 100:.2f}",
        str(cell.si.lookahead),
        str(cell.dsi.lookahead),
        *(f"{time:.5g}" for time in times),
    )


def _compare(cells: Sequence[Cell], ratio: str) -> Comparison:
    ratios = {_place(cell): RATIOS[ratio](cell.expected) for cell in cells}
    slower = [cell for cell in cells if ratios[_place(cell)] < 1 - _ROUNDING]
    worst = min(slower, key=lambda cell: ratios[_place(cell)], default=None)
    best = max(ratios, key=lambda place: ratios[place])
    return Comparison(
        slower_count=len(slower),
        worst_loss=1 / ratios[_place(worst)] - 1 if worst else 0.0,
        worst_place=_place(worst) if worst else None,
        slower_lookaheads=tuple(sorted({cell.dsi.lookahead for cell in slower})),
        best_ratio=ratios[best],
        best_place=best,
        mean_ratio=sum(ratios.values()) / len(ratios),
    )


def _never_slower(found: Comparison, cell_count: int, *, rival: str) -> str:
    most = f"{found.best_ratio:.3g} times as fast at best ({_words(found.best_place)})"
    if found.worst_place is None:
        return f"DSI is never slower than {rival}, and {most}"
    return (
        f"DSI is slower than {rival} in {found.slower_count} of {cell_count} cells, by"
        f" {found.worst_loss:.1%} at most ({_words(found.worst_place)}); its lookahead is"
        f" {' or '.join(map(str, found.slower_lookaheads))} there. It is {most}"
    )


def _place(cell: Cell) -> Place:
    return cell.drafter_percent / 100, cell.acceptance_percent / 100


def _words(place: Place) -> str:
    return f"drafter {place[0]:.2f}, acceptance {place[1]:.2f}"
