"""How `paceline bench pair` keeps what it has found; tables and the picture are made of that."""

from __future__ import annotations

from dataclasses import asdict
from statistics import mean
from typing import TYPE_CHECKING, Any

from paceline_bench.pair.acceptance import accepted_shares, run_rate, verdict_rate
from paceline_bench.pair.contest import times_as_fast
from paceline_bench.report import spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline_bench.pair.acceptance import Block
    from paceline_bench.pair.contest import Entry
    from paceline_bench.pair.engine import Latency
    from paceline_bench.report import Row
    from paceline_engine.terms.calls import ModelDescription


def model_row(
    description: ModelDescription, latency: Latency, rows_ms: Mapping[int, float], *, context: int
) -> Row:
    """Describe a model and what its forwards take.

    Args:
        description: What it is.
        latency: By the DSI paper's method.
        rows_ms: The median of a forward, by its rows.
        context: Tokens before those rows.
    """
    return {
        "name": description.name,
        "fingerprint": description.fingerprint,
        "dtype": description.dtype,
        "device": description.device,
        "layers": description.layer_count,
        "ttft_ms": asdict(spread(latency.first_ms)),
        "ttft_mean_ms": mean(latency.first_ms),
        "tpot_ms": asdict(spread(latency.later_ms)),
        "tpot_mean_ms": mean(latency.later_ms),
        "context": context,
        "rows_ms": {str(count): time_ms for count, time_ms in rows_ms.items()},
    }


def acceptance_row(
    runs: Sequence[int], blocks: Sequence[Block], *, tokens: int, lookahead: int
) -> Row:
    """Describe how often the drafter was right.

    Args:
        runs: For each prompt the tokens that drafter and target have in common from the start.
        blocks: What the target judged in texts of the same length.
        tokens: How many there were to compare.
        lookahead: Draft tokens of those blocks.
    """
    return {
        "common_runs": list(runs),
        "tokens": tokens,
        "rate_by_common_runs": run_rate(runs),
        "rate_by_verdicts": verdict_rate(blocks),
        "lookahead": lookahead,
        "blocks": len(blocks),
        "accepted_per_block": mean(block.accepted for block in blocks),
        "accepted_shares": accepted_shares(blocks),
    }


def variant_rows(entries: Sequence[Entry]) -> list[Row]:
    """Describe every variant; a speed-up over the first only stands for identical texts."""
    return [_variant_row(entry, entries[0]) for entry in entries]


def all_identical(content: Mapping[str, Any]) -> bool:
    """Tell whether every text was plain decoding's."""
    return all(row["identical"] for row in (*content["rows"], *content["sharing_strategies"]))


def _variant_row(entry: Entry, plain: Entry) -> Row:
    contestant = entry.contestant
    described = {
        "group": contestant.group.value,
        "name": contestant.name,
        "method": contestant.method.value,
        "lookahead": contestant.lookahead,
        "targets": contestant.targets,
        "tokens_per_second": entry.tokens_per_second,
        "ms_per_token": entry.ms_per_token,
        "repeats_ms_per_token": entry.repeats_ms_per_token,
        "forward_ms_per_token": entry.forward_ms_per_token,
        "ttft_ms": entry.first_token_ms,
        "tokens_per_forward": entry.tokens_per_forward,
        "acceptance_rate": entry.acceptance_rate,
        "identical": entry.is_identical,
        "near_ties": entry.near_ties,
        "different": entry.wrong,
    }
    if entry.is_identical:
        described["speed_up"] = times_as_fast(
            entry.repeats_ms_per_token, plain.repeats_ms_per_token
        )
    return described
