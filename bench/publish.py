"""Write what README.md and docs/performance.md say of measurements, or check that it is fresh.

Whatever is between the marks `<!-- measured: NAME -->` and `<!-- /measured -->` comes from
results/*.json, which the benchmarks write (`make bench`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline_bench.grid import MOST_SLOWER
from paceline_bench.pair import Group, Method
from paceline_bench.report import markdown_table
from paceline_bench.table2_report import BREAKDOWN_HEADINGS, MOST_OVER_FLOOR, WORTH_EXPLAINING
from paceline_cli.screen import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Row: TypeAlias = "dict[str, Any]"
Results: TypeAlias = "Mapping[str, Row]"
"""The content of each results file, by its name without suffix."""

_FOLDER = Path(__file__).parent
PAGES = (_FOLDER.parent / "README.md", _FOLDER.parent / "docs" / "performance.md")
_BLOCK = re.compile(r"(<!-- measured: (\S+) -->\n).*?(<!-- /measured -->)", re.DOTALL)
_STRATEGIES = ("non-SI", "SI", "DSI")
_PLAIN_COLUMN = "plain"
_BELOW_FLOOR = (
    "\\* Below its floor: the bare calls took longer than its own did, so the machine was not the"
    " same all the time."
)


def simulate(results: Results) -> str:
    """What the paper claims of its heat maps, held against ours."""
    content, served = results["simulate"], results["simulate-served"]
    rows = [*content["rows"], *served["rows"]]
    names = {"figure2": "Figure 2", "figure7": "Figure 7"}
    as_served = {"blocks": "", "work_conserving": ", as served"}
    headings = [names[row["figure"]] + as_served[row["dispatch"]] for row in rows]
    lines = [
        ["SI is slower than non-SI below the diagonal", *map(_below_diagonal, rows)],
        *(
            [f"DSI is never slower than {name}", *(_never_slower(row[key]) for row in rows)]
            for name, key in (("non-SI", "over_non_si"), ("SI", "over_si"))
        ),
        ["DSI over the better of the two: up to 1.6x", *map(_largest_gain, rows)],
        ["by the luck of the repeats", *map(_drawn_gain, rows)],
        ["cells", *(f"{row['cell_count']:,}" for row in rows)],
    ]
    commands = " and ".join(f"`{each['circumstances']['command']}`" for each in (content, served))
    table1 = "exactly" if content["table1_is_exact"] else "NOT exactly"
    return (
        f"{commands}, {content['circumstances']['date']}. Table 1 is reproduced {table1}.\n\n"
        + markdown_table(("claim of the paper", *headings), lines)
    )


def _below_diagonal(row: Row) -> str:
    count = row["si_slower_elsewhere_count"]
    others = f"{count:,}" if count else "no"
    return (
        f"in {row['si_slower_below_count']:,} of those {row['below_count']:,} cells,"
        f" {others} others"
    )


def _never_slower(found: Row) -> str:
    if not found["slower_count"]:
        return "holds"
    cells = "1 cell" if found["slower_count"] == 1 else f"{found['slower_count']:,} cells"
    place = _at(found["worst_place"])
    return f"but for {cells}, by {found['worst_loss']:.1%} at most ({place})"


def _largest_gain(row: Row) -> str:
    if row["lookahead"] is not None:
        return "-"  # SI is not at its best there
    found = row["over_both"]
    place = _at(found["best_place"])
    return f"{found['best_ratio']:.2f}x ({place}), {found['mean_ratio']:.2f}x on average"


def _drawn_gain(row: Row) -> str:
    if row["lookahead"] is not None:
        return "-"
    return f"{row['drawn_best_ratio']:.2f}x ({_at(row['drawn_best_place'])})"


def _at(place: Sequence[float]) -> str:
    return f"drafter {place[0]:.2f}, acceptance {place[1]:.2f}"


def plan(results: Results) -> str:
    """What one more target is worth, by an example."""
    content = results["plan"]
    lines = [
        [
            row["strategy"]
            if row["strategy"] != "DSI"
            else f"DSI, {counted(row['target_count'], 'target')}",
            str(row["lookahead"] or "-"),
            f"{row['mean_ms']:.0f} ± {row['error_ms']:.0f}",
            _times(row["speed_up"]),
            "-" if row["gain_per_target"] is None else f"{row['gain_per_target']:+.1%}",
        ]
        for row in content["rows"]
    ]
    headings = ("", "lookahead", "ms", "speed-up", "gain per target")
    return f"`{content['circumstances']['command']}`\n\n{markdown_table(headings, lines)}"


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
            _times(by_strategy["DSI"].get("speed_up_over_si")),
            _times(by_strategy["DSI"].get("ideal_speed_up_over_si")),
            _times(by_strategy["DSI"].get("speed_up_over_non_si")),
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
            _times(by_strategy["DSI"].get("speed_up_over_si")),
            _times(by_strategy["DSI"].get("ideal_speed_up_over_si")),
            _times(by_strategy["DSI"]["paper_speed_up_over_si"]),
        ]
        for name, by_strategy in _table2_rows(content)
    ]
    more = ("DSI ÷ ideal", "DSI over SI", "ideal", "paper")
    overheads = [echo["overhead_ns"] / 1e6 for echo in content["echoes"]]
    words = f"A bare call took {min(overheads):.2f} to {max(overheads):.2f} ms beyond its sleep."
    parts = [
        f"{_circumstances(content)}.",
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
        times = by_strategy["DSI"]["reference_ms"]
        own = [f"{by_strategy[strategy]['median_ms']:.0f}" for strategy in ("SI", "DSI")]
        others = [str(times[it]) for it in ("si", "dsi", "repaired_si", "repaired_dsi")]
        lines.append([name, *own, *others])
    return markdown_table(headings, lines)


def grid(results: Results) -> str:
    """DSI beside the better of the others on the online grid, once that was measured."""
    content = results.get("grid")
    if content is None:
        return ""
    by_place = {
        (row["drafter"], row["acceptance_rate"]): row
        for row in content["rows"]
        if row["strategy"] == "DSI"
    }
    drafters, rates = (sorted({place[axis] for place in by_place}) for axis in (0, 1))
    lines = [
        [f"{rate:.0%}", *(_over_better(by_place.get((drafter, rate))) for drafter in drafters)]
        for rate in rates
    ]
    headings = ("acceptance \\ drafter latency", *(f"{drafter:g}" for drafter in drafters))
    words = "DSI's time over that of the better of SI and non-SI; bold where it is more than"
    return "\n\n".join(
        [
            f"{_circumstances(content)}. {words} {MOST_SLOWER:g}:",
            markdown_table(headings, lines).strip(),
            "![The online grid: DSI beside the better of SI and non-SI](../bench/results/grid.png)",
        ]
    )


def _over_better(row: Row | None) -> str:
    if row is None:
        return "-"
    ratio = row.get("over_better")
    if ratio is None:
        return "output differs"
    return f"**{ratio:.3f}**" if ratio > MOST_SLOWER else f"{ratio:.3f}"


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


def load(results: Results) -> str:
    """The throughput of every strategy, by streams and orchestrators."""
    content = results["load"]
    names = list(dict.fromkeys(row["strategy"] for row in content["rows"]))
    lines = []
    for (orchestrators, streams), rows in groupby(
        content["rows"], itemgetter("orchestrator_count", "stream_count")
    ):
        by_strategy = {row["strategy"]: row for row in rows}
        speeds = [
            _tokens_per_second(by_strategy[name]) if name in by_strategy else "-" for name in names
        ]
        chosen = by_strategy["AUTO"]["chosen"] if "AUTO" in by_strategy else {}
        words = ", ".join(f"{count} {name}" for name, count in sorted(chosen.items()))
        lines.append([str(streams), str(orchestrators), *speeds, words])
    headings = ("streams", "orchestrators", *names, "AUTO decoded with")
    system = content["system"]
    setting = (
        f"Targets: {system['targets']}, {system['target_ms']:g} ms; drafters: {system['drafters']},"
        f" {system['drafter_ms']:g} ms; acceptance {system['acceptance']:.0%};"
        f" {system['tokens']} tokens a request."
    )
    return (
        f"{_circumstances(content)}. {setting} Tokens/s of all streams:\n\n"
        f"{markdown_table(headings, lines)}\n{_auto_over_plain(content['rows'])}"
    )


def _auto_over_plain(rows: Iterable[Row]) -> str:
    """Say what AUTO gains where the machine had CPU for it and for what it is compared with."""
    plain = {_place(row): row for row in rows if row["strategy"] == "non-SI"}
    ratios = {
        _place(row): row["speed_up"]
        for row in rows
        if row["strategy"] == "AUTO"
        and row["speed_up"] is not None
        and row["identical"]
        and not (row["limit"] or plain[_place(row)]["limit"])
    }
    if not ratios:
        return ""
    least = min(ratios, key=ratios.__getitem__)
    most = max(ratios, key=ratios.__getitem__)
    return (
        "AUTO over non-SI, of loads that were not short of CPU: from"
        f" {_times(ratios[least])} ({_words(*least)}) to {_times(ratios[most])} ({_words(*most)})."
    )


def _place(row: Row) -> tuple[int, int]:
    return row["stream_count"], row["orchestrator_count"]


def _words(streams: int, orchestrators: int) -> str:
    return f"{counted(streams, 'stream')}, {counted(orchestrators, 'orchestrator')}"


def load_streams(results: Results) -> str:
    """What a stream gets with AUTO and with plain decoding, and what it costs the orchestrator."""
    content = results["load"]
    fewest = min(row["orchestrator_count"] for row in content["rows"])
    lines = [
        [
            str(row["stream_count"]),
            row["strategy"],
            _percentiles(row["ttft_ms"]),
            _percentiles(row["itl_ms"]),
            f"{row['fairness']:.2f}",
            f"{row['orchestrator_ms_per_token']:.2f}",
            _memory(row),
        ]
        for row in content["rows"]
        if row["orchestrator_count"] == fewest and row["strategy"] in {"non-SI", "AUTO"}
    ]
    headings = (
        "streams",
        "",
        "TTFT p50 / p99",
        "ITL p50 / p99",
        "fairness",
        "CPU",
        "MiB before / most",
    )
    return f"{markdown_table(headings, lines)}\n{_stream_memory(content)}"


def _memory(row: Row) -> str:
    if "memory_peak_mib" not in row:
        return "-"
    return f"{row['memory_before_mib']:.1f} / {row['memory_peak_mib']:.1f}"


def _percentiles(values: Row) -> str:
    tail = "-" if values["p99"] is None else f"{values['p99']:.0f}"
    return f"{values['p50']:.0f} / {tail}"


def _stream_memory(content: Row) -> str:
    if "memory" not in content:
        return ""
    amounts = (
        f"{each['strategy']} on {counted(each['orchestrator_count'], 'orchestrator')} "
        + ("below what can be measured" if each["mib"] is None else f"{each['mib']:.2f} MiB")
        for each in content["memory"]
    )
    return (
        f"Memory of one more stream: {'; '.join(amounts)}. It is the slope of a line of least"
        " squares through the most of each number of streams, and an upper bound: what the"
        " allocator keeps from earlier loads is in it."
    )


def load_scaling(results: Results) -> str:
    """What one orchestrator serves, and what several do, where they are the limit."""
    scaling = results["load"].get("scaling")
    if scaling is None or not scaling["rows"]:
        return ""
    fewest = min(row["orchestrator_count"] for row in scaling["rows"])
    alone = {
        (row["strategy"], row["stream_count"]): row
        for row in scaling["rows"]
        if row["orchestrator_count"] == fewest
    }
    lines = [
        [
            str(row["orchestrator_count"]),
            str(row["stream_count"]),
            row["strategy"],
            f"{row['tokens_per_second']:.0f}{'*' if 'machine' in row['limit'] else ''}",
            _ratio(row, alone[row["strategy"], row["stream_count"]]),
            f"{row['orchestrator_ms_per_token']:.2f}",
            f"{row['orchestrator_load']:.0%}",
            f"{row['machine_load']:.0%}",
        ]
        for row in scaling["rows"]
        if row["identical"]
    ]
    headings = ("orchestrators", "streams", "strategy", "tokens/s", "to one", "CPU", "load")
    return (
        f"One orchestrator and two: targets of {scaling['target_ms']:g} ms, a drafter of"
        f" {scaling['drafter_ms']:g} ms, and orchestrators that may run in"
        f" {scaling['orchestrator_share']:.0%} of the time each, one after the other, so that they"
        " are the limit and not the cores that all processes share. CPU: of all orchestrators, ms"
        " for each token. Load: CPU time of the busiest over the time in which it may run; its"
        f" threads can take it beyond 100%.\n\n{markdown_table((*headings, 'machine busy'), lines)}"
    )


def pair_summary(results: Results) -> str:
    """What the bundled pair does in different hands, for those in a hurry."""
    rows = _pair_rows(results)
    lookaheads = sorted({row["lookahead"] for row in rows if row["lookahead"]})
    columns = ["bare", "plain", *(f"lookahead {count}" for count in lookaheads), "other"]
    lines = []
    for group, own in groupby(rows, itemgetter("group")):
        cells = dict.fromkeys(columns, "-")
        for row in own:
            speed = _tokens_per_second(row)
            match Method(row["method"]):
                case Method.SPECULATIVE:
                    cells[f"lookahead {row['lookahead']}"] = speed
                case Method.BARE | Method.PLAIN as method:
                    cells[method.value] = speed
                case _:
                    cells["other"] = f"{row['name'].removeprefix('generate, ')}: {speed}"
        lines.append([group, *cells.values()])
    return markdown_table(("", "bare loop", *columns[1:]), lines)


def pair_contest(results: Results) -> str:
    """Every way to decode with the bundled pair."""
    every = _pair_rows(results)
    sections = [_circumstances(results["pair"]) + "\n"]
    for group, rows in groupby(every, itemgetter("group")):
        headings = (
            group,
            "tokens/s",
            "repeats",
            "TTFT ms",
            "tokens per forward",
            "to the bare loop",
        )
        lines = [
            [
                row["name"],
                _tokens_per_second(row),
                _repeats(row),
                "-" if row["ttft_ms"] is None else f"{row['ttft_ms']:.0f}",
                f"{row['tokens_per_forward']:.2f}",
                _ratio(row, every[0]),
                _ratio(row, _peer(row, every)),
            ]
            for row in rows
        ]
        sections.append(markdown_table((*headings, "to transformers, same method"), lines))
    return "\n".join(sections)


def _pair_rows(results: Results) -> list[Row]:
    """Return the ways to decode, each with the speed of its median repeat."""
    return [
        {**row, "tokens_per_second": 1e3 / median(row["repeats_ms_per_token"])}
        for row in results["pair"]["rows"]
    ]


def _peer(row: Row, rows: Iterable[Row]) -> Row | None:
    """Find what the library takes for the same; for plain decoding its fastest way, bare."""
    if row["group"] == Group.LIBRARY.value:
        return None
    method = Method.BARE.value if row["method"] == Method.PLAIN.value else row["method"]
    wanted = (Group.LIBRARY.value, method, row["lookahead"])
    return next((it for it in rows if (it["group"], it["method"], it["lookahead"]) == wanted), None)


def pair_forwards(results: Results) -> str:
    """What forwards of the bundled pair take."""
    models: dict[str, Row] = results["pair"]["models"]
    counts = list(models["target"]["rows_ms"])
    lines = [
        [
            role,
            _median_and_spread(model["ttft_ms"]),
            _median_and_spread(model["tpot_ms"]),
            *(f"{model['rows_ms'][count]:.2f}" for count in counts),
        ]
        for role, model in models.items()
    ]
    rows = [counted(int(count), "row") for count in counts]
    return markdown_table(("ms", "TTFT", "TPOT", *rows), lines)


def _median_and_spread(found: Row) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def pair_acceptance(results: Results) -> str:
    """How often the bundled drafter is right."""
    found = results["pair"]["acceptance"]
    shares = found["accepted_shares"]
    rates = (
        f"Acceptance, greedy: {found['rate_by_common_runs']:.3f} by the paper's estimator from"
        f" {len(found['common_runs'])} prompts of {found['tokens']} tokens,"
        f" {found['rate_by_verdicts']:.3f} by {found['blocks']} verdicts on blocks of up to"
        f" {found['lookahead']}.\n\n"
    )
    headings = ("first n draft tokens", *map(str, range(1, len(shares) + 1)))
    line = ["all right, share of blocks", *(f"{share:.2f}" for share in shares)]
    return rates + markdown_table(headings, [line])


def pair_sharing(results: Results) -> str:
    """What processes on the same hardware take from each other."""
    content = results["pair"]
    lines = [
        [str(each["texts"]), f"{each['forward_ms']:.2f}", f"{each['tokens_per_second']:.0f}"]
        for each in content["sharing"]
    ]
    headings = ("targets that compute at once", "forward, ms", "tokens/s, all")
    ways = content.get("sharing_strategies", [])
    strategies = [
        [
            way["name"],
            _tokens_per_second(way),
            _repeats(way),
            f"{way['tokens_per_forward']:.2f}",
            _ratio(way, ways[0]),
        ]
        for way in ways
    ]
    more = ("one text", "tokens/s", "repeats", "tokens per forward", "to non-SI")
    tables = [markdown_table(headings, lines)]
    return "\n".join(tables + ([markdown_table(more, strategies)] if strategies else []))


BLOCKS: dict[str, Callable[[Results], str]] = {
    "simulate": simulate,
    "plan": plan,
    "table2-summary": table2_summary,
    "table2": table2,
    "table2-restarts": table2_restarts,
    "table2-breakdown": table2_breakdown,
    "table2-reference": table2_reference,
    "grid": grid,
    "load": load,
    "load-streams": load_streams,
    "load-scaling": load_scaling,
    "pair-summary": pair_summary,
    "pair-contest": pair_contest,
    "pair-forwards": pair_forwards,
    "pair-acceptance": pair_acceptance,
    "pair-sharing": pair_sharing,
}


def _circumstances(content: Row) -> str:
    found = content["circumstances"]
    load_average = f"{found['load_average']:g} at the end"
    if found.get("load_average_at_start") is not None:
        load_average = f"{found['load_average_at_start']:g} at the start, {load_average}"
    return (
        f"`{found['command']}`, {found['date']}, {found['machine']}, Python {found['python']};"
        f" load average {load_average}"
    )


def _tokens_per_second(row: Row) -> str:
    """A speed; without equality there is none. With a star if the machine was short of CPU."""
    mark = "*" if row.get("limit") else ""
    return f"{row['tokens_per_second']:.0f}{mark}" if row["identical"] else "text differs"


def _repeats(row: Row) -> str:
    times = row["repeats_ms_per_token"]
    return f"{1e3 / max(times):.0f} to {1e3 / min(times):.0f}"


def _ratio(row: Row, reference: Row | None) -> str:
    if reference is None or not (row["identical"] and reference["identical"]):
        return "-"
    return _times(row["tokens_per_second"] / reference["tokens_per_second"])


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def page(text: str, results: Results) -> str:
    """Return a page with what is between its marks as the results have it.

    Raises:
        KeyError: A mark names what is not known.
    """

    def filled(found: re.Match[str]) -> str:
        content = BLOCKS[found[2]](results).strip()
        return f"{found[1]}\n{content}\n\n{found[3]}" if content else f"{found[1]}{found[3]}"

    return _BLOCK.sub(filled, text)


def read_results(folder: Path = _FOLDER / "results") -> dict[str, Row]:
    """Read what the benchmarks have written."""
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    results = read_results()
    fresh = {path: page(path.read_text(encoding="utf-8"), results) for path in PAGES}
    stale = [path for path, text in fresh.items() if path.read_text(encoding="utf-8") != text]
    if check and stale:
        print("These pages are stale; run `make figures`:", *stale, sep="\n  ")
        return 1
    for path in stale:
        path.write_text(fresh[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
