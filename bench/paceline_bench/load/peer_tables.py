"""What is printed of real models under load, from the JSON rows."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from paceline_bench.load.tables import chosen_words, percentile_words
from paceline_bench.pair.contest import Group
from paceline_bench.report import circumstances_line, markdown_table, table, times
from paceline_contract.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_bench.report import Results, Row

_LEGEND = """\
Tokens/s: of all texts together, from the first request to the last token. Ratios: of tokens/s, to
its own with 1 stream, to the library's faster way, to our engine without services.
TTFT: time to first token. ITL: inter-token latency, the time between two messages of a stream
divided over the tokens of the later one, for each of these tokens. Gap: that time as it is, which
the simulated form calls ITL. CPU: ms for each token, of the orchestrator, of what has the models,
and of the client; it tells most where others use the machine. No p99 is told of fewer than 100
measurements.
"""
_CPU = ("orchestrator_ms_per_token", "model_ms_per_token", "client_ms_per_token")
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "who": lambda row: f"{row['group']}: {row['name']}",
    "tokens/s": lambda row: f"{row['tokens_per_second']:.1f}",
    "to 1": lambda row: times(row["to_one_stream"]),
    "to library": lambda row: times(row["to_library"]),
    "to engine": lambda row: times(row["to_engine"]),
    "TTFT p50 / p99": percentile_words("ttft_ms"),
    "ITL p50 / p99": percentile_words("itl_ms", digits=1),
    "gap p50 / p99": percentile_words("gap_ms", digits=1),
    "CPU": lambda row: " / ".join(
        "-" if row[name] is None else f"{row[name]:.2f}" for name in _CPU
    ),
    "decoded with": lambda row: chosen_words(row) if row["group"] == Group.SERVICES.value else "-",
    "output": lambda row: (
        f"{row['different']} of {row['text_count']} DIFFER" if row["different"] else "identical"
    ),
}


def peer_tables(rows: Sequence[Row]) -> str:
    """Lay the rows out, in a table for each number of streams."""
    parts = []
    for count, own in groupby(rows, itemgetter("stream_count")):
        parts += [f"{counted(count, 'stream')}; times in ms\n", table(own, _COLUMNS)]
    return "\n".join([*parts, _LEGEND])


def peer_findings(rows: Sequence[Row]) -> list[str]:
    """Say in a line each whether all outputs are the same, and where the library's are not."""
    wrong = [f"{row['name']} x {row['stream_count']}" for row in rows if not row["identical"]]
    lines = [
        f"AN OUTPUT DIFFERED from plain decoding: {', '.join(wrong)}"
        if wrong
        else "Every output of the services and the engine was identical to plain decoding."
    ]
    if failed := [row for row in rows if row["failures"]]:
        lines.append(
            "Runs in which a request failed, which were done again: "
            + ", ".join(f"{row['name']} x {row['stream_count']}" for row in failed)
            + f" ({failed[0]['failures'][0]})"
        )
    library = [row for row in rows if row["group"] == Group.LIBRARY.value]
    different, texts = (sum(row[it] for row in library) for it in ("different", "text_count"))
    if different:
        lines.append(f"Of the library's {texts} texts {different} differ, which rounding may do.")
    return lines


def load_models(results: Results) -> str:
    """What streams at once get of real models, from the services and from their peers."""
    content = results["load-models"]
    counts = sorted({row["stream_count"] for row in content["rows"]})
    by_name: dict[str, dict[int, Row]] = {}
    for row in content["rows"]:
        by_name.setdefault(f"{row['group']}: {row['name']}", {})[row["stream_count"]] = row
    columns = [
        (f"{counted(count, 'stream')}, {name}", count, _COLUMNS[name])
        for name in ("tokens/s", "ITL p50 / p99")
        for count in counts
    ]
    lines = [
        [name, *(said(rows[count]) if count in rows else "-" for _, count, said in columns)]
        for name, rows in by_name.items()
    ]
    headings = ["", *(heading for heading, _, _ in columns)]
    findings = "\n".join(peer_findings(content["rows"]))
    return f"{circumstances_line(content)}:\n\n{markdown_table(headings, lines)}\n{findings}"
