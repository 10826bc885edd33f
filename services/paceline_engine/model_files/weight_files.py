"""The files of a model's weights: one file, or the parts that an index names, and no others.

An index is not to be trusted. With a part in another directory, or a weight in two parts, the files
that are loaded could differ from the files that are checked. So a part is a plain name in the
model's directory, and has exactly the weights that the index names for it.

Other files beside them change nothing: the same weights in another program's format, or pickles,
which are never opened.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from paceline.plain_files import open_plain_file
from paceline_engine.model_files.small_files import refuse_pointer
from paceline_engine.terms.backend import ModelLoadError, few_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from io import BufferedReader
    from pathlib import Path

_log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# A header names a file's tensors; a hundred thousand of them take so much.
_MOST_HEADER_BYTES = 8 << 20
_LENGTH_BYTES = 8  # of the number before a header
_BEGINNING_BYTES = 64  # enough to tell a Git LFS pointer
_SHOWN_BYTES = 16  # of a text, such as a page that tells of an error
_CHUNK_BYTES = 1 << 20
_PART = re.compile(r"[^/\\\0]+\.safetensors")
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


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
    if index is None and not has_one:
        raise ModelLoadError(
            f"{directory}: there is no {WEIGHTS_FILE}, and no {INDEX_FILE}{_others(directory)}"
        )
    parts = named_parts(directory / INDEX_FILE, index)
    if has_one and WEIGHTS_FILE not in parts:
        raise ModelLoadError(
            f"{directory}: there is {WEIGHTS_FILE}, and {INDEX_FILE} names other files: remove the"
            " one that is not the model"
        )
    return parts


def named_parts(path: Path, index: Mapping[str, object] | None) -> Mapping[str, frozenset[str]]:
    """Return the files that an index names, and what it says is in each; see `part_names`.

    Args:
        path: Where the index lies.
        index: Its content; None: there is none, and one file has all.

    Raises:
        ModelLoadError: It names something else than files beside it.
    """
    if index is None:
        return {WEIGHTS_FILE: frozenset()}
    parts: dict[str, set[str]] = {}
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
    return {part: frozenset(weights) for part, weights in sorted(parts.items())}


def _others(directory: Path) -> str:
    """Say what lies in a directory in the place of its weights."""
    found = [path for path in directory.iterdir() if path.suffix.lower() in _PICKLE_SUFFIXES]
    if found:
        names = few_names(path.name for path in found)
        return f"; {names}: pickled weights can run code; convert to safetensors"
    if stored := [path.name for path in directory.glob("*.safetensors")]:
        return f"; {few_names(stored)}: not by these names"
    return ""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a weight lies: the bytes [begin, end) of its file, in a dtype and a shape."""

    begin: int
    end: int
    kind: str


def check_weights(directory: Path, parts: Mapping[str, frozenset[str]]) -> None:
    """Check that each part is whole and holds what the index says; say what is there besides.

    A weight that no part is said to hold is loaded if the model has one of that name.

    Raises:
        ModelLoadError: A part lacks a weight, or holds one of another part; or a file is missing,
            cut off, no plain file, a Git LFS pointer, or has too many weights.
    """
    named = frozenset[str]().union(*parts.values())
    left_over: set[str] = set()
    for part, weights in parts.items():
        path = directory / part
        stored = _stored_names(path)
        if missing := weights - stored:
            raise ModelLoadError(f"{path} lacks {few_names(missing)}, which {INDEX_FILE} names")
        if twice := stored & (named - weights):
            raise ModelLoadError(
                f"{path} holds {few_names(twice)}, which {INDEX_FILE} names in another file"
            )
        if twice := stored & left_over:
            raise ModelLoadError(f"{path} holds {few_names(twice)}, as another file does")
        left_over |= stored - named
        if weights and (extra := stored - named):
            _log.warning("%s holds what %s does not name: %s", path, INDEX_FILE, few_names(extra))
    if others := {path.name for path in directory.glob("*.safetensors")} - parts.keys():
        _log.warning("%s: not loaded, as they are no part: %s", directory, few_names(others))


def hash_weights(paths: Sequence[Path]) -> str:
    """Hash what weights are, in whichever files they lie: each one's name, dtype, shape and bytes.

    Cost: reads every weight once, about a second per gigabyte.

    Args:
        paths: The files, checked.

    Raises:
        ModelLoadError: One cannot be read.
    """
    digests: list[tuple[str, str, str]] = []
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for path in paths:
        try:
            with open_plain_file(path) as file:
                header = _read_header(path, file)
                for name, it in sorted(header.items(), key=lambda each: each[1].begin):
                    digests.append((name, it.kind, _hash_bytes(file, it, buffer)))
        except OSError as error:
            raise ModelLoadError(f"{path}: {error.strerror}") from error
    return hashlib.sha256(json.dumps(sorted(digests)).encode()).hexdigest()


def _hash_bytes(file: BufferedReader, stored: _Stored, buffer: memoryview) -> str:
    total = hashlib.sha256()
    file.seek(stored.begin)
    left = stored.end - stored.begin
    while left and (count := file.readinto(buffer[: min(left, len(buffer))])):
        total.update(buffer[:count])
        left -= count
    return total.hexdigest()


def _stored_names(path: Path) -> frozenset[str]:
    """Return which weights a file holds, and check that it holds them whole."""
    try:
        with open_plain_file(path) as file:
            return frozenset(_read_header(path, file))
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error


def _read_header(path: Path, file: BufferedReader) -> dict[str, _Stored]:
    """Return where a file's weights lie, by name, and check that they lie there whole."""
    size = os.fstat(file.fileno()).st_size
    beginning = file.read(_BEGINNING_BYTES)
    refuse_pointer(path, beginning)
    header_bytes = int.from_bytes(beginning[:_LENGTH_BYTES], "little")
    if header_bytes > _MOST_HEADER_BYTES:
        words = " ".join(beginning[:_SHOWN_BYTES].decode(errors="replace").split())
        if words.isascii() and words.isprintable():
            raise ModelLoadError(f"{path} holds a text and no weights: it begins with {words!r}")
        raise ModelLoadError(
            f"{path}: its header has {header_bytes} bytes, more than {_MOST_HEADER_BYTES}"
        )
    start = _LENGTH_BYTES + header_bytes
    if size < max(start, _LENGTH_BYTES + 1):
        raise ModelLoadError(f"{path} is cut off: it has {size} bytes, and ends in its header")
    file.seek(_LENGTH_BYTES)
    try:
        header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        stored = {name: _stored(each, start=start) for name, each in header.items()}
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise ModelLoadError(f"{path}: its header is not readable ({error})") from error
    # As the library demands: else two weights could share bytes, or bytes belong to none.
    places = [(start, start), *sorted((it.begin, it.end) for it in stored.values())]
    if any(before[1] != after[0] for before, after in pairwise(places)):
        raise ModelLoadError(f"{path}: its header's weights do not lie one behind the other")
    expected = places[-1][1]
    if size != expected:
        what = "is cut off" if size < expected else "is too long"
        raise ModelLoadError(
            f"{path} {what}: it has {size} bytes, and its header tells of {expected}"
        )
    return stored


def _stored(entry: Mapping[str, Any], *, start: int) -> _Stored:
    begin, end = entry["data_offsets"]
    if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end):
        raise ValueError(f"data_offsets {entry['data_offsets']!r}")
    return _Stored(start + begin, start + end, f"{entry.get('dtype')} {entry.get('shape')}")
