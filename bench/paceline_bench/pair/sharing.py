"""What a forward takes while other model processes compute on the same hardware."""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import TYPE_CHECKING

from paceline import Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import AsyncClient
    from paceline_bench.report import Row


async def measure_sharing(
    client: AsyncClient, prompt: Sequence[int], *, most: int, max_tokens: int
) -> list[Row]:
    """Decode a prompt plainly, on 1 to `most` targets at the same time.

    Returns:
        For each number of texts a target's forward of one row, the median over the texts of their
        means, and the tokens per second of all texts together.
    """
    return [
        await _measure(client, prompt, texts=texts, max_tokens=max_tokens)
        for texts in range(1, most + 1)
    ]


async def _measure(
    client: AsyncClient, prompt: Sequence[int], *, texts: int, max_tokens: int
) -> Row:
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
    means = (each.forward_ns / each.target_forward_count for each in statistics)
    return {
        "texts": texts,
        "forward_ms": median(means) / 1e6,
        "tokens_per_second": texts * max_tokens / elapsed,
    }
