"""Adopts a published EAGLE-3 head for a model: finds out how it is computed, and writes a card.

Published files count layers in different ways, and leave out switches that change what a head
computes. A wrong reading does not fail: the head only guesses badly. So all readings are tried on
the model's own continuations, and the one that guesses best is kept, with its hit rates.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.rank_paths import cartesian_tree
from paceline_engine.torch_backend.adapters.card import AdapterCard, model_fingerprint
from paceline_engine.torch_backend.adapters.eagle import EagleHead
from paceline_engine.torch_backend.adapters.files import (
    WEIGHTS_FILE,
    build_adapter,
    load_adapter,
    pack_weights,
)
from paceline_engine.torch_backend.device import usable_device
from paceline_engine.torch_backend.model_loading import load_model
from paceline_training.continuations import Continuations
from paceline_training.hit_rates import guess_ranks, tokens_per_forward
from paceline_training.measurement import continuations_of, measure_guesses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from paceline_engine.model_files.files import ModelFiles
    from paceline_engine.torch_backend.adapters.eagle_shape import EagleShape

_TEXTS_TO_COMPARE = 8
# Published heads are right in 0.4 to 0.8 of the cases; those of another model hardly ever.
_LEAST_HIT_RATE = 0.2


def adopt_head(
    files: ModelFiles,
    directory: Path,
    *,
    validation: Tensor,
    reach: int,
    out: Path,
    device: str,
    tell: Callable[[str], None],
) -> AdapterCard:
    """Write a published head as an adapter of a model, in the reading that guesses best.

    Args:
        files: The model's.
        directory: The head's.
        validation: (N,) int64; the model goes on with parts of it.
        reach: How many tokens the head is to guess.
        out: The directory that is written.
        device: The device that torch computes on.
        tell: Called with lines of progress.

    Raises:
        ModelLoadError: the model or the head cannot be loaded, or the head is not for this model.
        TextTooShortError: there is too little text.
    """
    model = load_model(files, dtype="float32").to(usable_device(device)).requires_grad_(False)
    fingerprint = model_fingerprint(files)
    loaded = load_adapter(directory, model=model, fingerprint=fingerprint)
    if not isinstance(loaded.module, EagleHead):
        raise ModelLoadError(f"adapter {str(directory)!r} is no EAGLE head, which alone is adopted")
    texts = continuations_of(model, validation)
    few = Continuations(texts.token_ids[:_TEXTS_TO_COMPARE], texts.prompt_length)
    best: tuple[float, EagleHead] | None = None
    for shape in _readings(loaded.module.shape, layer_count=model.config.num_hidden_layers):
        head = _read_as(shape, loaded.module, model, reach=reach)
        ranks = guess_ranks(head, model, few)
        tokens = tokens_per_forward(ranks, cartesian_tree((1,) * reach))
        first = float((ranks[..., 0] == 0).float().mean())
        tell(
            f"layers {', '.join(map(str, shape.feature_layers))}"
            f"  norm_before_residual {str(shape.norm_before_residual).lower()}"
            f"  norm_output {str(shape.norm_output).lower()}"
            f"  first guess {first:.3f}  tokens per forward {tokens:.2f}"
        )
        if best is None or tokens > best[0]:  # among equal ones as the files say
            best = tokens, head
    assert best is not None, "there is what the files say"
    return _write(best[1], model, files, texts, directory=directory, out=out)


def _readings(shape: EagleShape, *, layer_count: int) -> Iterator[EagleShape]:
    """Yield all ways to read a head's files, first what they say."""
    switches = (False, True)
    for offset, flips, feeds in product((0, -1, 1), switches, switches):
        layers = tuple(layer + offset for layer in shape.feature_layers)
        if layers[0] >= 0 and layers[-1] < layer_count:
            yield replace(
                shape,
                feature_layers=layers,
                norm_before_residual=shape.norm_before_residual != flips,
                norm_output=shape.norm_output != feeds,
            )


def _read_as(shape: EagleShape, head: EagleHead, model: Any, *, reach: int) -> EagleHead:
    """Return the same weights, computed in another way."""
    other = build_adapter("eagle", model, reach=reach, layers=0, rank=0, exit_rank=0, eagle=shape)
    assert isinstance(other, EagleHead)
    other.load_state_dict(head.state_dict())
    like = head.fc.weight
    return other.to(like.device, like.dtype).requires_grad_(False)


def _write(
    head: EagleHead,
    model: Any,
    files: ModelFiles,
    texts: Continuations,
    *,
    directory: Path,
    out: Path,
) -> AdapterCard:
    measured = measure_guesses(head, model, texts, node_count=head.reach)
    if measured.hit_rates[0][0] < _LEAST_HIT_RATE:
        raise ModelLoadError(
            f"adapter {str(directory)!r} is probably for another model: its first guess is right"
            f" in {measured.hit_rates[0][0]:.3f} of the cases at best"
        )
    packed, digest = pack_weights(head, dtype=torch.bfloat16)
    card = AdapterCard(
        kind="eagle",
        model=files.name,
        fingerprint=model_fingerprint(files),
        reach=head.reach,
        layers=0,
        rank=0,
        exit_rank=0,
        tree=measured.paths,
        weights_sha256=digest,
        training={
            "adopted": directory.name,
            "hit_rates": measured.hit_rates,
            "tokens_per_forward": {"one guess each": measured.single},
        },
        eagle=head.shape,
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / WEIGHTS_FILE).write_bytes(packed)
    card.write(out)
    return card
