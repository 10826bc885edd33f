"""A model that learns together with its adapter: low-rank weights on all its products.

The shared LoRA of Speculative Streaming (Bhendawade et al. 2024, arXiv 2402.11131, Section 3.2),
and Medusa-2 (Cai et al. 2024, arXiv 2401.10774, Section 2.2.2). The result is another model. With
its adapter it decodes exactly the tokens of its own plain decoding.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline_engine.model_files.files import find_model_files
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend.adapters.low_rank import (
    LOW_RANK_PARTS,
    LowRank,
    low_rank_linears,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_engine.model_files.files import ModelFiles

_ALPHA = 16  # Medusa-2's, for rank 32. The other paper does not say.


class FineTuning(nn.Module):
    """Low-rank weights (LoRA) for every layer of a model whose own weights stay as they are.

    From `attach` on they are in whatever the model computes, and in its streams, which go through
    the same layers.

    Attributes:
        names: The names of the weights that it changes.
    """

    def __init__(self, model: Any, *, rank: int) -> None:
        """Build weights that change nothing.

        Args:
            model: A model that can have adapters.
            rank: The weights' rank.
        """
        super().__init__()
        layers = model.model.layers
        self.names = [
            f"model.layers.{index}.{part}.weight"
            for index in range(len(layers))
            for part in LOW_RANK_PARTS
        ]
        self._scale = _ALPHA / rank
        self.parts = nn.ModuleList(
            LowRank(each.in_features, each.out_features, rank=rank)
            for layer in layers
            for each in low_rank_linears(layer)
        )

    def start_from(self, generator: torch.Generator) -> None:
        """Draw what is random before training."""
        for part in self._low_rank():
            part.start(generator)

    def attach(self, model: Any) -> None:
        """Let a model compute with them, for good."""
        linears = (linear for layer in model.model.layers for linear in low_rank_linears(layer))
        for linear, part in zip(linears, self._low_rank(), strict=True):
            linear.register_forward_hook(self._adding(part))

    @torch.no_grad()
    def changes(self) -> dict[str, Tensor]:
        """Return the differences to the model's weights: (outputs, inputs) each, by name."""
        return {
            name: (self._scale * part.up @ part.down).cpu()
            for name, part in zip(self.names, self._low_rank(), strict=True)
        }

    def _low_rank(self) -> list[LowRank]:
        return [part for part in self.parts if isinstance(part, LowRank)]

    def _adding(self, part: LowRank) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def add(_: nn.Module, inputs: Any, product: Tensor) -> Tensor:
            added: Tensor = part(inputs[0])
            return product + self._scale * added

        return add


def check_names(files: ModelFiles, tuning: FineTuning) -> None:
    """Check that a model's files have all weights that training changes.

    Raises:
        ModelLoadError: they are stored under other names, or in a GGUF file.
    """
    if files.gguf is not None:
        raise ModelLoadError(
            f"model {files.name!r} cannot be fine-tuned: its weights are in a GGUF file, whose"
            " quantisation they would lose; give its safetensors"
        )
    stored: set[str] = set()
    for path in files.weights:
        with safe_open(path, framework="pt") as file:
            stored |= {*file.keys()}
    if missing := {*tuning.names} - stored:
        raise ModelLoadError(
            f"model {files.name!r} cannot be fine-tuned: its files have no {min(missing)}"
        )


def write_fine_tuned(files: ModelFiles, tuning: FineTuning, directory: Path) -> ModelFiles:
    """Write a fine-tuned model: the files of the original model, with changed weights.

    It appears whole or not at all.

    Args:
        files: The original model's.
        tuning: The learnt low-rank weights.
        directory: It must not exist.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent) as folder:
        whole = Path(folder) / directory.name
        whole.mkdir()
        _write(files, tuning, whole)
        whole.rename(directory)
    return find_model_files(str(directory))


def _write(files: ModelFiles, tuning: FineTuning, directory: Path) -> None:
    changes = tuning.changes()
    for path in files.weights:
        tensors = load_file(path)
        for name in tensors.keys() & changes.keys():
            before = tensors[name]
            tensors[name] = (before + changes[name]).to(before.dtype)
        save_file(tensors, directory / path.name, metadata={"format": "pt"})
    files.check_unchanged()
    for name, content in files.contents.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
