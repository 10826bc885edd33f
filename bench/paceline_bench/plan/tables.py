"""What a forecast says: a table, what follows from it, and JSON rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.table import Column, markdown
from paceline_contract.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_bench.plan.forecast import Forecast
    from paceline_bench.report import Results, Row
    from paceline_bench.simulated_servers import SimulatedServers

# A smaller gain is not worth a GPU, nor the planner's while (AUTO takes what is simpler).
_WORTHWHILE_GAIN = 0.02
_NOTABLE_GAIN = 0.001
_NOTABLE_ERROR = 0.0005


def columns(*, token_count: int | None = None) -> tuple[Column, ...]:
    """Return the columns for `json_rows`: times with errors, and what one more target is worth.

    Args:
        token_count: Tokens of a generation, to say instead what each device makes.
    """
    if token_count is None:
        last = Column("gain per target", _gain_words)
    else:
        last = Column(
            "tokens/s per GPU",
            lambda row: token_count / row["mean_ms"] * 1e3 / row["gpu_count"],
            "{:.1f}",
        )
    return (
        Column("", "name"),
        Column("GPUs", "gpu_count"),
        Column("lookahead", lambda row: row["lookahead"] or None),
        Column("tokens/forward", "tokens_per_forward", "{:.2f}"),
        Column("ms", _milliseconds),
        Column("speed-up", "speed_up", "{:.2f}x"),
        last,
    )


def conclusions(rows: Sequence[Forecast], servers: SimulatedServers) -> list[str]:
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
        lines.append(f"SI is slower than plain decoding{_why_slower(servers)}.")
    if enough is speculative and servers.target_count == 1:
        lines.append("DSI needs a second target to beat SI.")
    return lines


def json_rows(rows: Sequence[Forecast]) -> list[Row]:
    """Return a row for each forecast; times in ms."""
    return [
        _json_row(row, above, plain=rows[0])
        for row, above in zip(rows, [None, *rows], strict=False)
    ]


def _json_row(row: Forecast, above: Forecast | None, *, plain: Forecast) -> Row:
    gain, error = _marginal_gain(row, above) or (None, None)
    return {
        "name": _name(row),
        "strategy": row.label,
        "method": row.method.label,
        "gpu_count": row.gpu_count,
        "target_count": row.target_count,
        "lookahead": row.lookahead,
        "width": row.shape.width,
        "branches": row.shape.branches,
        "tokens_per_forward": row.tokens_per_forward,
        "mean_ms": row.mean_ns / 1e6,
        "error_ms": row.error_ns / 1e6,
        "speed_up": plain.mean_ns / row.mean_ns,
        "gain_per_target": gain,
        "gain_error": error,
    }


_OF_A_PAGE = (
    Column(
        "",
        lambda row: (
            row["strategy"]
            + (f", {counted(row['target_count'], 'target')}" if row["strategy"] == "DSI" else "")
        ),
    ),
    Column("lookahead", lambda row: row["lookahead"] or None),
    Column("ms", lambda row: f"{row['mean_ms']:.0f} ± {row['error_ms']:.0f}"),
    Column("speed-up", "speed_up", "{:.2f}x"),
    Column("gain per target", "gain_per_target", "{:+.1%}"),
)


def plan(results: Results) -> str:
    """What one more target is worth, by an example: for the pages."""
    content = results["plan"]
    return f"`{content['circumstances']['command']}`\n\n{markdown(content['rows'], _OF_A_PAGE)}"


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


def _why_slower(servers: SimulatedServers) -> str:
    ratio = float(servers.drafter.step / servers.target.step)
    if servers.acceptance_rate >= ratio:
        return ""
    return (
        f": its acceptance rate of {servers.acceptance_rate:.0%} is below the drafter's latency,"
        f" {ratio:.0%} of the target's"
    )


def _milliseconds(row: Row) -> str:
    """Write a mean and its error in three digits or more, the error only where it shows."""
    mean, error = row["mean_ms"], row["error_ms"]
    decimals = 0 if mean >= 100 else 1 if mean >= 10 else 2
    notable = error >= 0.5 * 10**-decimals
    return f"{mean:.{decimals}f}" + (f" ± {error:.{decimals}f}" if notable else "")


def _marginal_gain(row: Forecast, above: Forecast | None) -> tuple[float, float] | None:
    """Return what each of the targets added since the row above is worth, and its error.

    It is the part of that row's time by which this one is shorter, over the added targets.
    """
    if above is None or (above.label, above.shape) != (row.label, row.shape):
        return None
    gain, error = row.gain_over(above)
    added = row.target_count - above.target_count
    return gain / added, error / added


def _gain_words(row: Row) -> str:
    if row["gain_per_target"] is None:
        return ""
    error = row["gain_error"]
    return f"{row['gain_per_target']:+.1%}" + (f" ± {error:.1%}" if error >= _NOTABLE_ERROR else "")
