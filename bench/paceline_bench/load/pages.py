"""What the pages say of `paceline bench load`."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from paceline.words import counted
from paceline_bench.report import circumstances_line, markdown_table, speed, times

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline_bench.report import Results, Row

__all__ = ["load", "load_scaling", "load_streams"]


def load(results: Results) -> str:
    """The throughput of every strategy, by streams and orchestrators."""
    content = results["load"]
    names = list(dict.fromkeys(row["strategy"] for row in content["rows"]))
    lines = []
    for (orchestrators, streams), rows in groupby(
        content["rows"], itemgetter("orchestrator_count", "stream_count")
    ):
        by_strategy = {row["strategy"]: row for row in rows}
        speeds = [speed(by_strategy[name]) if name in by_strategy else "-" for name in names]
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
        f"{circumstances_line(content)}. {setting} Tokens/s of all streams:\n\n"
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
        f" {times(ratios[least])} ({_words(*least)}) to {times(ratios[most])} ({_words(*most)})."
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
            _to_one(row, alone[row["strategy"], row["stream_count"]]),
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


def _to_one(row: Row, alone: Row) -> str:
    if not alone["identical"]:
        return "-"
    return times(row["tokens_per_second"] / alone["tokens_per_second"])
