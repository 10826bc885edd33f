"""The proof at load that a model's forwards are invariant: see `invariant.py`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend.families import has_experts
from paceline_engine.torch_backend.invariant import TILE, InvariantRows
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import Slabs
from paceline_engine.torch_backend.llama import FusedLlama

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_engine.terms.calls import ModelDescription
    from paceline_engine.torch_backend.decoders import Decoder
    from paceline_engine.torch_backend.kv_arena import KeyValueShape
    from paceline_engine.torch_backend.lora_rows import LoraRows


@dataclass(frozen=True, slots=True)
class _Fed:
    """How many rows of two sequences are in each forward; 0: no rows of the second."""

    first: tuple[int, ...]
    second: tuple[int, ...]


# Across the edge of a tile, in forwards of 4 to 72 rows.
_LENGTH = 72
_WAYS = (
    _Fed((1, 30, 4, 35, 1, 1), (61, 1, 2, 6, 1, 1)),
    _Fed((16, 1, 47, 3, 5), (1, 8, 1, 60, 2)),
)

MOST_INT8_THREADS = 2
"""With more threads elementwise kernels divide numbers in other places, inside of rows."""

# How many numbers a kernel for AVX-512 computes at once; the rest of a part it computes otherwise.
_TOGETHER = 32


def check_invariance(
    model: Any,
    decoder: Decoder | None,
    shape: KeyValueShape | None,
    *,
    description: ModelDescription,
    threads: int,
) -> None:
    """Check that a sequence's logits follow from the sequence alone.

    Args:
        decoder: Computes it, if it is not computed in the library's own way.
        shape: The shape of its keys and values, if it is the same in all layers; else None.
        threads: The threads of a forward: one; or two in eight bits.

    Raises:
        ModelLoadError: they do not, or the check cannot tell.
    """
    most_tokens = min(description.vocabulary_size, description.context_length)
    holds = (
        decoder is not None
        and shape is not None
        and description.shares_forwards
        # In bfloat16 a small sample would not always show that they do not.
        and not has_experts(model)
        and (threads == 1 or _halves_are_whole(model, decoder))
        and is_invariant(decoder, shape, most_tokens=most_tokens)
    )
    if not holds:
        raise ModelLoadError(
            f"model {description.name!r} cannot be served with --invariant: what it computes for a"
            " text depends on how the text comes, or on what else comes with it"
        )


def _halves_are_whole(model: Any, decoder: Decoder) -> bool:
    """Whether half of the numbers of 4 rows are always whole steps of a kernel.

    Then both threads of an elementwise kernel compute all numbers in the same way.
    """
    config = model.config
    return isinstance(decoder, FusedLlama) and not (
        config.intermediate_size % _TOGETHER or config.head_dim % _TOGETHER
    )


@torch.inference_mode()
def is_invariant(
    decoder: Decoder,
    shape: KeyValueShape,
    *,
    most_tokens: int,
    lora_of: Callable[[Sequence[int]], LoraRows | None] = lambda _: None,
) -> bool:
    """Tell whether two sequences get the same bits whole and alone, and in pieces side by side.

    Args:
        most_tokens: The smaller of the vocabulary and the context.
        lora_of: Returns which rows have LoRA adapters, by the number of each sequence's rows.
    """
    length = min(_LENGTH, most_tokens)
    texts = [
        [(7919 * place + 31 * (place // 5) + n) % most_tokens for place in range(length)]
        for n in (1, 2)
    ]
    scored = partial(_scored, decoder, shape, lora_of=lora_of)
    alone = [scored(texts=[text], pieces=[(length,)])[0] for text in texts]
    for way in _WAYS:
        together = scored(texts=texts, pieces=[way.first, way.second])
        for expected, actual in zip(alone, together, strict=True):
            if not torch.equal(expected, actual):
                return False
    return True


def _scored(
    decoder: Decoder,
    shape: KeyValueShape,
    *,
    texts: Sequence[Sequence[int]],
    pieces: Sequence[Sequence[int]],
    lora_of: Callable[[Sequence[int]], LoraRows | None],
) -> list[Tensor]:
    """Feed sequences in pieces, and return the logits of all their rows: (L, V) each."""
    slabs = Slabs(shape, tile=TILE)
    caches = [KeyValues(slabs, reserve_length=len(text)) for text in texts]
    logits: list[list[Tensor]] = [[] for _ in texts]
    for counts in zip(*pieces, strict=True):
        fed = [
            (cache, array("I", text[cache.length : cache.length + count]), mine)
            for cache, text, count, mine in zip(caches, texts, counts, logits, strict=True)
            if cache.length < len(text)
        ]
        if not fed:
            break
        for cache, part, _ in fed:
            cache.make_room(len(part))
        sizes = [len(part) for _, part, _ in fed]
        rows = InvariantRows([cache for cache, _, _ in fed], [part for _, part, _ in fed], sizes)
        rows.lora = lora_of(sizes)
        scored = torch.split(decoder(rows)[: sum(sizes)], sizes)
        for (cache, part, mine), own in zip(fed, scored, strict=True):
            cache.extend(part)
            mine.append(own)
    return [torch.cat(own) for own in logits]
