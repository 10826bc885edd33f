"""What a forward takes while other model processes compute on the same hardware."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from paceline import Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import AsyncClient

__all__ = ["Shared", "measure_sharing"]


@dataclass(frozen=True, slots=True)
class Shared:
    """So many texts at once, each on a target of its own.

    Attributes:
        texts: How many.
        forward_ms: A target's forward of one row, median over the texts of their means.
        tokens_per_second: Of all texts together.
    """

    texts: int
    forward_ms: float
    tokens_per_second: float


async def measure_sharing(
    client: AsyncClient, prompt: Sequence[int], *, most: int, max_tokens: int
) -> list[Shared]:
    """Decode a prompt plainly, on 1 to `most` targets at the same time."""
    return [await _measure(client, prompt, texts, max_tokens) for texts in range(1, most + 1)]


async def _measure(
    client: AsyncClient, prompt: Sequence[int], texts: int, max_tokens: int
) -> Shared:
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                client.generate(
                    prompt,
                    strategy=Strategy.AUTOREGRESSIVE,
                    targets=1,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                ).collect(),
                name=f"text {index}",
            )
            for index in range(texts)
        ]
    elapsed = time.perf_counter() - started
    statistics = [task.result().finished.statistics for task in tasks]
    return Shared(
        texts=texts,
        forward_ms=median(each.forward_ns / each.target_forward_count for each in statistics) / 1e6,
        tokens_per_second=texts * max_tokens / elapsed,
    )
