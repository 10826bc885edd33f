"""What is told of a generation as a whole: why it ended, and how it was decoded."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline import FinishReason

if TYPE_CHECKING:
    from paceline_gateway.generating.generations import Choice


def finish_reason(choice: Choice) -> str:
    """Say why a choice ended."""
    return "length" if choice.finished.finish_reason is FinishReason.LENGTH else "stop"


def details(choice: Choice) -> dict[str, Any]:
    """Describe how a choice was decoded."""
    started, finished = choice.started, choice.finished
    return {
        "index": choice.index,
        "request_id": started.request_id,
        "seed": started.seed,
        "strategy": started.strategy,
        "rule": finished.promise,
        "lookahead": finished.lookahead,
        "width": started.width,
        "branches": started.branches,
        "targets_used": finished.targets_used,
        "plan_note": started.plan_note,
        "finish_reason": finished.finish_reason,
        "statistics": asdict(finished.statistics),
    }
