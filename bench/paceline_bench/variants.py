"""Variants of decoding that decode the same texts in turn: tokens and rows of a forward."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from paceline import Strategy
from paceline.plain_files import open_plain_file
from paceline_bench.gpus import gpu_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from paceline import (
        AsyncClient,
        Completion,
        DrafterKind,
        GenerateOptions,
        Statistics,
    )
    from paceline_bench.report import Row

_MOST_HEADER_BYTES = 8 << 20  # names a file's tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A variant of decoding.

    Attributes:
        name: What tables call it.
        client: A client of a system that can.
        lookahead: Draft tokens in a verification, where there are some; None: the planner says.
        targets: How many it may use.
        drafter: Who drafts, if the request says so.
        extra_parameters: What it needs besides the target.
    """

    name: str
    client: AsyncClient
    strategy: Strategy
    lookahead: int | None = None
    targets: int = 1
    drafter: DrafterKind | None = None
    extra_parameters: int = 0

    async def decode(self, prompt: str, *, max_tokens: int) -> Completion:
        """Decode a text, greedily, to its full length.

        Raises:
            PacelineError: What the request failed with.
        """
        options: GenerateOptions = {
            "strategy": self.strategy,
            "max_tokens": max_tokens,
            "targets": self.targets,
            "ignore_eos": True,
        }
        if self.strategy is Strategy.SPECULATIVE:
            options["dispatch"] = "blocks"  # drafts in vain would count as the drafter's forwards
        if self.lookahead is not None:
            options["lookahead"] = self.lookahead
        if self.drafter is not None:
            options["drafter"] = self.drafter
        return await self.client.generate(prompt, **options).collect()


async def compete(
    variants: Sequence[Variant], prompts: Sequence[str], *, max_tokens: int, repeats: int
) -> AsyncIterator[tuple[Variant, Completion]]:
    """Let every variant decode every text so often, in turn: what disturbs one disturbs all.

    Whoever comes first with a text is another one each time. Each variant is warmed up first.
    """
    for variant in variants:
        await variant.decode(prompts[0], max_tokens=max_tokens)
    for turn in range(repeats * len(prompts)):
        prompt = prompts[turn % len(prompts)]
        for index in range(len(variants)):
            variant = variants[(turn + index) % len(variants)]
            yield variant, await variant.decode(prompt, max_tokens=max_tokens)


def row_of(variant: Variant, own: Sequence[Completion], *, plain: Sequence[Completion]) -> Row:
    """Sum up what became of a variant's texts, beside plain decoding's of the same ones.

    Rows are those of the tokens: of a text's next one, and of what is judged after it; not the
    prompt's, nor those that streams have in the upper layers besides.
    """
    statistics = [each.finished.statistics for each in own]
    tokens = sum(len(each.token_ids) for each in own)
    forwards = sum(each.target_forward_count for each in statistics)
    drafter_forwards = sum(each.drafter_forward_count for each in statistics)
    drafted = sum(each.drafted_token_count for each in statistics)
    accepted = sum(each.accepted_token_count for each in statistics)
    judged = accepted + sum(each.rejected_token_count for each in statistics)
    return {
        "name": variant.name,
        "strategy": variant.strategy.abbreviation,
        "tokens": tokens,
        "target_forwards": forwards,
        "drafter_forwards": drafter_forwards,
        "drafter_models": _forwards_by_model(statistics),
        "lookaheads": sorted({each.finished.lookahead for each in own}),
        "tokens_per_forward": tokens / forwards,
        "rows_per_forward": 1 + drafted / forwards,
        "accepted": accepted,
        "acceptance_rate": accepted / judged if judged else None,
        "gpu_count": gpu_count(
            variant.strategy.abbreviation,
            max(each.finished.targets_used for each in own),
            drafter_count=int(drafter_forwards > 0),
        ),
        "tokens_per_second": tokens / _seconds(own),
        "times_as_fast": _seconds(plain) / _seconds(own),
        "repeats_times_as_fast": [
            _seconds([plain_one]) / _seconds([own_one])
            for plain_one, own_one in zip(plain, own, strict=True)
        ],
        "extra_parameters": variant.extra_parameters,
        "identical": [it.token_ids for it in own] == [it.token_ids for it in plain],
    }


def parameter_count(weights: Path) -> int:
    """Return how many numbers a file in safetensors, or a GGUF file, has.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such file.
        ModelLoadError: It is no GGUF file.
    """
    if weights.suffix == ".gguf":
        from paceline_engine.model_files.gguf_file import GgufFile

        return sum(prod(each.shape) for each in GgufFile.read(weights).tensors.values())
    with open_plain_file(weights) as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _MOST_HEADER_BYTES:
            raise ValueError(f"{weights}: its header has {header_bytes} bytes")
        header = json.loads(file.read(header_bytes))
    return sum(prod(each["shape"]) for name, each in header.items() if name != "__metadata__")


def _forwards_by_model(statistics: Sequence[Statistics]) -> dict[str, int]:
    ran: Counter[str] = Counter()
    for each in statistics:
        ran.update({model.model_name: model.forward_count for model in each.drafter_models})
    return dict(ran)


def _seconds(completions: Sequence[Completion]) -> float:
    return sum(each.finished.statistics.total_ns for each in completions) / 1e9


def walltime_improvement(
    token_count: int,
    *,
    target_forwards: int,
    drafter_forwards: Mapping[str, int],
    costs: Mapping[str, float],
) -> float:
    """Return the standardised walltime improvement: how many times as fast as plain decoding.

    Forwards alone count, and each as one, however many rows it has; Max-Gram costs nothing.

    Difference: the paper's formula sums over tokens where it means drafters.

    Args:
        token_count: New tokens.
        target_forwards: Of the target.
        drafter_forwards: Of each model that drafts.
        costs: Of a forward of each of them, as a part of the target's.
    """
    spent = sum(costs[model] * count for model, count in drafter_forwards.items())
    return token_count / (target_forwards + spent)
