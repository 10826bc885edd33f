"""Tables of what bench/gpu.py measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline_bench.table import Column, markdown

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_bench.report import Results, Row


def gpu_forwards(results: Results) -> str:
    """What forwards take, by rows and by the tokens before them, as they are and captured."""
    rows = results["gpu"]["forwards"]
    counts = sorted({count for row in rows for count in row["ms"]}, key=int)
    return markdown(
        rows,
        [
            Column("model", _model),
            Column("tokens before", "length"),
            *(
                Column(f"{count} row" if count == "1" else f"{count} rows", _ms(count), "{:.2f}")
                for count in counts
            ),
        ],
    )


def gpu_texts(results: Results) -> str:
    """What a forward of one row of each of several sequences takes."""
    rows = results["gpu"]["texts"]
    sizes = list(dict.fromkeys((row["count"], row["length"]) for row in rows))
    models: dict[str, dict[tuple[int, int], float]] = {}
    for row in rows:
        models.setdefault(_model(row), {})[row["count"], row["length"]] = row["ms"]
    return markdown(
        models.items(),
        [
            Column("model", lambda each: each[0]),
            *(Column(f"{size[0]} of {size[1]}", _texts(size), "{:.2f}") for size in sizes),
        ],
    )


def _model(row: Row) -> str:
    return f"{row['model']}{', captured' if row['captured'] else ''}"


def _ms(count: str) -> Callable[[Row], object]:
    return lambda row: row["ms"].get(count)


def _texts(size: tuple[int, int]) -> Callable[[Any], object]:
    return lambda each: each[1].get(size)
