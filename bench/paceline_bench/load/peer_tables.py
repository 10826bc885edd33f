"""What is printed of real models under load, from the JSON rows."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from paceline_bench.load.tables import chosen_words, percentiles_column
from paceline_bench.pair.contest import Group
from paceline_bench.report import circumstances_line
from paceline_bench.table import Column, markdown
from paceline_contract.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_bench.report import Results, Row

_LEGEND = """\
Tokens/s: of all texts together, from the first request to the last token. Ratios: of tokens/s, to
its own with 1 stream, to the library's faster variant, to our engine without services.
TTFT: time to first token. ITL: inter-token latency, the time between two messages of a stream
divided over the tokens of the later one, for each of these tokens. Gap: that time as it is, which
the simulated form calls ITL. CPU: ms for each token, of the orchestrator, of what has the models,
and of the client; it tells most where others use the machine. No p99 is told of fewer than 100
measurements.
"""
_CPU = ("orchestrator_ms_per_token", "model_ms_per_token", "client_ms_per_token")
_TOKENS = Column("tokens/s", "tokens_per_second", "{:.1f}")
_ITL = percentiles_column("ITL p50 / p99", "itl_ms", digits=1)
_COLUMNS = (
    Column("who", lambda row: f"{row['group']}: {row['name']}"),
    _TOKENS,
    Column("to 1", "to_one_stream", "{:.2f}x"),
    Column("to library", "to_library", "{:.2f}x"),
    Column("to engine", "to_engine", "{:.2f}x"),
    percentiles_column("TTFT p50 / p99", "ttft_ms"),
    _ITL,
    percentiles_column("gap p50 / p99", "gap_ms", digits=1),
    Column("CPU", lambda row: " / ".join(Column("", it, "{:.2f}").cell(row) for it in _CPU)),
    Column(
        "decoded with",
        lambda row: chosen_words(row) if row["group"] == Group.SERVICES.value else None,
    ),
    Column(
        "output",
        lambda row: (
            f"{row['different']} of {row['text_count']} DIFFER" if row["different"] else "identical"
        ),
    ),
)


def peer_tables(rows: Sequence[Row]) -> str:
    """Lay the rows out, in a table for each number of streams."""
    parts = []
    for count, own in groupby(rows, itemgetter("stream_count")):
        parts += [f"{counted(count, 'stream')}; times in ms\n", markdown(own, _COLUMNS)]
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
    by_name: dict[str, Row] = {}
    for row in content["rows"]:
        name = f"{row['group']}: {row['name']}"
        by_name.setdefault(name, {"name": name})[row["stream_count"]] = row
    columns = [Column("", "name")] + [
        column.within(count, heading=f"{counted(count, 'stream')}, {column.heading}")
        for column in (_TOKENS, _ITL)
        for count in sorted({row["stream_count"] for row in content["rows"]})
    ]
    findings = "\n".join(peer_findings(content["rows"]))
    table = markdown(by_name.values(), columns)
    return f"{circumstances_line(content)}:\n\n{table}\n{findings}"
