"""What the heat maps say: the ratios, the paper's claims checked, and the cells as CSV."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from paceline_bench.heatmaps import Cell

__all__ = ["RATIOS", "check_claims", "write_cells"]

Times: TypeAlias = tuple[float, float, float]  # of non-SI, SI and DSI

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


def check_claims(cells: Sequence[Cell]) -> list[str]:
    """Hold the paper's claims against the cells, by their exact expectations; one line each."""
    return [
        _where_si_is_slower(cells),
        _never_slower(cells, "non-SI / DSI", rival="non-SI"),
        _never_slower(cells, "SI / DSI", rival="SI"),
        _largest_gain(cells),
        _repeats(cells),
    ]


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


def _where_si_is_slower(cells: Sequence[Cell]) -> str:
    slower = {id(cell) for cell in cells if cell.si.expected > cell.non_si + _ROUNDING}
    below = {id(cell) for cell in cells if cell.acceptance_percent < cell.drafter_percent}
    return (
        f"SI is slower than non-SI in {len(slower)} of {len(cells)} cells:"
        f" {len(slower & below)} of the {len(below)} whose acceptance rate is below the drafter's"
        f" relative latency, and {len(slower - below) or 'no'} others"
    )


def _never_slower(cells: Sequence[Cell], ratio: str, *, rival: str) -> str:
    faster = RATIOS[ratio]
    slower = [cell for cell in cells if faster(cell.expected) < 1 - _ROUNDING]
    best = max(cells, key=lambda cell: faster(cell.expected))
    most = f"{faster(best.expected):.3g} times as fast at best ({_place(best)})"
    if not slower:
        return f"DSI is never slower than {rival}, and {most}"
    worst = min(slower, key=lambda cell: faster(cell.expected))
    lookaheads = sorted({cell.dsi.lookahead for cell in slower})
    return (
        f"DSI is slower than {rival} in {len(slower)} of {len(cells)} cells, by"
        f" {1 / faster(worst.expected) - 1:.1%} at most ({_place(worst)}); its lookahead is"
        f" {' or '.join(map(str, lookaheads))} there. It is {most}"
    )


def _largest_gain(cells: Sequence[Cell]) -> str:
    ahead = RATIOS["min(SI, non-SI) / DSI"]
    best = max(cells, key=lambda cell: ahead(cell.expected))
    mean = sum(ahead(cell.expected) for cell in cells) / len(cells)
    return (
        f"DSI is up to {ahead(best.expected):.2f} times as fast as the better of the two"
        f" ({_place(best)}), {mean:.2f} times on average; the paper's Figure 2 has up to 1.6"
    )


def _repeats(cells: Sequence[Cell]) -> str:
    ahead = RATIOS["min(SI, non-SI) / DSI"]
    best = max(cells, key=lambda cell: ahead(cell.means))
    behind = sum(cell.gain < -2 * cell.gain_error - _ROUNDING for cell in cells)
    return (
        f"By the means of the repeats, which are drawn: up to {ahead(best.means):.2f} times"
        f" ({_place(best)}), and behind by more than two standard errors in {behind} of"
        f" {len(cells)} cells"
    )


def _place(cell: Cell) -> str:
    return (
        f"drafter {cell.drafter_percent / 100:.2f}, acceptance {cell.acceptance_percent / 100:.2f}"
    )
