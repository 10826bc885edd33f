"""Real models under load as a picture."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline_bench.charts import COLOURS, new_figure
from paceline_bench.pair.contest import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline_bench.report import Row

_STYLES = {Group.SERVICES.value: "-", Group.ENGINE.value: "--", Group.LIBRARY.value: ":"}
# Told apart by their styles as well; the library's are no strategies.
_LIBRARY_COLOURS = ("#d55e00", "#cc79a7")


def draw_peers(rows: Sequence[Row], *, title: str) -> Figure:
    """Draw throughput and inter-token latency over the number of streams."""
    figure = new_figure(width=14.0, height=4.5)
    figure.suptitle(title)
    together, middle, tail = figure.subplots(1, 3)
    _draw(together, rows, "tokens/s, all streams together", lambda row: row["tokens_per_second"])
    together.set_ylim(bottom=0)
    together.legend(frameon=False, fontsize="small")
    for axes, name in ((middle, "p50"), (tail, "p99")):
        told = [row for row in rows if row["itl_ms"][name] is not None]
        itl_ms = partial(_itl_ms, name=name)
        _draw(axes, told, f"inter-token latency, {name}, ms", itl_ms)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    return figure


def _itl_ms(row: Row, *, name: str) -> float:
    return float(row["itl_ms"][name])


def _draw(axes: Axes, rows: Sequence[Row], what: str, value: Callable[[Row], float]) -> None:
    library = list(dict.fromkeys(it["name"] for it in rows if it["group"] == Group.LIBRARY.value))
    colours = {**COLOURS, **dict(zip(library, _LIBRARY_COLOURS, strict=False))}
    for group, name in dict.fromkeys((row["group"], row["name"]) for row in rows):
        own = [row for row in rows if (row["group"], row["name"]) == (group, name)]
        axes.plot(
            [row["stream_count"] for row in own],
            [value(row) for row in own],
            _STYLES[group],
            color=colours[name],
            label=f"{group}: {name}",
            marker="o",
        )
    counts = sorted({row["stream_count"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("streams, or texts, at the same time")
    axes.set_ylabel(what)
    axes.grid(alpha=0.3)
