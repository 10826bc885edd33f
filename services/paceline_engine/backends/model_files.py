"""Which files of a model may be loaded, and what names them.

Only data is read: safetensors, JSON. A directory with anything that could run is refused whole,
because a stranger's checkpoint is a stranger's program otherwise.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline_engine.backends.base import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ModelFiles", "find_model_files", "read_json"]

_CODE_SUFFIXES = frozenset({".py", ".so"})
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
# A header names a file's tensors; a hundred thousand of them take so much.
_MOST_HEADER_BYTES = 8 << 20
_DECIDING_FILES = ("config.json", "generation_config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checked model directory."""

    directory: Path
    name: str
    revision: str
    weights: tuple[Path, ...]
    tokenizer: bytes

    def fingerprint(self, dtype: str) -> str:
        """Hash what decides a token: weights, configuration, tokenizer, dtype.

        Cost: reads every weight once, about a second per gigabyte.
        """
        total = hashlib.sha256(f"dtype {dtype}\n".encode())
        deciding = (self.directory / name for name in _DECIDING_FILES)
        for path in (*self.weights, *(path for path in deciding if path.exists())):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{path.name} {digest}\n".encode())
        return total.hexdigest()

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end a text, the generation configuration's before the model's.

        Raises:
            ModelLoadError: one is no token id.
        """
        for name in ("generation_config.json", "config.json"):
            path = self.directory / name
            found = read_json(path).get("eos_token_id") if path.exists() else None
            if found is not None:
                ids = tuple(found) if isinstance(found, list) else (found,)
                # A bool is an int, and no token.
                if not all(type(each) is int and each in range(1 << 32) for each in ids):
                    raise ModelLoadError(f"{path}: eos_token_id is {found!r}, not a token id")
                return ids
        return ()


def find_model_files(model: str, *, revision: str | None = None) -> ModelFiles:
    """Find and check a model: a directory, or a hub id where there is a network.

    Raises:
        ModelLoadError: there is no such model, a file is missing, or one is not plain data.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ModelLoadError(f"model {model!r}: there is no config.json in {directory}")
        _refuse_links_outside(directory)
        name, revision = directory.resolve().name, revision or ""
    elif directory.is_absolute() or model.startswith((".", "~")):
        raise ModelLoadError(f"model {model!r}: there is no such directory")
    else:
        directory = _download(model, revision)
        name, revision = model, directory.name
    _refuse_programs(directory)
    weights = tuple(sorted(directory.glob("*.safetensors")))
    if not weights:
        raise ModelLoadError(f"model {model!r}: no .safetensors file in {directory}")
    _refuse_endless_headers(weights)
    tokenizer_path = directory / "tokenizer.json"
    for path in (directory / "config.json", tokenizer_path):
        if not path.is_file():
            raise ModelLoadError(f"model {model!r}: {path.name} is missing in {directory}")
    return ModelFiles(
        directory,
        name=name,
        revision=revision,
        weights=weights,
        tokenizer=tokenizer_path.read_bytes(),
    )


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja"]
            )
        )
    except Exception as error:
        raise ModelLoadError(
            f"model {model!r}: no such directory, and the hub did not give it ({error})"
        ) from error


def _refuse_links_outside(directory: Path) -> None:
    root = directory.resolve()
    for path in directory.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise ModelLoadError(f"{path} is a link that leaves the model's directory")


def _refuse_endless_headers(weights: Sequence[Path]) -> None:
    for path in weights:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _MOST_HEADER_BYTES:
            raise ModelLoadError(
                f"{path}: its header has {header_bytes} bytes, more than {_MOST_HEADER_BYTES}"
            )


def _refuse_programs(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.suffix in _CODE_SUFFIXES:
            raise ModelLoadError(f"{path}: models that bring their own code are not run")
        if path.suffix in _PICKLE_SUFFIXES:
            raise ModelLoadError(f"{path}: pickled weights can run code; convert to safetensors")
    for path in directory.glob("*.json"):
        if path.name != "tokenizer.json" and "auto_map" in read_json(path):
            raise ModelLoadError(f"{path}: auto_map asks for the model's own code to be run")


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a file; what is none has no fields.

    Raises:
        ModelLoadError: the file cannot be read, or is no JSON.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not readable as JSON ({error})") from error
    return content if isinstance(content, dict) else {}
