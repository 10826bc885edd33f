"""Time the turns of conversations, each of which sends all that was said before.

Run from the repository's root; it prints Markdown. What it said is in bench/LOG.md. The bundled
pair, real processes and gRPC; a system that keeps texts and one that does not take turns.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from paceline import AsyncClient, Strategy
from paceline_bench.contests import held_out_prompts
from paceline_local.bundled import find_models
from paceline_local.models import NOTHING_KEPT, model_arguments
from paceline_local.system import LocalSystem, LocalSystemConfig

MODELS = find_models(None)
CONVERSATIONS, TURNS, TOKENS = 6, 6, 24
NEW_CHARACTERS = 400
STRATEGIES = (Strategy.AUTOREGRESSIVE, Strategy.SPECULATIVE, Strategy.DISTRIBUTED)


def system(*flags: str) -> LocalSystemConfig:
    """Return two targets and a drafter of the bundled models."""
    targets, drafters = (
        (*model_arguments(model), *flags) for model in (MODELS.target, MODELS.drafter)
    )
    return LocalSystemConfig(
        targets=2, drafters=1, target_arguments=targets, drafter_arguments=drafters
    )


async def converse(client: AsyncClient, strategy: Strategy, words: str) -> list[float]:
    """Return when the first token of each turn came, in milliseconds after it was asked."""
    said, times = "", []
    for turn in range(TURNS):
        said += words[turn * NEW_CHARACTERS :][:NEW_CHARACTERS]
        sent_at = time.perf_counter()
        came_at = 0.0
        async with client.generate(said, strategy=strategy, max_tokens=TOKENS) as generation:
            async for chunk in generation:
                came_at = came_at or time.perf_counter()
                said += chunk.text
        times.append(1e3 * (came_at - sent_at))
    return times


async def main(words: str) -> None:
    """Print the median of each turn."""
    size = TURNS * NEW_CHARACTERS
    ways = {"kept": system(), "not kept": system(NOTHING_KEPT)}
    print(f"| strategy | texts are | {' | '.join(f'turn {n + 1}' for n in range(TURNS))} |")
    print(f"| --- | --- |{' ---: |' * TURNS}")
    for strategy in STRATEGIES:
        found: dict[str, list[list[float]]] = {name: [] for name in ways}
        async with LocalSystem(ways["kept"]) as one, LocalSystem(ways["not kept"]) as other:
            for index in range(CONVERSATIONS):
                for name, each in zip(ways, (one, other), strict=True):
                    async with AsyncClient(each.orchestrator_address) as client:
                        text = words[index * size :][:size]
                        found[name].append(await converse(client, strategy, text))
        for name, times in found.items():
            medians = [f"{statistics.median(turn):.0f}" for turn in zip(*times, strict=True)]
            print(f"| {strategy.abbreviation} | {name} | {' | '.join(medians)} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main("\n".join(held_out_prompts(MODELS))))
