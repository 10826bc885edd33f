"""What a forecast says: a table, what follows from it, and JSON rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.report import table, times
from paceline_contract.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_bench.node import SimulatedNode
    from paceline_bench.plan.forecast import Forecast
    from paceline_bench.report import Results, Row

HEADINGS = ("", "GPUs", "lookahead", "tokens/forward", "ms", "speed-up", "gain per target")
PER_GPU = "tokens/s per GPU"
"""Stands above the last column instead, where `table_rows` is told of tokens."""
# A smaller gain is not worth a GPU, nor the planner's while (AUTO takes what is simpler).
_WORTHWHILE_GAIN = 0.02
_NOTABLE_GAIN = 0.001
_NOTABLE_ERROR = 0.0005


def table_rows(
    rows: Sequence[Forecast], *, token_count: int | None = None
) -> list[tuple[str, ...]]:
    """Lay out the rows for HEADINGS: times with errors, and what one more target is worth.

    Args:
        rows: The first is plain decoding.
        token_count: To say instead what each device makes: the tokens of a generation.
    """
    plain = rows[0]
    return [
        (
            _name(row),
            str(row.gpu_count),
            str(row.lookahead or "-"),
            f"{row.tokens_per_forward:.2f}",
            _milliseconds(row),
            f"{plain.mean_ns / row.mean_ns:.2f}x",
            _gain_words(_marginal_gain(rows, index))
            if token_count is None
            else f"{token_count / row.mean_ns * 1e9 / row.gpu_count:.1f}",
        )
        for index, row in enumerate(rows)
    ]


def conclusions(rows: Sequence[Forecast], node: SimulatedNode) -> list[str]:
    """Say what to do, and why: the fewest GPUs that come near the fastest."""
    plain, speculative = rows[0], rows[1]
    best = min(rows, key=lambda row: row.mean_ns)
    near = [row for row in rows if row.mean_ns <= best.mean_ns * (1 + _WORTHWHILE_GAIN)]
    enough = min(near, key=lambda row: row.gpu_count)
    if enough is plain:
        lines = ["Speculation does not pay here: decode plainly."]
    else:
        lines = [f"Take {_description(enough)}: {_speed_ups(enough, rows)}."]
    gain = 1 - best.mean_ns / enough.mean_ns
    if gain >= _NOTABLE_GAIN:
        lines.append(f"The fastest is {_description(best)}, by {gain:.1%}: hardly worth it.")
    if speculative.mean_ns > plain.mean_ns:
        lines.append(f"SI is slower than plain decoding{_why_slower(node)}.")
    if enough is speculative and node.target_count == 1:
        lines.append("DSI needs a second target to beat SI.")
    return lines


def json_rows(rows: Sequence[Forecast]) -> list[Row]:
    """Return a row for each forecast; times in ms."""
    return [
        {
            "strategy": row.label,
            "gpu_count": row.gpu_count,
            "target_count": row.target_count,
            "lookahead": row.lookahead,
            "width": row.shape.width,
            "branches": row.shape.branches,
            "tokens_per_forward": row.tokens_per_forward,
            "mean_ms": row.mean_ns / 1e6,
            "error_ms": row.error_ns / 1e6,
            "speed_up": rows[0].mean_ns / row.mean_ns,
            "gain_per_target": gain[0] if (gain := _marginal_gain(rows, index)) else None,
        }
        for index, row in enumerate(rows)
    ]


def plan(results: Results) -> str:
    """What one more target is worth, by an example: for the pages."""
    content = results["plan"]
    columns: dict[str, Callable[[Row], str]] = {
        "": lambda row: (
            f"DSI, {counted(row['target_count'], 'target')}"
            if row["strategy"] == "DSI"
            else row["strategy"]
        ),
        "lookahead": lambda row: str(row["lookahead"] or "-"),
        "ms": lambda row: f"{row['mean_ms']:.0f} ± {row['error_ms']:.0f}",
        "speed-up": lambda row: times(row["speed_up"]),
        "gain per target": lambda row: (
            "-" if row["gain_per_target"] is None else f"{row['gain_per_target']:+.1%}"
        ),
    }
    return f"`{content['circumstances']['command']}`\n\n{table(content['rows'], columns)}"


def _name(row: Forecast) -> str:
    targets = f" on {counted(row.target_count, 'target')}" if row.method.overlaps else ""
    return row.label + targets + (f", width {row.shape.width}" if row.shape.width > 1 else "")


def _description(row: Forecast) -> str:
    gpus = counted(row.gpu_count, "GPU")
    return f"{_name(row)} with lookahead {row.lookahead} ({gpus})" if row.lookahead else _name(row)


def _speed_ups(row: Forecast, rows: Sequence[Forecast]) -> str:
    plain, speculative = rows[0], rows[1]
    text = f"{plain.mean_ns / row.mean_ns:.2f} times as fast as plain decoding"
    if row is not speculative:
        text += f", {speculative.mean_ns / row.mean_ns:.2f} times as fast as SI"
    return text


def _why_slower(node: SimulatedNode) -> str:
    ratio = float(node.drafter.step / node.target.step)
    if node.acceptance_rate >= ratio:
        return ""
    return (
        f": its acceptance rate of {node.acceptance_rate:.0%} is below the drafter's latency,"
        f" {ratio:.0%} of the target's"
    )


def _milliseconds(row: Forecast) -> str:
    """Write a mean and its error in three digits or more, the error only where it shows."""
    mean, error = row.mean_ns / 1e6, row.error_ns / 1e6
    decimals = 0 if mean >= 100 else 1 if mean >= 10 else 2
    notable = error >= 0.5 * 10**-decimals
    return f"{mean:.{decimals}f}" + (f" ± {error:.{decimals}f}" if notable else "")


def _marginal_gain(rows: Sequence[Forecast], index: int) -> tuple[float, float] | None:
    """Return what each of the targets added since the row above is worth, and its error.

    It is the part of that row's time by which this one is shorter, over the added targets.
    """
    row, above = rows[index], rows[index - 1]
    if index == 0 or (above.label, above.shape) != (row.label, row.shape):
        return None
    gain, error = row.gain_over(above)
    added = row.target_count - above.target_count
    return gain / added, error / added


def _gain_words(marginal: tuple[float, float] | None) -> str:
    if marginal is None:
        return ""
    gain, error = marginal
    return f"{gain:+.1%}" + (f" ± {error:.1%}" if error >= _NOTABLE_ERROR else "")
