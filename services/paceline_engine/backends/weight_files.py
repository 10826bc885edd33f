"""Which files hold a model's weights: one, or the parts that an index names, and no others.

An index is a stranger's word. A part that lies elsewhere, or a weight that two parts have, would be
loaded although nobody has looked at it, or looked at and not loaded. So a part is a plain name in
the model's directory, and holds exactly the weights that the index says it holds.
"""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING

from paceline.plain_files import open_plain_file
from paceline_engine.backends.base import ModelLoadError
from paceline_engine.few_names import few_names

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import BinaryIO

__all__ = ["INDEX_FILE", "WEIGHTS_FILE", "check_weights", "part_names"]

_log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# A header names a file's tensors; a hundred thousand of them take so much.
_MOST_HEADER_BYTES = 8 << 20
_PART = re.compile(r"[^/\\\0]+\.safetensors")


def part_names(directory: Path, index: Mapping[str, object] | None) -> Mapping[str, frozenset[str]]:
    """Return the files that hold the weights, by name, and what the index says is in each.

    Args:
        directory: The model's.
        index: The content of its INDEX_FILE; None: it has none, and one file has all, whatever
            that is.

    Raises:
        ModelLoadError: There are none, or it cannot be told which.
    """
    has_one = (directory / WEIGHTS_FILE).exists()
    if index is None:
        if not has_one:
            raise ModelLoadError(f"{directory}: there is no {WEIGHTS_FILE}, and no {INDEX_FILE}")
        return {WEIGHTS_FILE: frozenset()}
    parts: dict[str, set[str]] = {}
    path = directory / INDEX_FILE
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path}: weight_map is no object with an entry for each weight")
    for weight, part in weight_map.items():
        if not isinstance(part, str) or not _PART.fullmatch(part):
            raise ModelLoadError(
                f"{path}: {weight} is said to be in {part!r}, which is no name of a .safetensors"
                " file beside it"
            )
        parts.setdefault(part, set()).add(weight)
    if has_one and WEIGHTS_FILE not in parts:
        raise ModelLoadError(
            f"{directory}: there is {WEIGHTS_FILE}, and {INDEX_FILE} names other files: remove the"
            " one that is not the model"
        )
    return {part: frozenset(weights) for part, weights in sorted(parts.items())}


def check_weights(directory: Path, parts: Mapping[str, frozenset[str]]) -> None:
    """Check that each part holds what the index says; say what is there besides.

    A weight that no part is said to hold is loaded if the model has one of that name.

    Raises:
        ModelLoadError: A part lacks a weight, or holds one of another part; or a file is missing,
            no plain file, or has too many weights.
    """
    named = frozenset[str]().union(*parts.values())
    for part, weights in parts.items():
        path = directory / part
        try:
            with open_plain_file(path) as file:
                stored = _stored_names(path, file, is_read=bool(weights))
        except OSError as error:
            raise ModelLoadError(f"{path}: {error.strerror}") from error
        if missing := weights - stored:
            raise ModelLoadError(f"{path} lacks {few_names(missing)}, which {INDEX_FILE} names")
        if twice := stored & (named - weights):
            raise ModelLoadError(
                f"{path} holds {few_names(twice)}, which {INDEX_FILE} names in another file"
            )
        if weights and (extra := stored - named):
            _log.warning("%s holds what %s does not name: %s", path, INDEX_FILE, few_names(extra))
    if others := {path.name for path in directory.glob("*.safetensors")} - parts.keys():
        _log.warning("%s: not loaded, as they are no part: %s", directory, few_names(others))


def _stored_names(path: Path, file: BinaryIO, *, is_read: bool) -> frozenset[str]:
    """Return which weights a file holds; none if they are not to be read."""
    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > _MOST_HEADER_BYTES:
        raise ModelLoadError(
            f"{path}: its header has {header_bytes} bytes, more than {_MOST_HEADER_BYTES}"
        )
    if not is_read:
        return frozenset()
    try:
        header = json.loads(file.read(header_bytes))
        return frozenset(header.keys() - {"__metadata__"})
    except (ValueError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{path}: its header is not readable ({error})") from error
