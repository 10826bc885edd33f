"""A cheap look at a model before a process is started for it; its server looks at the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import InvalidFieldError
from paceline.plain_files import read_plain_file

if TYPE_CHECKING:
    from collections.abc import Sequence

_TAKES = "give a directory with config.json and tokenizer.json, a GGUF file or a hub id"
# What a file can begin with: GGUF, its older forms, and a pointer of Git LFS. The server says what
# to do with the latter two.
_BEGINNINGS = frozenset({b"GGUF", b"lmgg", b"fmgg", b"tjgg", b"algg", b"vers"})
_MOST_CONFIG_BYTES = 16 << 20


def check_models(arguments: Sequence[str]) -> None:
    """Check the models that a server's flags name.

    Raises:
        InvalidFieldError: One is no model.
    """
    for flag in arguments:
        name, _, value = flag.partition("=")
        if name == "--model":
            check_model(value)


def check_model(model: str) -> None:
    """Refuse what cannot be a model, as far as that can be seen at once.

    A word that names nothing here may be a hub id, and is left to the server.

    Raises:
        InvalidFieldError: It is no model.
    """
    try:
        path = Path(model).expanduser()
    except RuntimeError:  # it knows no such user
        raise InvalidFieldError(f"{model}: there is no such user: {_TAKES}") from None
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) not in _BEGINNINGS:
                raise InvalidFieldError(f"{model} is no GGUF file: {_TAKES}")
    elif path.is_dir():
        _check_folder(path)
    elif path.is_absolute() or model.startswith((".", "~")):
        raise InvalidFieldError(f"{model}: there is no such directory or file: {_TAKES}")


def _check_folder(folder: Path) -> None:
    if any(it.suffix.lower() == ".gguf" for it in folder.iterdir()) and not any(
        folder.glob("*.safetensors")
    ):
        return
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise InvalidFieldError(f"{folder} is no model: it has no {name}: {_TAKES}")
    config = folder / "config.json"
    try:
        content = json.loads(read_plain_file(config, most_bytes=_MOST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidFieldError(f"{config} cannot be used: {error}") from None
    if not isinstance(content, dict) or not content:
        raise InvalidFieldError(f"{config} cannot be used: it describes no model")
