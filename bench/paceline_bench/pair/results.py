"""What `paceline bench pair` has found, and how it is kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any

from paceline_bench.pair.acceptance import accepted_shares, run_rate, verdict_rate
from paceline_bench.pair.contest import times_as_fast
from paceline_bench.report import spread

if TYPE_CHECKING:
    from paceline_bench.pair.acceptance import Block
    from paceline_bench.pair.contest import Entry
    from paceline_bench.pair.engine import Latency
    from paceline_bench.pair.sharing import Shared
    from paceline_bench.report import Row
    from paceline_engine.calls import ModelDescription

__all__ = ["Acceptance", "ModelResult", "PairResult", "kept"]


@dataclass(frozen=True, slots=True)
class ModelResult:
    """A model and what its forwards take.

    Attributes:
        description: What it is.
        latency: By the DSI paper's method.
        rows_ms: The median of a forward, by its rows.
        context: Tokens before those rows.
    """

    description: ModelDescription
    latency: Latency
    rows_ms: dict[int, float]
    context: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often the drafter was right.

    Attributes:
        runs: For each prompt the tokens that drafter and target have in common from the start.
        tokens: How many there were to compare.
        blocks: What the target judged in texts of the same length.
        lookahead: Draft tokens of those blocks.
    """

    runs: list[int]
    tokens: int
    blocks: list[Block]
    lookahead: int


@dataclass(slots=True)
class PairResult:
    """Everything that was measured; parts may be missing."""

    target: ModelResult
    drafter: ModelResult
    acceptance: Acceptance | None = None
    entries: list[Entry] = field(default_factory=list)
    sharing: list[Shared] = field(default_factory=list)
    sharing_entries: list[Entry] = field(default_factory=list)

    @property
    def all_identical(self) -> bool:
        """Whether every text was plain decoding's."""
        return all(entry.is_identical for entry in (*self.entries, *self.sharing_entries))


def kept(result: PairResult) -> dict[str, Any]:
    """Describe everything; a speed-up only stands where texts were identical."""
    content: dict[str, Any] = {
        "rows": [_entry_json(entry, result.entries[0]) for entry in result.entries],
        "models": {
            role: _model_json(model)
            for role, model in (("target", result.target), ("drafter", result.drafter))
        },
        "sharing": [asdict(shared) for shared in result.sharing],
        "sharing_strategies": [
            _entry_json(entry, result.sharing_entries[0]) for entry in result.sharing_entries
        ],
    }
    if (acceptance := result.acceptance) is not None:
        content["acceptance"] = {
            "common_runs": acceptance.runs,
            "tokens": acceptance.tokens,
            "rate_by_common_runs": run_rate(acceptance.runs),
            "rate_by_verdicts": verdict_rate(acceptance.blocks),
            "lookahead": acceptance.lookahead,
            "blocks": len(acceptance.blocks),
            "accepted_per_block": mean(block.accepted for block in acceptance.blocks),
            "accepted_shares": accepted_shares(acceptance.blocks),
        }
    return content


def _model_json(model: ModelResult) -> Row:
    return {
        "name": model.description.name,
        "fingerprint": model.description.fingerprint,
        "dtype": model.description.dtype,
        "device": model.description.device,
        "layers": model.description.layer_count,
        "ttft_ms": asdict(spread(model.latency.first_ms)),
        "ttft_mean_ms": mean(model.latency.first_ms),
        "tpot_ms": asdict(spread(model.latency.later_ms)),
        "tpot_mean_ms": mean(model.latency.later_ms),
        "context": model.context,
        "rows_ms": model.rows_ms,
    }


def _entry_json(entry: Entry, plain: Entry) -> Row:
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
