"""What is printed and published of a load test, from its JSON rows."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from paceline_bench.gpus import per_gpu
from paceline_bench.report import circumstances_line
from paceline_bench.table import SAME_OUTPUT, UNKNOWN, Column, markdown, speed, times
from paceline_contract.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline_bench.report import Results, Row

# Two runs of the same load differ by about so much.
_NOISE = 0.03
_COUNT = itemgetter("orchestrator_count")
_LEGEND = """\
TTFT: time to first token. ITL: inter-token latency, between two messages of a stream; one of SI or
DSI can have several tokens. TPOT: time per output token of a request. Fairness: Jain's index of the
requests' tokens/s. Given up: share of the targets' forwards that had become worthless. MiB: what
the orchestrators have to themselves. No p99 is told of fewer than 100 measurements.
"""


def chosen_words(row: Row) -> str:
    """Tell how many requests were decoded with which strategy."""
    return ", ".join(f"{count} {name}" for name, count in sorted(row["chosen"].items()))


def percentiles_column(heading: str, name: str, *, digits: int = 0) -> Column:
    """Return the column of the middle and the tail of a row's measurements."""

    def both(row: Row) -> str:
        p50, p99 = row[name]["p50"], row[name]["p99"]
        return f"{p50:.{digits}f} / {UNKNOWN if p99 is None else f'{p99:.{digits}f}'}"

    return Column(heading, both)


_STREAMS = Column("streams", "stream_count")
_STRATEGY = Column("strategy", "strategy")
_TTFT = percentiles_column("TTFT p50 / p99", "ttft_ms")
_ITL = percentiles_column("ITL p50 / p99", "itl_ms")
_MEMORY = Column(
    "MiB before / most",
    lambda row: f"{row['memory_before_mib']:.1f} / {row['memory_peak_mib']:.1f}",
)
_LATENCY = (
    _STREAMS,
    _STRATEGY,
    Column("tokens/s", "tokens_per_second", "{:.1f}"),
    Column("to non-SI", "speed_up", "{:.2f}x"),
    _TTFT,
    _ITL,
    percentiles_column("TPOT p50 / p99", "tpot_ms"),
    Column("fairness", "fairness", "{:.3f}"),
    SAME_OUTPUT,
)
_COST = (
    _STREAMS,
    _STRATEGY,
    Column("decoded with", chosen_words),
    Column("forwards per token", "forwards_per_token", "{:.2f}"),
    Column("given up", "given_up", "{:.0%}"),
    Column("orchestrator ms per token", "orchestrator_ms_per_token", "{:.2f}"),
    Column("orchestrator load", "orchestrator_load", "{:.0%}"),
    _MEMORY,
    Column("machine", "machine_load", "{:.0%}"),
    Column("short of CPU", lambda row: row["limit"] or None),
)
# What a stream gets, for the page.
_OF_A_STREAM = (
    _STREAMS,
    Column("", "strategy"),
    _TTFT,
    _ITL,
    Column("fairness", "fairness", "{:.2f}"),
    Column("CPU", "orchestrator_ms_per_token", "{:.2f}"),
    _MEMORY,
)


def tables(rows: Sequence[Row], *, servers: tuple[int, int] | None = None) -> str:
    """Lay the rows out as two tables: what streams get, and what that costs.

    Args:
        rows: Of loads.
        servers: The numbers of targets and drafters, to say also what each one's GPU makes.
    """
    parts = []
    latency = _LATENCY if servers is None else (*_LATENCY, *_per_gpu(*servers))
    for count, each in groupby(sorted(rows, key=_COUNT), _COUNT):
        own = list(each)
        parts += [f"{_orchestrators(count)}; times in ms\n"]
        parts += [markdown(own, columns) for columns in (latency, _COST)]
    return "\n".join([*parts, _LEGEND])


def _per_gpu(target_count: int, drafter_count: int) -> tuple[Column, ...]:
    """Return the columns: with many streams all servers compute, in plain decoding the targets."""
    return per_gpu(lambda row: target_count + (drafter_count if row["strategy"] != "non-SI" else 0))


def findings(rows: Sequence[Row], memory: Iterable[Row]) -> list[str]:
    """Say what the rows show, and what they cannot show, in one line each."""
    if different := _different(rows):
        return different
    lines = ["Every output was identical to plain decoding."]
    auto = [row for row in rows if row["strategy"] == "AUTO" and row["speed_up"]]
    slower = [row for row in auto if row["speed_up"] < 1 - _NOISE]
    if slower:
        lines.append(f"AUTO served fewer tokens/s than plain decoding: {_names(slower)}")
    elif auto:
        least = min(auto, key=itemgetter("speed_up"))
        lines.append(
            "AUTO never served fewer tokens/s than plain decoding, within the noise: "
            f"at least {times(least['speed_up'])}, {_names([least])}"
        )
    lines += [f"Memory of a stream: {_memory(each)}" for each in memory]
    if short := [row for row in rows if row["limit"]]:
        lines.append(
            f"{len(short)} of {len(rows)} loads were short of CPU, and so no measure of the "
            f"strategy: {_names(short)}"
        )
    if restless := [row for row in rows if not row["began_quietly"]]:
        lines.append(f"Began while the load before was still worked on: {_names(restless)}")
    return lines


def scaling_findings(rows: Sequence[Row]) -> list[str]:
    """Say what one orchestrator and several served, and whether they were the limit."""
    if different := _different(rows):
        return different
    lines = []
    for count, own in groupby(sorted(rows, key=_COUNT), _COUNT):
        best = max(own, key=itemgetter("tokens_per_second"))
        cpu_ms = best["orchestrator_ms_per_token"]
        lines.append(
            f"{_orchestrators(count)} served at most {best['tokens_per_second']:.0f} tokens/s, by "
            f"{best['strategy']} x {best['stream_count']}, with {cpu_ms:.2f} ms of CPU for each. By"
            " that alone, which is no measurement, a core for each orchestrator would do for"
            f" {count * 1e3 / cpu_ms:.0f}."
        )
        if "machine" in best["limit"]:
            lines.append(
                "  The cores were full, of clients and targets too: this is no measure of how"
                " orchestrators scale."
            )
    return lines


def load(results: Results) -> str:
    """The throughput of every strategy, by streams and orchestrators."""
    content = results["load"]
    loads = [
        {row["strategy"]: row for row in rows}
        for _, rows in groupby(content["rows"], itemgetter("orchestrator_count", "stream_count"))
    ]
    columns = [
        Column("streams", lambda own: next(iter(own.values()))["stream_count"]),
        Column("orchestrators", lambda own: _COUNT(next(iter(own.values())))),
        *(
            Column(name, speed).within(name)
            for name in dict.fromkeys(row["strategy"] for row in content["rows"])
        ),
        Column("AUTO decoded with", lambda own: chosen_words(own["AUTO"]) if "AUTO" in own else ""),
    ]
    system = content["system"]
    setting = (
        f"Targets: {system['targets']}, {system['target_ms']:g} ms; drafters: {system['drafters']},"
        f" {system['drafter_ms']:g} ms; acceptance {system['acceptance']:.0%};"
        f" {system['tokens']} tokens a request."
    )
    return (
        f"{circumstances_line(content)}. {setting} Tokens/s of all streams:\n\n"
        f"{markdown(loads, columns)}\n{_auto_over_plain(content['rows'])}"
    )


def _auto_over_plain(rows: Iterable[Row]) -> str:
    """Say what AUTO gains where the machine had CPU for AUTO and for plain decoding."""
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
    return f"{counted(streams, 'stream')}, {_orchestrators(orchestrators)}"


def load_streams(results: Results) -> str:
    """What a stream gets with AUTO and with plain decoding, and what it costs the orchestrator."""
    content = results["load"]
    fewest = min(map(_COUNT, content["rows"]))
    rows = [
        row
        for row in content["rows"]
        if row["orchestrator_count"] == fewest and row["strategy"] in {"non-SI", "AUTO"}
    ]
    memory = "; ".join(map(_memory, content["memory"]))
    return (
        f"{markdown(rows, _OF_A_STREAM)}\nMemory of one more stream: {memory}. It is the slope of a"
        " line of least squares through the most of each number of streams, and an upper bound:"
        " what the allocator keeps from earlier loads is in it."
    )


def load_scaling(results: Results) -> str:
    """What one orchestrator serves, and what several do, where they are the limit."""
    scaling = results["load"].get("scaling")
    if scaling is None or not scaling["rows"]:
        return ""
    fewest = min(map(_COUNT, scaling["rows"]))
    alone = {
        (row["strategy"], row["stream_count"]): row
        for row in scaling["rows"]
        if row["orchestrator_count"] == fewest
    }

    def to_one(row: Row) -> float | None:
        one = alone[row["strategy"], row["stream_count"]]
        ratio: float = row["tokens_per_second"] / one["tokens_per_second"]
        return ratio if one["identical"] else None

    def tokens(row: Row) -> str:
        return f"{row['tokens_per_second']:.0f}{'*' if 'machine' in row['limit'] else ''}"

    columns = (
        Column("orchestrators", "orchestrator_count"),
        _STREAMS,
        _STRATEGY,
        Column("tokens/s", tokens),
        Column("to one", to_one, "{:.2f}x"),
        Column("CPU", "orchestrator_ms_per_token", "{:.2f}"),
        Column("load", "orchestrator_load", "{:.0%}"),
        Column("machine busy", "machine_load", "{:.0%}"),
    )
    rows = [row for row in scaling["rows"] if row["identical"]]
    return (
        f"One orchestrator and two: targets of {scaling['target_ms']:g} ms, a drafter of"
        f" {scaling['drafter_ms']:g} ms, and orchestrators that may run in"
        f" {scaling['orchestrator_share']:.0%} of the time each, one after the other, so that they"
        " are the limit and not the cores that all processes share. CPU: of all orchestrators, ms"
        " for each token. Load: CPU time of the busiest over the time in which it may run; its"
        f" threads can take it beyond 100%.\n\n{markdown(rows, columns)}"
    )


def _different(rows: Iterable[Row]) -> list[str]:
    different = [row for row in rows if not row["identical"]]
    return [f"AN OUTPUT DIFFERED from plain decoding: {_names(different)}"] if different else []


def _memory(each: Row) -> str:
    amount = "below what can be measured" if each["mib"] is None else f"{each['mib']:.2f} MiB"
    return f"{each['strategy']} on {_orchestrators(each['orchestrator_count'])} {amount}"


def _orchestrators(count: int) -> str:
    return counted(count, "orchestrator")


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(
        f"{row['strategy']} x {row['stream_count']}"
        + (f" on {_orchestrators(count)}" if (count := row["orchestrator_count"]) > 1 else "")
        for row in rows
    )
