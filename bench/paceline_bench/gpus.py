"""How many devices a variant of decoding has in use, for tokens/s of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.table import Column
from paceline_protocol.methods import METHODS, Strategy, label_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_bench.report import Row

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


def per_gpu(gpus: Callable[[Row], int]) -> tuple[Column, ...]:
    """Return two columns: the devices that a row has in use, and the tokens/s of each."""

    def made(row: Row) -> float | None:
        speed: float = row["tokens_per_second"] / gpus(row)
        return speed if row.get("identical", True) else None

    return Column("GPUs", gpus), Column("tokens/s per GPU", made, "{:.1f}")
