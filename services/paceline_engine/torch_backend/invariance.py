"""The proof at load that a model's forwards are invariant: see `invariant.py`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend.attention import FEW_ROWS
from paceline_engine.torch_backend.attention_kernels import Attention
from paceline_engine.torch_backend.blockwise import (
    BLOCK_SIZES,
    MOST_MULTIPLE,
    compute_in_blocks,
    pack_all,
    rows_are_alike,
)
from paceline_engine.torch_backend.families import has_experts
from paceline_engine.torch_backend.invariant import TILE, InvariantRows, Tile
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import Slabs
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.recurrent.invariant_rows import InvariantRecurrentRows
from paceline_engine.torch_backend.recurrent.recurrent_text import RecurrentText

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline_engine.terms.calls import ModelDescription
    from paceline_engine.torch_backend.decoders import Decoder
    from paceline_engine.torch_backend.kv_arena import KeyValueShape
    from paceline_engine.torch_backend.lora_rows import LoraRows


@dataclass(frozen=True, slots=True)
class _Fed:
    """How many rows of two sequences are in each forward; 0: no rows of the second."""

    first: tuple[int, ...]
    second: tuple[int, ...]


# Across the edge of a tile, in forwards of 4 to 72 rows; the last in all multiples of 4 up to 32.
_LENGTH = 72
_WAYS = (
    _Fed((1, 30, 4, 35, 1, 1), (61, 1, 2, 6, 1, 1)),
    _Fed((16, 1, 47, 3, 5), (1, 8, 1, 60, 2)),
    _Fed((1, 5, 6, 7, 11, 10, 14, 18), (3, 3, 6, 9, 9, 14, 14, 14)),
)

# The ends of the tiles in which attention is compared: kernels take keys in blocks of 512, so that
# all remainders come; and how many keys there may be at most.
_SHORT_ENDS, _LONG_ENDS = range(TILE, 1024 + TILE, TILE), (2048, 4096, 8192)
_MOST_KEYS = 1 << 15
# The numbers of rows that are compared after many keys, where each takes long.
_FEW_COUNTS = (16, 32, 48)

# How many sequences are compared in one kernel.
_SIDE_BY_SIDE = 8

MOST_INT8_THREADS = 2
"""With more threads elementwise kernels divide numbers in other places, inside of rows."""

# How many numbers a kernel for AVX-512 computes at once; the rest of a part it computes otherwise.
_TOGETHER = 32


def make_invariant(
    model: Any,
    decoder: Decoder | None,
    shape: KeyValueShape | None,
    *,
    description: ModelDescription,
    threads: int,
    attention_places: Mapping[int, int] | None = None,
) -> int:
    """Let a model compute products in blocks; check that logits follow from their sequence alone.

    Args:
        decoder: Computes it, if it is not computed in the library's own way.
        shape: The shape of its keys and values, if it is the same in all layers; else None.
        threads: The threads of a forward: one; or two in eight bits.
        attention_places: Of a model with recurrent layers: see `RecurrentRows`.

    Returns:
        The multiple up to which rows have to be filled for it.

    Raises:
        ModelLoadError: they do not, or the check cannot tell.
    """
    if (
        decoder is not None
        and shape is not None
        and description.shares_forwards
        # In bfloat16 a small sample would not always show that they do not.
        and not has_experts(model)
        and (threads == 1 or _halves_are_whole(model, decoder))
    ):
        kernels = pack_all(model, decoder)
        sizes = next((each for each in BLOCK_SIZES if rows_are_alike(kernels, each)), None)
        if sizes is not None:
            compute_in_blocks(model, decoder, sizes.blocks)
            # Attention may need more rows than products do.
            for multiple in sorted({sizes.multiple, MOST_MULTIPLE}):
                if is_invariant(
                    decoder,
                    shape,
                    vocabulary_size=description.vocabulary_size,
                    context_length=description.context_length,
                    multiple=multiple,
                    attention_places=attention_places,
                ):
                    return multiple
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
    vocabulary_size: int,
    context_length: int,
    multiple: int,
    lora_of: Callable[[Sequence[int]], LoraRows | None] = lambda _: None,
    attention_places: Mapping[int, int] | None = None,
) -> bool:
    """Tell whether two sequences get the same bits whole and alone, and in pieces side by side.

    They are short. What depends on a sequence's length is its attention, which is compared by
    itself.

    Args:
        multiple: The multiple up to which rows are filled.
        lora_of: Returns which rows have LoRA adapters, by the number of each sequence's rows.
        attention_places: Of a model with recurrent layers: see `RecurrentRows`.
    """
    most_tokens = min(vocabulary_size, context_length)
    length = min(_LENGTH, most_tokens)
    texts = [
        [(7919 * place + 31 * (place // 5) + n) % most_tokens for place in range(length)]
        for n in (1, 2)
    ]
    sample = _Sample(
        decoder, shape, multiple=multiple, lora_of=lora_of, attention_places=attention_places
    )
    alone = [sample.scored([text], [(length,)])[0] for text in texts]
    for way in _WAYS:
        together = sample.scored(texts, [way.first, way.second])
        if not all(map(torch.equal, alone, together)):
            return False
    most_keys = min(context_length, _MOST_KEYS)
    return all(
        _attends_alike(kind, dtype=shape.dtype, most_keys=most_keys, multiple=multiple)
        for kind in sample.attended
    )


@dataclass(frozen=True, slots=True)
class _Attended:
    """What attention computed: with how many heads for each key head, in which widths, and how."""

    group: int
    key_width: int
    value_width: int
    scale: float
    soft_cap: float | None
    has_sinks: bool


class _SampleRows(InvariantRows):
    """Rows that tell how they attend.

    Attributes:
        attended: Told of it.
    """

    attended: set[_Attended]

    @property
    def spans(self) -> None:
        """None: compiled attention tells nothing. It has torch's bits, which is proved apart."""

    def attend(
        self, layer: int, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """See `SharedRows`."""
        self._tell(queries, keys=keys, values=values, how=how)
        return super().attend(layer, queries, keys=keys, values=values, how=how)

    def attend_to_made(
        self, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """See `SharedRows`."""
        self._tell(queries, keys=keys, values=values, how=how)
        return super().attend_to_made(queries, keys=keys, values=values, how=how)

    def _tell(self, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention) -> None:
        self.attended.add(
            _Attended(
                group=len(queries) // keys.shape[-3],
                key_width=keys.shape[-1],
                value_width=values.shape[-1],
                scale=how.scale,
                soft_cap=how.soft_cap,
                has_sinks=how.sinks is not None,
            )
        )


class _RecurrentSampleRows(InvariantRecurrentRows, _SampleRows):
    """The same of a model with recurrent layers."""


class _Sample:
    """Forwards of a model over pieces of sequences.

    Attributes:
        attended: How layers attended in them.
    """

    def __init__(
        self,
        decoder: Decoder,
        shape: KeyValueShape,
        *,
        multiple: int,
        lora_of: Callable[[Sequence[int]], LoraRows | None],
        attention_places: Mapping[int, int] | None,
    ) -> None:
        self._places = attention_places
        self._decoder, self._shape, self._multiple = decoder, shape, multiple
        self._lora_of = lora_of
        self.attended: set[_Attended] = set()

    def scored(
        self, texts: Sequence[Sequence[int]], pieces: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Feed sequences in pieces, and return the logits of all their rows: (L, V) each."""
        slabs = Slabs(self._shape, tile=TILE)
        kind = KeyValues if self._places is None else RecurrentText
        caches = [kind(slabs, reserve_length=len(text)) for text in texts]
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
            rows = self._rows([cache for cache, _, _ in fed], [part for _, part, _ in fed], sizes)
            rows.attended = self.attended
            rows.lora = self._lora_of(sizes)
            scored = torch.split(self._decoder(rows)[: sum(sizes)], sizes)
            for (cache, part, mine), own in zip(fed, scored, strict=True):
                cache.extend(part)
                mine.append(own)
        return [torch.cat(own) for own in logits]

    def _rows(
        self, texts: Sequence[KeyValues], token_ids: Sequence[array[int]], counts: Sequence[int]
    ) -> _SampleRows:
        if self._places is None:
            return _SampleRows(texts, token_ids, counts, multiple=self._multiple)
        return _RecurrentSampleRows(
            texts,
            token_ids,
            counts,
            multiple=self._multiple,
            attention_places=self._places,
        )


def _attends_alike(kind: _Attended, *, dtype: torch.dtype, most_keys: int, multiple: int) -> bool:
    """Tell whether rows at the ends of long sequences attend alike, however many come at once.

    Kernels divide long products, in ways that can depend on how many rows there are. Values come in
    pairs that add up to zero: see `rows_are_alike`.
    """
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(kind.group, TILE, kind.key_width, generator=generator).to(dtype)
    sinks = torch.randn(kind.group, generator=generator) if kind.has_sinks else None
    how = Attention(scale=kind.scale, soft_cap=kind.soft_cap, sinks=sinks)
    last = -(-most_keys // TILE) * TILE
    ends = [*(end for end in (*_SHORT_ENDS, *_LONG_ENDS) if end < last), last]
    keys = _in_pairs(last, kind.key_width, sign=1, generator=generator).to(dtype)
    values = _in_pairs(last, kind.value_width, sign=-1, generator=generator).to(dtype)

    def seen(rows: range, end: int, sequences: int = 1) -> Tensor:
        """Attend with the same rows of so many equal sequences, side by side."""
        first = end - TILE + rows.start
        tile = Tile([rows] * sequences, [first] * sequences, multiple=multiple)
        return tile.attend(
            queries,
            keys=keys.expand(sequences, -1, -1, -1),
            values=values.expand(sequences, -1, -1, -1),
            how=how,
        )

    for end in ends:
        whole = seen(range(TILE), end)
        is_short = end in _SHORT_ENDS
        counts = range(multiple, TILE, multiple) if is_short else _FEW_COUNTS
        for count in counts:
            for rows in (range(count), range(TILE - count, TILE)):
                alone = whole[:, rows.start : rows.stop]
                if not torch.equal(seen(rows, end), alone):
                    return False
                if is_short and count <= FEW_ROWS:
                    together = seen(rows, end, _SIDE_BY_SIDE)
                    if not torch.equal(together, alone.repeat(1, _SIDE_BY_SIDE, 1)):
                        return False
    return True


def _in_pairs(count: int, width: int, *, sign: int, generator: torch.Generator) -> Tensor:
    """Return random rows, (1, 1, count, width), each of which comes twice in its tile.

    Args:
        sign: The factor of the second ones.
    """
    first = torch.randn(count // TILE, TILE // 2, width, generator=generator)
    return torch.cat((first, sign * first.flip(1)), 1).view(1, 1, count, width)
