"""What is printed and published of Table 2, from what was kept of it (results.py)."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from paceline_bench.gpus import GPU_WORDS, gpu_count, per_gpu
from paceline_bench.report import (
    circumstances_line,
    goal_line,
    markdown_table,
    restless_line,
    table,
    times,
)
from paceline_bench.table2.grid import MOST_SLOWER
from paceline_bench.table2.online import EXTENDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from paceline_bench.report import Results, Row

    Content = Mapping[str, Any]

_STRATEGIES = ("non-SI", "SI", "DSI")
_BEST = "DSI (best lookahead)"
_BEYOND_KINDS = ("ahead", "trees", "extended")
# Online over ideal; above it a breakdown is shown.
_WORTH_EXPLAINING = 1.10
BREAKDOWN_HEADINGS = {
    "total": "traced run",
    "ideal": "ideal",
    "bare": "bare calls",
    "path": "another path",
    "overshoot": "forwards late",
    "queue": "wait for a model",
    "transport": "calls beyond bare",
    "orchestrator": "orchestrator",
    "client": "client's call",
}
MOST_OVER_FLOOR = 1.05
_MOST_ONE_WAYS = 2.0

_DIFFERENCE = (
    "The paper's ratios are at a level that only an SI with one more, blocking target forward "
    "after every rejection explains (the published code has such an SI; what made the table is not "
    "known): here SI is correct and has its best lookahead, beside which even DSI without any "
    "overhead gains no more than the column `ideal` says."
)
_BELOW_FLOOR = (
    "\\* Below its floor: the bare calls took longer than its own did, so the machine was not the"
    " same all the time."
)
_DIFFERENT = (
    "AN OUTPUT DIFFERED from plain decoding, so that row has no speed-up: please report it."
)


def report(content: Content, *, max_tokens: int, by_gpu: bool = False) -> str:
    """Say everything in Markdown: times, speed-ups, restarts, and where the time went.

    Args:
        content: See results.py.
        max_tokens: Tokens of each run.
        by_gpu: Whether to say also what each device makes of it.
    """
    rows = list(_table2_rows(content))
    beyond = [row for kind in _BEYOND_KINDS for row in content.get(kind, [])]
    main = [by_strategy[strategy] for _, by_strategy in rows for strategy in _STRATEGIES]
    parts = [
        f"### Medians for {max_tokens} tokens, prefill included\n",
        table(main, _TIMES),
        *([_BELOW_FLOOR + "\n"] if any(row["online_over_floor"] < 1 for row in main) else []),
        "### DSI over SI\n",
        table([by_strategy for _, by_strategy in rows], _SPEED_UPS),
        _DIFFERENCE + "\n",
        *([f"### Beyond the paper\n\n{table(beyond, _BEYOND)}"] if beyond else []),
        *([_per_gpu([*main, *beyond], max_tokens)] if by_gpu else []),
        "### From a rejecting verdict's arrival to the new calls' arrival, medians\n",
        _restarts(content),
        "### Where the time of the critical path went, ms, means\n",
        _breakdown(content),
        "### Goals\n",
        "\n".join(_goals(content)) + "\n",
    ]
    if not all("speed_up_over_si" in by_strategy["DSI"] for _, by_strategy in rows):
        parts.append(_DIFFERENT + "\n")
    return "\n".join(parts)


def _per_gpu(rows: Sequence[Row], max_tokens: int) -> str:
    def gpus(row: Row) -> int:
        label = row["strategy"].removesuffix(EXTENDED)
        return gpu_count(label, max(row["target_counts"]))

    columns: dict[str, Callable[[Row], str]] = {
        "row": lambda row: row["name"],
        "strategy": lambda row: row["strategy"] + (", trees" if row.get("width", 1) > 1 else ""),
        "tokens/s": lambda row: f"{row['tokens_per_second']:.1f}",
    }
    timed = [{**row, "tokens_per_second": max_tokens * 1e3 / row["median_ms"]} for row in rows]
    shown = table(timed, columns | per_gpu(gpus))
    return f"### Tokens/s of each GPU\n\n{shown}\n{GPU_WORDS}\n"


def _over_floor(row: Row) -> str:
    ratio = row["online_over_floor"]
    return f"{ratio:.3f}" if ratio >= 1 else rf"{ratio:.3f}\*"


def _lookaheads(row: Row) -> str:
    return "/".join(map(str, row["lookaheads"])) if any(row["lookaheads"]) else "-"


def _reference(by_strategy: Mapping[str, Row], *names: str) -> str:
    reference_ms = by_strategy["DSI"]["reference_ms"]
    return ", ".join(str(reference_ms[name]) for name in names) + " ms"


_TIMES: dict[str, Callable[[Row], str]] = {
    "row": lambda row: row["name"],
    "strategy": lambda row: row["strategy"],
    "lookahead": _lookaheads,
    "median ms": lambda row: f"{row['median_ms']:.0f}",
    "spread": lambda row: f"{row['low_ms']:.0f} to {row['high_ms']:.0f}",
    "ideal ms": lambda row: f"{row['ideal_ms']:.0f}",
    "floor ms": lambda row: f"{row['floor_ms']:.0f}",
    "÷ floor": _over_floor,
    "÷ ideal": lambda row: f"{row['online_over_ideal']:.3f}",
    "CPU ms/token": lambda row: f"{row['orchestrator_cpu_ms_per_token']:.2f}",
    "output": lambda row: "identical" if row["identical"] else "DIFFERENT",
}
# Of all strategies of a row.
_SPEED_UPS: dict[str, Callable[[Mapping[str, Row]], str]] = {
    "row": lambda rows: rows["DSI"]["name"],
    "DSI over SI": lambda rows: times(rows["DSI"].get("speed_up_over_si")),
    "ideal": lambda rows: times(rows["DSI"].get("ideal_speed_up_over_si")),
    "paper": lambda rows: times(rows["DSI"]["paper_speed_up_over_si"]),
    "DSI over non-SI": lambda rows: times(rows["DSI"].get("speed_up_over_non_si")),
    "DSI at its best lookahead": lambda rows: (
        f"{rows[_BEST]['median_ms']:.0f} ms ({_lookaheads(rows[_BEST])})"
    ),
    "reference's SI, DSI": lambda rows: _reference(rows, "si", "dsi"),
    "repaired SI, DSI": lambda rows: _reference(rows, "repaired_si", "repaired_dsi"),
}


_BEYOND: dict[str, Callable[[Row], str]] = {
    "row": lambda row: row["name"],
    "strategy": lambda row: row["strategy"],
    "width, branches": lambda row: (
        f"{row['width']}, {row['branches']}" if row["width"] > 1 else "-"
    ),
    "lookahead": _lookaheads,
    "median ms": lambda row: f"{row['median_ms']:.0f}",
    "ideal ms": lambda row: f"{row['ideal_ms']:.0f}",
    "over SI": lambda row: times(row.get("speed_up_over_si")),
    "ideal": lambda row: times(row.get("ideal_speed_up_over_si")),
    "over its method in the paper": lambda row: times(row.get("speed_up_over_chain")),
    "output": lambda row: "identical" if row["identical"] else "DIFFERENT",
}


def _goals(content: Content) -> Iterator[str]:
    """Say in one line each how far the goals were met."""
    rows = [by_strategy for _, by_strategy in _table2_rows(content)]
    over_floors = [
        (each[strategy]["online_over_floor"], f"{each[strategy]['name']}, {strategy}")
        for each in rows
        for strategy in _STRATEGIES
    ]
    yield goal_line("online ÷ floor", over_floors, limit=MOST_OVER_FLOOR)
    planned = [each["DSI"] for each in rows]
    slower = [
        (1 / min(each["speed_up_over_si"], each["speed_up_over_non_si"]), each["name"])
        for each in planned
        if "speed_up_over_si" in each
    ]
    if slower:
        yield goal_line("DSI ÷ the better of SI and non-SI", slower, limit=MOST_SLOWER)
    restarts = [
        (each[key] / each["echo_one_way_us"], f"{each['name']}, {what}")
        for each in planned
        for what, key in (("draft", "restart_draft_us"), ("verification", "restart_verify_us"))
        if each[key] is not None
    ]
    if restarts:
        yield goal_line("restart ÷ bare call, one way", restarts, limit=_MOST_ONE_WAYS)
    measured = [*(each["non-SI"] for each in rows), *planned, *content["sweeps"]]
    if restless := sum(each["restless_runs"] for each in measured):
        yield restless_line(restless)


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
            *(
                cell
                for row in (by_strategy[it] for it in _STRATEGIES)
                for cell in (f"{row['median_ms']:.0f}", _over_floor(row))
            ),
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


def _within_goal(content: Content) -> str:
    rows = [by_strategy for _, by_strategy in _table2_rows(content)]
    counts = [
        f"{name} in {sum(row[name]['online_over_floor'] <= MOST_OVER_FLOOR for row in rows)}"
        for name in _STRATEGIES
    ]
    goal = f"within the goal of {MOST_OVER_FLOOR:g} of the floor"
    return f"Of {len(rows)} rows, {goal}: {', '.join(counts)}."


def table2_restarts(results: Results) -> str:
    """What a rejection costs DSI, beside a bare call."""
    return _restarts(results["table2"])


def _restarts(content: Content) -> str:
    headings = (
        *("row", "bare call, one way, ms", "new draft, ms", "÷ one way"),
        *("new verification, ms", "÷ one way", "restarts"),
    )
    lines = []
    for name, by_strategy in _table2_rows(content):
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
    return _breakdown(results["table2"])


def _breakdown(content: Content) -> str:
    lines = [
        [name, strategy, *(f"{row['breakdown_ms'][part]:.1f}" for part in BREAKDOWN_HEADINGS)]
        for name, by_strategy in _table2_rows(content)
        for strategy, row in ((it, by_strategy[it]) for it in _STRATEGIES)
        if row["breakdown_ms"] is not None and row["online_over_ideal"] > _WORTH_EXPLAINING
    ]
    if not lines:
        return f"Nothing takes more than {_WORTH_EXPLAINING:g} of its ideal."
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


def _table2_choices(content: Content) -> str:
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


def _table2_rows(content: Content) -> Iterator[tuple[str, dict[str, Row]]]:
    for name, rows in groupby(content["rows"], itemgetter("name")):
        yield name, {row["strategy"]: row for row in rows}
