"""The bundled models with a target that costs more: `python models/widen.py`.

In a forward of the bundled target what lies around the products takes as long as they do, so it
shows what is right, and not what pays. Here it is four times as wide, and what is added are zeros:
it says what the bundled one says, its drafters are as often right, and its forwards take as long as
those of any other model of 115 million weights. It is made in seconds, where a trained one would be
ten times what all bundled models are together.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar

from paceline_engine.model_files.files import find_model_files
from paceline_engine.torch_backend.adapters.card import AdapterCard, model_fingerprint
from paceline_engine.torch_backend.adapters.files import WEIGHTS_FILE, build_adapter, pack_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

_MODELS = Path(__file__).resolve().parent
_TARGET = "python-target"
# Copied last: with it the folder is whole.
_PROMPTS = "prompts.jsonl"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a folder for `--models`: the wide target, adapters for it, and all else as it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=_MODELS.parent / "build" / "wide-models")
    parser.add_argument(
        "--factor",
        type=int,
        default=4,
        help="how many times as wide; with a power of four the norms' weights are divided by a"
        " power of two, which is exact (4: 115 million weights; 16: 1.8 billion, for a GPU)",
    )
    options = parser.parse_args(arguments)
    output, factor = options.output, options.factor
    disable_progress_bar()
    whole = output / _PROMPTS
    whole.unlink(missing_ok=True)
    for path in _MODELS.glob("python-*"):
        if path.is_dir() and not path.name.startswith(f"{_TARGET}-"):
            # The target's weights are written anew, and never stand there as they were.
            ignore = shutil.ignore_patterns("*.safetensors") if path.name == _TARGET else None
            shutil.copytree(path, output / path.name, dirs_exist_ok=True, ignore=ignore)
    model = _widen(
        LlamaForCausalLM.from_pretrained(_MODELS / _TARGET, dtype="bfloat16"), factor=factor
    )
    model.save_pretrained(output / _TARGET)
    fingerprint = model_fingerprint(find_model_files(str(output / _TARGET)))
    for folder in _MODELS.glob(f"{_TARGET}-*"):
        _widen_adapter(folder, output / folder.name, model=model, fingerprint=fingerprint)
    shutil.copy(_MODELS / _PROMPTS, whole)
    print(f"{output}: a target of {model.num_parameters():,} weights, most of them zeros")


def _wide_config(config: LlamaConfig, factor: int) -> LlamaConfig:
    """Return the configuration of a model that is wider, and else the same."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    changed = {name: factor * getattr(config, name) for name in names}
    changed["rms_norm_eps"] = config.rms_norm_eps / factor
    return LlamaConfig(**{**config.to_dict(), **changed})


@torch.no_grad()
def _widen(model: LlamaForCausalLM, *, factor: int) -> LlamaForCausalLM:
    """Return a wider model with the same logits: they differ by rounding."""
    with no_init_weights():
        wide = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            _wide_config(model.config, factor), dtype=model.dtype
        )
    assert isinstance(wide, LlamaForCausalLM)
    wide.tie_weights()
    _put_in_corner(wide, model.state_dict())
    for name, weight in wide.named_parameters():
        if name.endswith("norm.weight"):
            weight.div_(factor**0.5)
    return wide


def _widen_adapter(
    source: Path, output: Path, *, model: LlamaForCausalLM, fingerprint: str
) -> None:
    """Write an adapter that guesses for the wide model what one guesses for the bundled one."""
    card = AdapterCard.read(source)
    sizes: dict[str, Any] = {
        name: getattr(card, name) for name in ("reach", "layers", "rank", "exit_rank")
    }
    adapter = build_adapter(card.kind, model, **sizes)
    _put_in_corner(adapter, load_file(source / WEIGHTS_FILE))
    packed, digest = pack_weights(adapter, dtype=torch.bfloat16)
    output.mkdir(parents=True, exist_ok=True)
    (output / WEIGHTS_FILE).write_bytes(packed)
    replace(card, fingerprint=fingerprint, weights_sha256=digest).write(output)


@torch.no_grad()
def _put_in_corner(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Set a module's weights to smaller ones, and zeros beyond them."""
    for name, weight in module.state_dict().items():
        small = state[name]
        weight.zero_()
        weight[tuple(slice(size) for size in small.shape)] = small


if __name__ == "__main__":
    main()
