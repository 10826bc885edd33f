"""How many devices a way to decode has in use, for tokens/s of each."""

from __future__ import annotations

from paceline_protocol.methods import METHODS, Strategy, label_of

__all__ = ["GPU_WORDS", "gpu_count"]

GPU_WORDS = (
    "SI's drafter and target take turns, on one GPU; with DSI, and where SI drafts ahead, each"
    " server has its own."
)


def gpu_count(label: str, target_count: int, *, drafter_count: int = 1) -> int:
    """Return the devices of one request.

    Args:
        target_count: Targets in use.
        drafter_count: Drafters in use, if the method overlaps.
    """
    overlaps = {method.label: method.overlaps for method in METHODS.values()}
    overlaps[label_of(Strategy.SPECULATIVE, drafts_ahead=True)] = True
    return target_count + (drafter_count if overlaps[label] else 0)
