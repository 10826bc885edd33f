"""What the pages say of `paceline bench pair`."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from paceline.words import counted
from paceline_bench.pair.contest import Group, Method, times_as_fast
from paceline_bench.report import circumstances_line, markdown_table, speed, times

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline_bench.report import Results, Row

__all__ = ["pair_acceptance", "pair_contest", "pair_forwards", "pair_sharing", "pair_summary"]


def pair_summary(results: Results) -> str:
    """What the bundled pair does in different hands, for those in a hurry."""
    rows = results["pair"]["rows"]
    lookaheads = sorted({row["lookahead"] for row in rows if row["lookahead"]})
    columns = ["bare", "plain", *(f"lookahead {count}" for count in lookaheads), "other"]
    lines = []
    for group, own in groupby(rows, itemgetter("group")):
        cells = dict.fromkeys(columns, "-")
        for row in own:
            told = speed(row)
            match Method(row["method"]):
                case Method.SPECULATIVE:
                    cells[f"lookahead {row['lookahead']}"] = told
                case Method.BARE | Method.PLAIN as method:
                    cells[method.value] = told
                case _:
                    cells["other"] = f"{row['name'].removeprefix('generate, ')}: {told}"
        lines.append([group, *cells.values()])
    return markdown_table(("", "bare loop", *columns[1:]), lines)


def pair_contest(results: Results) -> str:
    """Every way to decode with the bundled pair."""
    every = results["pair"]["rows"]
    sections = [circumstances_line(results["pair"]) + "\n"]
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
                speed(row),
                _speed_range(row),
                "-" if row["ttft_ms"] is None else f"{row['ttft_ms']:.0f}",
                f"{row['tokens_per_forward']:.2f}",
                _times_as_fast(row, every[0]),
                _times_as_fast(row, _peer(row, every)),
            ]
            for row in rows
        ]
        sections.append(markdown_table((*headings, "to transformers, same method"), lines))
    return "\n".join(sections)


def _times_as_fast(row: Row, reference: Row | None) -> str:
    if reference is None or not (row["identical"] and reference["identical"]):
        return "-"
    own, other = row["repeats_ms_per_token"], reference["repeats_ms_per_token"]
    return times(times_as_fast(own, other))


def _speed_range(row: Row) -> str:
    every = row["repeats_ms_per_token"]
    return f"{1e3 / max(every):.0f} to {1e3 / min(every):.0f}"


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
            speed(way),
            _speed_range(way),
            f"{way['tokens_per_forward']:.2f}",
            _times_as_fast(way, ways[0]),
        ]
        for way in ways
    ]
    more = ("one text", "tokens/s", "repeats", "tokens per forward", "to non-SI")
    tables = [markdown_table(headings, lines)]
    return "\n".join(tables + ([markdown_table(more, strategies)] if strategies else []))
