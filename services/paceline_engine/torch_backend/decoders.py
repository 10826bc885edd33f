"""Chooses how a model is computed: the fastest way that gives the library's own logits."""

from __future__ import annotations

import logging
import math
from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend.compiled_products import few_row_products, use_few_rows
from paceline_engine.torch_backend.compiled_steps import compile_steps
from paceline_engine.torch_backend.compiler import StepsUnavailableError
from paceline_engine.torch_backend.families import can_fuse
from paceline_engine.torch_backend.grouped_linear import GroupProduct
from paceline_engine.torch_backend.int8_linear import has_vnni
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.library import LibraryDecoder, LibraryText, score_alone
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.shared_rows import SharedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline_engine.torch_backend.compiled_steps import Steps
    from paceline_engine.torch_backend.int8_linear import Int8Product
    from paceline_engine.torch_backend.packed_linear import Product
    from paceline_engine.torch_backend.shared_rows import ForwardRows

_log = logging.getLogger(__name__)

# Two sequences, and how many rows each has in some forwards; in two of these as many.
_PIECES = ([8, 4, 1, 2, 1], [5, 1, 1, 2, 7])


class Decoder(Protocol):
    """From rows of sequences to logits."""

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers, called as modules; none if they cannot be told."""

    def __call__(self, rows: ForwardRows) -> Tensor:
        """Do a forward, and return the logits of the scored rows: (rows, V)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The library's own results for two sequences.

    Attributes:
        token_ids: The sequences, of 16 tokens each.
        logits: (32, V), one sequence's after the other's.
        shape: The shape of a token's keys and values; None if layers differ.
        bytes_per_token: The memory of a token in the library's cache.
    """

    token_ids: Tensor
    logits: Tensor
    shape: KeyValueShape | None
    bytes_per_token: int


def choose_decoder(
    name: str, model: Any, *, sample: Sample, together: bool, packs: bool = True
) -> Decoder | None:
    """Choose how to compute a model; None if the library has to, one sequence at a time.

    Each way has to prove that rows of two sequences in one forward get the library's logits.

    Args:
        name: The model's name, for the log.
        sample: The library's logits, to compare with.
        together: How its forwards attend; see `SharedRows`.
        packs: Whether to pack weights, where they can be.
    """
    if sample.shape is None:
        return None
    if can_fuse(model):
        fused = FusedLlama(model, packs=packs)
        if _agrees(fused, sample, together=together):
            fused.lend_head(model)
            return fused
        fused.give_back(model)
        _log.warning("model %s: its layers are not fused: their logits are off", name)
    own_attention = model.config._attn_implementation  # noqa: SLF001 - there is no public word
    reasons: list[str] = []
    for makes_keys in (False, True):
        decoder = None
        try:
            with quiet_library():
                decoder = LibraryDecoder(model, makes_keys=makes_keys, packs=packs)
            if _agrees(decoder, sample, together=together):
                return decoder
            reasons.append("its logits are off")
        except Exception as error:  # noqa: BLE001 - models that are not made for it break anywhere
            reasons.append(f"{type(error).__name__}: {error}")
        if decoder is not None:
            decoder.give_back()
    reason = reasons[0]
    with quiet_library():
        model.set_attn_implementation(own_attention)
    _log.warning("model %s: one text for each forward, in the library's own way (%s)", name, reason)
    return None


@torch.inference_mode()
def take_sample(model: Any) -> Sample:
    """Let the library compute two sequences, in forwards of several rows and of one."""
    texts = [LibraryText() for _ in _PIECES]
    count = sum(_PIECES[0])
    tokens = torch.arange(2 * count, device=model.device) * 7919 % model.config.vocab_size
    logits = torch.cat(
        [
            score_alone(model, text, part, rows=len(part))
            for text, own, pieces in zip(texts, torch.split(tokens, count), _PIECES, strict=True)
            for part in torch.split(own, pieces)
        ]
    )
    layers: list[tuple[Tensor, Tensor]] = [
        (layer.keys, layer.values)  # type: ignore[union-attr, misc]
        for layer in texts[0].state.layers
    ]
    shapes = {(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in layers}
    shape = None
    if len(shapes) == 1:
        # Some families make logits of another dtype.
        shape = KeyValueShape(len(layers), *shapes.pop(), layers[0][0].dtype, logits.device)
    byte_count = sum(keys.nbytes + values.nbytes for keys, values in layers)
    return Sample(token_ids=tokens, logits=logits, shape=shape, bytes_per_token=byte_count // count)


def agree(expected: Tensor, actual: Tensor, *, dtype: torch.dtype) -> bool:
    """Tell a difference of rounding from an error; NaN agrees with nothing.

    Args:
        expected, actual: Logits.
        dtype: What they were computed in; they themselves may be more precise.
    """
    difference = float((actual - expected).abs().max() / expected.abs().max())
    return difference <= math.sqrt(torch.finfo(dtype).eps)


@torch.inference_mode()
def _agrees(decoder: Decoder, sample: Sample, *, together: bool) -> bool:
    assert sample.shape is not None
    own = torch.split(sample.token_ids, sum(_PIECES[0]))
    slabs = Slabs(sample.shape)
    texts = [KeyValues(slabs, reserve_length=len(each)) for each in own]
    rows = partial(SharedRows, together=together)
    found = compute_in_pieces(decoder, texts, own, pieces=_PIECES, rows=rows)
    return agree(sample.logits, found, dtype=sample.shape.dtype)


def compute_in_pieces(
    decoder: Decoder,
    texts: Sequence[KeyValues],
    token_ids: Sequence[Tensor],
    *,
    pieces: Sequence[Sequence[int]],
    rows: Callable[..., ForwardRows],
) -> Tensor:
    """Compute sequences in pieces side by side: the logits of one after the other's.

    Args:
        texts: Empty sequences.
        token_ids: The tokens of each.
        pieces: How many rows each has in some forwards.
        rows: Makes the rows of a forward.
    """
    logits: list[list[Tensor]] = [[] for _ in texts]
    for counts in zip(*pieces, strict=True):
        parts = [
            array("I", ids[text.length : text.length + count].tolist())
            for text, ids, count in zip(texts, token_ids, counts, strict=True)
        ]
        for text, count in zip(texts, counts, strict=True):
            text.make_room(count)
        found = decoder(rows(texts, parts, counts))[: sum(counts)]  # without fillings
        scored = torch.split(found, [*counts])
        for text, part, mine, own in zip(texts, parts, logits, scored, strict=True):
            text.extend(part)
            mine.append(own)
    return torch.cat([own for mine in logits for own in mine])


class quiet_library:  # noqa: N801 - a context manager
    """Turn the library's warnings off about facts that this module finds out by itself."""

    def __enter__(self) -> None:
        self._verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        transformers_logging.set_verbosity(self._verbosity)


def use_compiled(
    name: str,
    decoder: Decoder | None,
    products: Sequence[Product],
    large: Mapping[torch.Size, Int8Product],
) -> None:
    """Let a model compute in compiled code what has the same bits there.

    Args:
        name: The model's.
        decoder: What computes it.
        products: Its products, if they are of whole numbers.
        large: See `check_exact`.

    Raises:
        ModelLoadError: Products in four bits cannot be computed.
    """
    fused = decoder if isinstance(decoder, FusedLlama) and decoder.can_use_steps else None
    few = few_row_products(products) if has_vnni() else []
    if fused is None and not few:
        return
    try:
        steps, few = _compiled(name, few, has_layers=fused is not None)
    except StepsUnavailableError as error:
        _log.info("model %r: nothing is compiled, which would be faster: %s", name, error)
        return
    if few:
        count = use_few_rows(few, steps, large=large)
        _log.info("model %r: few rows of %d of %d products are compiled", name, count, len(few))
    if fused is None:
        return
    if fused.use_steps(steps):
        _log.info(
            "model %r: what it computes between products is compiled, attention too; its bits are"
            " torch's for these numbers of rows: %s",
            name,
            ", ".join(map(str, sorted(fused.agreeing_counts))) or "none",
        )
    else:
        _log.warning(
            "model %r: what was compiled gives other bits than torch's operators, and is not used",
            name,
        )


def _compiled(name: str, few: list[Product], *, has_layers: bool) -> tuple[Steps, list[Product]]:
    """Compile steps, and the products that are compiled, too: none, if that fails.

    Args:
        few: The products that could be compiled.
        has_layers: Whether the model has layers for the steps.

    Raises:
        ModelLoadError: Products in groups cannot be computed.
        StepsUnavailableError: Nothing can be compiled.
    """
    if not few:
        return compile_steps(), few
    try:
        return compile_steps(products=True), few
    except StepsUnavailableError as error:
        if any(isinstance(each, GroupProduct) for each in few):
            raise ModelLoadError(f"--weights int4 cannot be computed here: {error}") from error
        if not has_layers:
            raise
        steps = compile_steps()
        _log.info("model %r: its products are not compiled: %s", name, error)
        return steps, []
