"""Variants of decoding that compete on the bundled models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.variants import compete, row_of
from paceline_local.models import NOTHING_KEPT
from paceline_local.screen import progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from paceline import Completion
    from paceline_bench.report import Row
    from paceline_bench.variants import Variant
    from paceline_local.bundled import BundledModels


async def contest_rows(
    variants: Sequence[Variant], prompts: Sequence[str], *, max_tokens: int, repeats: int
) -> list[Row]:
    """Let every variant decode every prompt, and sum up each beside the first, plain decoding."""
    done: dict[str, list[Completion]] = {variant.name: [] for variant in variants}
    runs = len(variants) * len(prompts) * repeats
    with progress(f"{len(prompts)} texts x {max_tokens} tokens", total=runs) as step:
        async for variant, completion in compete(
            variants, prompts, max_tokens=max_tokens, repeats=repeats
        ):
            done[variant.name].append(completion)
            step(variant.name)
    plain = done[variants[0].name]
    return [row_of(variant, done[variant.name], plain=plain) for variant in variants]


def exit_code(rows: Iterable[Row]) -> int:
    """Return 0 if every text equals plain decoding's, otherwise 1."""
    return 0 if all(row["identical"] for row in rows) else 1


def held_out_prompts(models: BundledModels) -> list[str]:
    """Read the prompts from files that no bundled model has seen."""
    return [prompt["text"] for prompt in models.held_out()]


def model_flags(directory: Path) -> tuple[str, ...]:
    """Say to a model server what each of them is told: they share a machine."""
    own = (f"--model={directory}", "--dtype=float32", "--device=cpu", "--threads=1")
    return (*own, NOTHING_KEPT)
