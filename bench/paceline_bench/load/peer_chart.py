"""Real models under load as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.charts import COLOURS, Series, draw_lines, new_figure
from paceline_bench.pair.contest import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure

    from paceline_bench.report import Row

_LINES = {Group.SERVICES.value: "-", Group.ENGINE.value: "--", Group.LIBRARY.value: ":"}
# Their line styles tell them apart, too; the library's are no strategies.
_LIBRARY_COLOURS = ("#d55e00", "#cc79a7")
_STREAMS = "streams, or texts, at the same time"


def draw_peers(rows: Sequence[Row], *, title: str) -> Figure:
    """Draw throughput and inter-token latency over the number of streams."""
    figure = new_figure(width=14.0, height=4.5, title=title)
    together, middle, tail = figure.subplots(1, 3)
    series = _series(rows, lambda row: row["tokens_per_second"])
    draw_lines(together, series, x_label=_STREAMS, y_label="tokens/s, all streams together")
    together.set_ylim(bottom=0)
    for axes, name in ((middle, "p50"), (tail, "p99")):
        told = [row | {"ms": ms} for row in rows if (ms := row["itl_ms"][name]) is not None]
        series = _series(told, lambda row: row["ms"])
        words = f"inter-token latency, {name}, ms"
        draw_lines(axes, series, x_label=_STREAMS, y_label=words, doubling="xy", has_legend=False)
    return figure


def _series(rows: Sequence[Row], value: Callable[[Row], float]) -> list[Series]:
    library = dict.fromkeys(row["name"] for row in rows if row["group"] == Group.LIBRARY.value)
    colours = {**COLOURS, **dict(zip(library, _LIBRARY_COLOURS, strict=False))}
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        own = points.setdefault((row["group"], row["name"]), [])
        own.append((row["stream_count"], value(row)))
    return [
        Series(points=own, line=_LINES[group], colour=colours[name], label=f"{group}: {name}")
        for (group, name), own in points.items()
    ]
