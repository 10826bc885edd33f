"""What is printed and published of Table 2, from what was kept of it (results.py)."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from paceline_bench.gpus import GPU_WORDS, gpu_count, per_gpu
from paceline_bench.report import circumstances_line, goal_line, restless_line
from paceline_bench.table import SAME_OUTPUT, Column, markdown
from paceline_bench.table2.grid import MOST_SLOWER
from paceline_bench.table2.online import EXTENDED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from paceline_bench.report import Results, Row

    Content = Mapping[str, Any]

_STRATEGIES = ("non-SI", "SI", "DSI")
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


def _over_floor(row: Row) -> str:
    ratio = row["online_over_floor"]
    return f"{ratio:.3f}" if ratio >= 1 else rf"{ratio:.3f}\*"


_NAME, _STRATEGY = Column("row", "name"), Column("strategy", "strategy")
_ROW = _NAME.within("DSI")
_LOOKAHEAD = Column(
    "lookahead",
    lambda row: "/".join(map(str, row["lookaheads"])) if any(row["lookaheads"]) else None,
)
_TIMES = (
    _NAME,
    _STRATEGY,
    _LOOKAHEAD,
    Column("median ms", "median_ms", "{:.0f}"),
    Column("spread", lambda row: f"{row['low_ms']:.0f} to {row['high_ms']:.0f}"),
    Column("ideal ms", "ideal_ms", "{:.0f}"),
    Column("floor ms", "floor_ms", "{:.0f}"),
    Column("÷ floor", _over_floor),
    Column("÷ ideal", "online_over_ideal", "{:.3f}"),
    Column("CPU ms/token", "orchestrator_cpu_ms_per_token", "{:.2f}"),
    SAME_OUTPUT,
)
_OVER_SI = Column("DSI over SI", "speed_up_over_si", "{:.2f}x").within("DSI")
_IDEAL = Column("ideal", "ideal_speed_up_over_si", "{:.2f}x").within("DSI")
_PAPER = Column("paper", "paper_speed_up_over_si", "{:.2f}x").within("DSI")
_OVER_PLAIN = Column("DSI over non-SI", "speed_up_over_non_si", "{:.2f}x").within("DSI")
_SPEED_UPS = (_ROW, _OVER_SI, _IDEAL, _PAPER, _OVER_PLAIN)
_SUMMARY = (
    Column("", "name").within("DSI"),
    *(Column(f"{it}, ms", "median_ms", "{:.0f}").within(it) for it in _STRATEGIES),
    _OVER_SI,
    _IDEAL,
    _OVER_PLAIN,
)
_WITH_FLOORS = (
    _ROW,
    *(
        column.within(strategy)
        for strategy in _STRATEGIES
        for column in (
            Column(f"{strategy} ms", "median_ms", "{:.0f}"),
            Column("÷ floor", _over_floor),
        )
    ),
    Column("DSI ÷ ideal", "online_over_ideal", "{:.3f}").within("DSI"),
    _OVER_SI,
    _IDEAL,
    _PAPER,
)
_REFERENCE = (
    _ROW,
    *(Column(f"{it} ms", "median_ms", "{:.0f}").within(it) for it in ("SI", "DSI")),
    *(
        Column(f"{heading} ms", key).within("reference_ms").within("DSI")
        for key, heading in {
            "si": "reference's SI",
            "dsi": "reference's DSI",
            "repaired_si": "repaired SI",
            "repaired_dsi": "repaired DSI",
        }.items()
    ),
)


def _restart(key: str, heading: str) -> tuple[Column, Column]:
    """Return the columns of a restart's time, and of that time over a bare call's."""

    def over(row: Row, divisor: float) -> float | None:
        return None if row[key] is None else row[key] / divisor

    return (
        Column(heading, lambda row: over(row, 1e3), "{:.2f}"),
        Column("÷ one way", lambda row: over(row, row["echo_one_way_us"]), "{:.1f}"),
    )


_RESTARTS = (
    _NAME,
    Column("bare call, one way, ms", lambda row: row["echo_one_way_us"] / 1e3, "{:.2f}"),
    *_restart("restart_draft_us", "new draft, ms"),
    *_restart("restart_verify_us", "new verification, ms"),
    Column("restarts", "restarts"),
)
_BREAKDOWN = (
    _NAME,
    _STRATEGY,
    *(
        Column(heading, part, "{:.1f}").within("breakdown_ms")
        for part, heading in BREAKDOWN_HEADINGS.items()
    ),
)
_BEYOND = (
    _NAME,
    _STRATEGY,
    Column(
        "width, branches",
        lambda row: f"{row['width']}, {row['branches']}" if row["width"] > 1 else None,
    ),
    _LOOKAHEAD,
    Column("median ms", "median_ms", "{:.0f}"),
    Column("ideal ms", "ideal_ms", "{:.0f}"),
    Column("over SI", "speed_up_over_si", "{:.2f}x"),
    Column("ideal", "ideal_speed_up_over_si", "{:.2f}x"),
    Column("over its method in the paper", "speed_up_over_chain", "{:.2f}x"),
    SAME_OUTPUT,
)


def report(content: Content, *, max_tokens: int, by_gpu: bool = False) -> str:
    """Say everything in Markdown: times, speed-ups, restarts, and where the time went.

    Args:
        content: See results.py.
        max_tokens: Tokens of each run.
        by_gpu: Whether to say also what each device makes of it.
    """
    rows = _by_strategy(content)
    beyond = [row for kind in _BEYOND_KINDS for row in content.get(kind, [])]
    main = [own[strategy] for own in rows for strategy in _STRATEGIES]
    below = any(row["online_over_floor"] < 1 for row in content["rows"])
    sections = {
        f"Medians for {max_tokens} tokens, prefill included": [
            markdown(content["rows"], _TIMES),
            *([_BELOW_FLOOR + "\n"] if below else []),
        ],
        "DSI over SI": [markdown(rows, _SPEED_UPS), _DIFFERENCE + "\n"],
        "The paper's own code": [markdown(rows, _REFERENCE)],
        "Beyond the paper": [markdown(beyond, _BEYOND)] if beyond else [],
        "Tokens/s of each GPU": [_per_gpu([*main, *beyond], max_tokens)] if by_gpu else [],
        "From a rejecting verdict's arrival to the new calls' arrival, medians": [
            _restarts(content)
        ],
        "Where the time of the critical path went, ms, means": [_breakdown(content)],
        "Goals": ["\n".join(_goals(content)) + "\n"],
    }
    parts = [
        part for heading, told in sections.items() if told for part in (f"### {heading}\n", *told)
    ]
    if not all("speed_up_over_si" in own["DSI"] for own in rows):
        parts.append(_DIFFERENT + "\n")
    return "\n".join(parts)


def _per_gpu(rows: Sequence[Row], max_tokens: int) -> str:
    def gpus(row: Row) -> int:
        label = row["strategy"].removesuffix(EXTENDED)
        return gpu_count(label, max(row["target_counts"]))

    columns = (
        _NAME,
        Column(
            "strategy", lambda row: row["strategy"] + (", trees" if row.get("width", 1) > 1 else "")
        ),
        Column("tokens/s", "tokens_per_second", "{:.1f}"),
        *per_gpu(gpus),
    )
    timed = [{**row, "tokens_per_second": max_tokens * 1e3 / row["median_ms"]} for row in rows]
    return f"{markdown(timed, columns)}\n{GPU_WORDS}\n"


def _goals(content: Content) -> Iterator[str]:
    """Say in one line each how far the goals were met."""
    rows = _by_strategy(content)
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
    rows = [own["DSI"] for own in _by_strategy(results["table2"])]
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
    content = results["table2"]
    return f"{_table2_choices(content)}\n\n{markdown(_by_strategy(content), _SUMMARY)}"


def table2(results: Results) -> str:
    """Table 2 with floors and ideals."""
    content = results["table2"]
    overheads = [echo["overhead_ns"] / 1e6 for echo in content["echoes"]]
    words = f"A bare call took {min(overheads):.2f} to {max(overheads):.2f} ms beyond its sleep."
    parts = [
        f"{circumstances_line(content)}.",
        f"{_table2_choices(content)} {words}",
        markdown(_by_strategy(content), _WITH_FLOORS).strip(),
        _within_goal(content),
    ]
    below = any(row["online_over_floor"] < 1 for row in content["rows"])
    return "\n\n".join([*parts, _BELOW_FLOOR] if below else parts)


def _within_goal(content: Content) -> str:
    rows = _by_strategy(content)
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
    return markdown((own["DSI"] for own in _by_strategy(content)), _RESTARTS)


def table2_breakdown(results: Results) -> str:
    """Where the time went of what takes much longer than its ideal."""
    return _breakdown(results["table2"])


def _breakdown(content: Content) -> str:
    rows = [
        row
        for own in _by_strategy(content)
        for row in (own[strategy] for strategy in _STRATEGIES)
        if row["breakdown_ms"] is not None and row["online_over_ideal"] > _WORTH_EXPLAINING
    ]
    if not rows:
        return f"Nothing takes more than {_WORTH_EXPLAINING:g} of its ideal."
    return markdown(rows, _BREAKDOWN)


def table2_reference(results: Results) -> str:
    """Absolute times beside those of the paper's own code."""
    return markdown(_by_strategy(results["table2"]), _REFERENCE)


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


def _by_strategy(content: Content) -> list[dict[str, Row]]:
    """Return each row of the paper's table: its strategies by name."""
    groups = groupby(content["rows"], itemgetter("name"))
    return [{row["strategy"]: row for row in rows} for _, rows in groups]
