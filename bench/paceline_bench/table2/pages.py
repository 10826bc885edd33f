"""What the pages say of `paceline bench table2`."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from paceline_bench.report import circumstances_line, markdown_table, times
from paceline_bench.table2.report import BREAKDOWN_HEADINGS, MOST_OVER_FLOOR, WORTH_EXPLAINING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline_bench.report import Results, Row

__all__ = [
    "table2",
    "table2_breakdown",
    "table2_headline",
    "table2_reference",
    "table2_restarts",
    "table2_summary",
]

_STRATEGIES = ("non-SI", "SI", "DSI")
_BELOW_FLOOR = (
    "\\* Below its floor: the bare calls took longer than its own did, so the machine was not the"
    " same all the time."
)


def table2_headline(results: Results) -> str:
    """Table 2 in one sentence: from the least to the most that DSI gains, with equal outputs."""
    rows = [by_strategy["DSI"] for _, by_strategy in _table2_rows(results["table2"])]
    gains = [
        (row["speed_up_over_non_si"], row["speed_up_over_si"])
        for row in rows
        if row.get("speed_up_over_si")
    ]
    plain, si = (
        f"{min(ratios):.2f} to {max(ratios):.2f} times" for ratios in zip(*gains, strict=True)
    )
    return (
        f"**{plain} as fast as plain decoding, {si} as fast as ordinary speculation**: DSI on"
        f" {len(gains)} rows of Table 2 of the DSI paper."
    )


def table2_summary(results: Results) -> str:
    """Table 2 for those in a hurry."""
    rows = list(_table2_rows(results["table2"]))
    headings = (
        "",
        *(f"{name}, ms" for name in _STRATEGIES),
        *("DSI over SI", "ideal", "DSI over non-SI"),
    )
    lines = [
        [
            name,
            *(f"{by_strategy[strategy]['median_ms']:.0f}" for strategy in _STRATEGIES),
            times(by_strategy["DSI"].get("speed_up_over_si")),
            times(by_strategy["DSI"].get("ideal_speed_up_over_si")),
            times(by_strategy["DSI"].get("speed_up_over_non_si")),
        ]
        for name, by_strategy in rows
    ]
    return f"{_table2_choices(results['table2'])}\n\n{markdown_table(headings, lines)}"


def table2(results: Results) -> str:
    """Table 2 with floors and ideals."""
    content = results["table2"]
    headings = ("row", *(part for name in _STRATEGIES for part in (f"{name} ms", "÷ floor")))
    lines = [
        [
            name,
            *_over_floors(by_strategy),
            f"{by_strategy['DSI']['online_over_ideal']:.3f}",
            times(by_strategy["DSI"].get("speed_up_over_si")),
            times(by_strategy["DSI"].get("ideal_speed_up_over_si")),
            times(by_strategy["DSI"]["paper_speed_up_over_si"]),
        ]
        for name, by_strategy in _table2_rows(content)
    ]
    more = ("DSI ÷ ideal", "DSI over SI", "ideal", "paper")
    overheads = [echo["overhead_ns"] / 1e6 for echo in content["echoes"]]
    words = f"A bare call took {min(overheads):.2f} to {max(overheads):.2f} ms beyond its sleep."
    parts = [
        f"{circumstances_line(content)}.",
        f"{_table2_choices(content)} {words}",
        markdown_table((*headings, *more), lines).strip(),
    ]
    parts.append(_within_goal(content))
    below = any(row["online_over_floor"] < 1 for row in content["rows"])
    return "\n\n".join([*parts, _BELOW_FLOOR] if below else parts)


def _within_goal(content: Row) -> str:
    rows = [by_strategy for _, by_strategy in _table2_rows(content)]
    counts = [
        f"{name} in {sum(row[name]['online_over_floor'] <= MOST_OVER_FLOOR for row in rows)}"
        for name in _STRATEGIES
    ]
    goal = f"within the goal of {MOST_OVER_FLOOR:g} of the floor"
    return f"Of {len(rows)} rows, {goal}: {', '.join(counts)}."


def table2_restarts(results: Results) -> str:
    """What a rejection costs DSI, beside a bare call."""
    headings = (
        *("row", "bare call, one way, ms", "new draft, ms", "÷ one way"),
        *("new verification, ms", "÷ one way", "restarts"),
    )
    lines = []
    for name, by_strategy in _table2_rows(results["table2"]):
        row = by_strategy["DSI"]
        one_way_us = row["echo_one_way_us"]
        draft, verify = (
            _over_one_way(row[f"restart_{it}_us"], one_way_us) for it in ("draft", "verify")
        )
        lines.append([name, f"{one_way_us / 1e3:.2f}", *draft, *verify, str(row["restarts"])])
    return markdown_table(headings, lines)


def _over_one_way(restart_us: float | None, one_way_us: float) -> list[str]:
    if restart_us is None:
        return ["-", "-"]
    return [f"{restart_us / 1e3:.2f}", f"{restart_us / one_way_us:.1f}"]


def table2_breakdown(results: Results) -> str:
    """Where the time went of what takes much longer than its ideal."""
    lines = [
        [name, strategy, *(f"{row['breakdown_ms'][part]:.1f}" for part in BREAKDOWN_HEADINGS)]
        for name, by_strategy in _table2_rows(results["table2"])
        for strategy, row in ((it, by_strategy[it]) for it in _STRATEGIES)
        if row["breakdown_ms"] is not None and row["online_over_ideal"] > WORTH_EXPLAINING
    ]
    if not lines:
        return f"Nothing takes more than {WORTH_EXPLAINING:g} of its ideal."
    return markdown_table(("row", "strategy", *BREAKDOWN_HEADINGS.values()), lines)


def table2_reference(results: Results) -> str:
    """Absolute times beside those of the paper's own code."""
    headings = (
        *("row", "SI ms", "DSI ms", "reference's SI ms", "reference's DSI ms"),
        *("repaired SI ms", "repaired DSI ms"),
    )
    lines = []
    for name, by_strategy in _table2_rows(results["table2"]):
        reference_ms = by_strategy["DSI"]["reference_ms"]
        own = [f"{by_strategy[strategy]['median_ms']:.0f}" for strategy in ("SI", "DSI")]
        others = [str(reference_ms[it]) for it in ("si", "dsi", "repaired_si", "repaired_dsi")]
        lines.append([name, *own, *others])
    return markdown_table(headings, lines)


def _table2_choices(content: Row) -> str:
    """Say how many prompts there were, and what SI's lookahead was chosen of."""
    lookaheads = {
        count for row in content["sweeps"] if row["strategy"] == "SI" for count in row["lookaheads"]
    }
    return (
        f"Medians of {content['rows'][0]['repeats']} prompts; SI at the best of lookaheads"
        f" {_listed(sorted(lookaheads))}, DSI as the planner chose."
    )


def _listed(counts: Sequence[int]) -> str:
    if list(counts) == list(range(counts[0], counts[0] + len(counts))) and len(counts) > 1:
        return f"{counts[0]} to {counts[-1]}"
    return ", ".join(map(str, counts))


def _table2_rows(content: Row) -> Iterator[tuple[str, dict[str, Row]]]:
    for name, rows in groupby(content["rows"], itemgetter("name")):
        yield name, {row["strategy"]: row for row in rows}


def _over_floors(by_strategy: Mapping[str, Row]) -> Iterator[str]:
    for strategy in _STRATEGIES:
        yield f"{by_strategy[strategy]['median_ms']:.0f}"
        ratio = by_strategy[strategy]["online_over_floor"]
        yield f"{ratio:.3f}" if ratio >= 1 else rf"{ratio:.3f}\*"
