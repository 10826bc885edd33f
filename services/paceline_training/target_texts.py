"""Texts that a target wrote, from files; and the tokens that it writes most often.

A file has `token_ids`, (texts, tokens) of integers, in safetensors. Further tensors beside them are
not read: a target's distributions are computed with its features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save

from paceline.plain_files import open_plain_file
from paceline_engine.torch_backend.device import usable_device
from paceline_engine.torch_backend.model_loading import load_model
from paceline_training.continuations import continue_greedily, spread_prompts
from paceline_training.windows import TextTooShortError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from paceline_engine.model_files.files import ModelFiles

_KEY = "token_ids"
_TEXTS_AT_ONCE = 64
_PROMPT_SHARE = 4  # of a text that the model goes on with


class TextsError(Exception):
    """A folder of texts cannot be used. The message is one line."""


def load_texts(folder: Path) -> Tensor:
    """Load the texts of all files in a folder, in the order of their names: (N, L) int64.

    Raises:
        TextsError: there are none, or they are not of one length.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise TextsError(f"{folder} has no .safetensors file with texts")
    parts = [_load(path) for path in paths]
    lengths = {part.shape[1] for part in parts}
    if len(lengths) > 1:
        raise TextsError(f"{folder} has texts of different lengths: {sorted(lengths)}")
    return torch.cat(parts)


def _load(path: Path) -> Tensor:
    try:
        # The library opens the path itself, and would wait for a FIFO's writer.
        with open_plain_file(path), safe_open(path, framework="pt") as file:
            found: Tensor = file.get_tensor(_KEY)
    except Exception as error:  # a file may break anything
        reason = " ".join(str(error).split())[:200]
        raise TextsError(f"{path} has no readable {_KEY} ({reason})") from error
    if found.dim() != 2 or found.is_floating_point() or not found.numel():
        raise TextsError(f"{path}: {_KEY} {tuple(found.shape)} are no texts of integers")
    return found.long()


def write_texts(
    files: ModelFiles,
    stream: Tensor,
    *,
    folder: Path,
    count: int,
    length: int,
    device: str,
    tell: Callable[[str], None],
) -> None:
    """Let a model write texts, from beginnings in another text; those that are there stay.

    Args:
        files: The model's.
        stream: (N,) the text that beginnings are cut from.
        folder: Where the texts go, `_TEXTS_AT_ONCE` in a file.
        count: How many texts there are to be.
        length: Tokens of each, a quarter of which are the beginning.
        device: Where the model is computed.
        tell: Called with lines of progress.

    Raises:
        TextTooShortError: beginnings are longer than the text.
    """
    prompt_length = max(1, length // _PROMPT_SHARE)
    if len(stream) <= prompt_length:
        raise TextTooShortError(
            f"the text has {len(stream)} tokens, and a beginning has {prompt_length}"
        )
    parts = torch.split(spread_prompts(stream, count=count, length=prompt_length), _TEXTS_AT_ONCE)
    paths = [folder / f"texts-{number:05}.safetensors" for number in range(len(parts))]
    missing = [number for number, path in enumerate(paths) if not path.exists()]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    model = load_model(files, dtype="float32").to(usable_device(device))
    for number in missing:
        made = continue_greedily(model, parts[number], length=length - prompt_length)
        partial = paths[number].with_suffix(".partial")
        partial.write_bytes(save({_KEY: made.token_ids.to("cpu", torch.int32).contiguous()}))
        partial.replace(paths[number])  # a kill while writing leaves no half of a file
        tell(f"texts {min((number + 1) * _TEXTS_AT_ONCE, count)}/{count}")


def split_off(texts: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
    """Return the texts to learn from, and `count` of them that are held out, evenly spread.

    Raises:
        TextTooShortError: there would be none to learn from.
    """
    if len(texts) <= count:
        raise TextTooShortError(
            f"{count} texts are held out to measure with, and there are {len(texts)}"
        )
    held_out = torch.linspace(0, len(texts) - 1, count).long()
    is_left = torch.ones(len(texts), dtype=torch.bool)
    is_left[held_out] = False
    return texts[is_left], texts[held_out]


def most_frequent_tokens(texts: Sequence[Tensor], *, count: int, vocabulary_size: int) -> Tensor:
    """Return the tokens that texts have most often, ascending: (count,) int64.

    Among tokens that are as frequent those with a smaller number come first.
    """
    counts = torch.zeros(vocabulary_size, dtype=torch.int64)
    for each in texts:
        counts += torch.bincount(each.flatten(), minlength=vocabulary_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values
