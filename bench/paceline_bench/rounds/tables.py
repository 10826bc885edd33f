"""The tables of `paceline bench rounds`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.report import table
from paceline_bench.rounds.measurement import median

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_bench.rounds.measurement import Rounds, Streams


def rounds_table(rounds: Sequence[Rounds]) -> str:
    """Lay out the medians of single requests."""
    return table(
        rounds,
        {
            "target and drafter": lambda it: str(it.case),
            "calls are": lambda it: it.way,
            "plain token, ms beyond": lambda it: _number(it.plain_token_ms),
            "round in blocks, ms beyond": lambda it: _number(it.round_ms),
            "draft's end to Verify, ms": lambda it: _number(it.to_verify_ms),
            "verdict to Draft, ms": lambda it: _number(it.to_draft_ms),
            "SI over plain": lambda it: _number(it.gain),
        },
    )


def streams_table(streams: Sequence[Streams]) -> str:
    """Lay out the CPU time of a token with many streams."""
    return table(
        streams,
        {
            "strategy": lambda it: it.strategy,
            "calls are": lambda it: it.way,
            "streams": lambda it: str(it.stream_count),
            "orchestrator, CPU ms a token": lambda it: f"{it.cpu_ms['orchestrator']:.3f}",
            "targets": lambda it: f"{it.cpu_ms['targets']:.3f}",
            "drafter": lambda it: f"{it.cpu_ms['drafters']:.3f}",
            "tokens/s": lambda it: f"{it.tokens_per_second:.0f}",
        },
    )


def _number(values: Sequence[float]) -> str:
    found = median(values)
    return "-" if found is None else f"{found:.2f}"
