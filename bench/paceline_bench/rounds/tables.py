"""The tables of `paceline bench rounds`, from the rows that it keeps."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from paceline_bench.table import Column, markdown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_bench.report import Row


def rounds_table(rows: Sequence[Row]) -> str:
    """Lay out the medians of single requests."""
    return markdown(rows, _ROUNDS)


def streams_table(rows: Sequence[Row]) -> str:
    """Lay out the medians of many streams: the CPU time of a token."""
    return markdown(rows, _STREAMS)


def _median(name: str) -> Callable[[Row], float | None]:
    return lambda row: statistics.median(row[name]) if row[name] else None


def _cpu(process: str) -> Callable[[Row], float]:
    return lambda row: statistics.median(row["cpu_ms"][process])


def _output(row: Row) -> str:
    return "identical" if row["is_identical"] else "DIFFERENT"


_ROUNDS = (
    Column("target and drafter, ms", lambda row: "{target_ms:g} and {drafter_ms:g}".format(**row)),
    Column("calls are", "transport"),
    Column("plain token, ms beyond", _median("plain_token_ms"), "{:.2f}"),
    Column("round in blocks, ms beyond", _median("round_ms"), "{:.2f}"),
    Column("bare message, ms", _median("bare_ms"), "{:.2f}"),
    Column("draft's end to Verify, ms", _median("to_verify_ms"), "{:.2f}"),
    Column("verdict to Draft, ms", _median("to_draft_ms"), "{:.2f}"),
    Column("SI over plain", _median("gain"), "{:.2f}"),
    Column("output", _output),
)
_STREAMS = (
    Column("decoding", "strategy"),
    Column("calls are", "transport"),
    Column("streams", "stream_count"),
    Column("orchestrator, CPU ms a token", _cpu("orchestrator"), "{:.3f}"),
    Column("targets", _cpu("targets"), "{:.3f}"),
    Column("drafter", _cpu("drafters"), "{:.3f}"),
    Column("tokens/s", _median("tokens_per_second"), "{:.0f}"),
    Column("output", _output),
)
