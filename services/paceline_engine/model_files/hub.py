"""Fetches a model from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline_engine.model_files.small_files import CONFIG, SMALL_FILES, read_json
from paceline_engine.model_files.weight_files import INDEX_FILE, named_parts
from paceline_engine.terms.backend import ModelLoadError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Check: TypeAlias = "Callable[[str, Mapping[str, Any]], object]"
"""Refuses a model by its name and its config.json with a ModelLoadError."""


def download(model: str, revision: str | None, *, check: Check | None) -> Path:
    """Fetch what is read of a model, and nothing else that its repository has.

    Raises:
        ModelLoadError: The hub did not give it, or `check` refuses it.
    """
    directory = _fetch(model, revision, (*SMALL_FILES, INDEX_FILE))
    if check is not None and (directory / CONFIG).is_file():
        check(model, read_json(directory / CONFIG))
    index_path = directory / INDEX_FILE
    parts = named_parts(index_path, read_json(index_path) if index_path.exists() else None)
    return _fetch(model, directory.name, tuple(parts))


def _fetch(model: str, revision: str | None, names: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=[*names]))
    except (LocalEntryNotFoundError, ConnectionError) as error:  # offline, or it was told to be
        raise ModelLoadError(
            f"model {model!r}: there is no such directory here, and the hub cannot be reached:"
            " give the directory of a model that is on this machine"
        ) from error
    except Exception as error:
        raise ModelLoadError(
            f"model {model!r}: there is no such directory here, and the hub did not give it"
            f" ({first_line(error)})"
        ) from error
