"""A GGUF file: its metadata and its tensors, checked before anything large is read.

GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is one file: a magic number, a
version, two counts, the metadata as typed keys and values, where each tensor lies, and the tensors.

    "GGUF" version tensor_count key_count | keys and values | tensor infos | padding | tensors

The reader here is our own because the `gguf` package's trusts a file: its counts decide how long
the package's loops run, and what is cut off there reads as empty. Here each count is compared with
the bytes that are left before it is believed. What a tensor's bytes mean is the package's part: it
knows the sizes of the quantisations and computes their numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from paceline.plain_files import open_plain_file
from paceline_engine.model_files.gguf_groups import groups_of
from paceline_engine.model_files.small_files import refuse_pointer
from paceline_engine.terms.backend import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import BufferedReader
    from pathlib import Path

    from numpy.typing import NDArray

    from paceline_engine.model_files.gguf_groups import GgufGroups

_MAGIC = b"GGUF"
_OLDER_MAGICS = frozenset({b"lmgg", b"fmgg", b"tjgg", b"algg"})  # of before August 2023
_VERSIONS = (2, 3)
# The metadata of the largest vocabularies, 260,000 tokens with their merges, have 20 MB.
_MOST_HEADER_BYTES = 128 << 20
_MOST_KEYS = 1 << 14
_MOST_TENSORS = 1 << 17
_MOST_ITEMS = 1 << 22  # of a list
_MOST_NAME_BYTES = 1 << 10
_MOST_DIMENSIONS = 4
_ALIGNMENT, _MOST_ALIGNMENT = 32, 1 << 16
_SHOWN_CHARACTERS = 80  # of a name in a message: a file's names are a stranger's
_CHUNK_BYTES = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_WHOLE = struct.Struct("<I")
_LONG = struct.Struct("<Q")

# What `gguf.dequantize` computes.
_KINDS = frozenset(
    {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "NVFP4"}
    | {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "IQ4_NL", "IQ4_XS"}
    | {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"}
)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: the bytes [begin, end) of the file.

    Attributes:
        kind: Its quantisation, as the format names it: "F32", "Q4_1".
        shape: As torch has it: the dimension whose numbers lie side by side is the last.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class GgufFile:
    """A checked GGUF file; its tensors are read when they are asked for.

    Attributes:
        path: Where it is.
        metadata: The values by their keys: numbers, truth values, texts, and lists of one of them.
        tensors: By their names.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read and check what stands before the tensors.

        Raises:
            ModelLoadError: It cannot be read, is no GGUF file of a known version, is cut off, or
                says what cannot be.
        """
        try:
            with open_plain_file(path) as file:
                header = _Header(path, file, size=os.fstat(file.fileno()).st_size)
                return cls(path, *header.read())
        except OSError as error:
            raise ModelLoadError(f"{path}: {error.strerror}") from error

    def weights(self, name: str) -> NDArray[np.float32]:
        """Return a tensor's numbers.

        Cost: reads and dequantises it; 50 to 500 MB of the file a second.

        Raises:
            ModelLoadError: It cannot be read.
        """
        return self.weights_in_groups(name)[0]

    def weights_in_groups(self, name: str) -> tuple[NDArray[np.float32], GgufGroups | None]:
        """Return a tensor's numbers, and the scales of their groups, if it has such groups.

        Cost, Raises: as `weights`.
        """
        tensor = self.tensors[name]
        try:
            with open_plain_file(self.path) as file:
                file.seek(tensor.begin)
                content = file.read(tensor.end - tensor.begin)
        except OSError as error:
            raise ModelLoadError(f"{self.path}: {error.strerror}") from error
        if len(content) != tensor.end - tensor.begin:
            raise ModelLoadError(f"{self.path} was changed while the model was loaded")
        kind = GGMLQuantizationType[tensor.kind]
        stored: NDArray[Any]
        if tensor.kind in {"F32", "F16"}:
            stored = np.frombuffer(content, dtype=f"<f{GGML_QUANT_SIZES[kind][1]}")
            return stored.reshape(tensor.shape).astype(np.float32), None
        stored = np.frombuffer(content, dtype=np.uint8)
        numbers: NDArray[np.float32] = dequantize(stored.reshape(-1, _row_bytes(tensor)), kind)
        blocks = stored.reshape(-1, GGML_QUANT_SIZES[kind][1])
        rows = math.prod(tensor.shape[:-1])
        return numbers.reshape(tensor.shape), groups_of(tensor.kind, blocks, rows=rows)

    def hash_weights(self) -> str:
        """Hash what the tensors are, wherever they lie: each one's name, kind, shape and bytes.

        Cost: reads the file once, about a second per gigabyte.

        Raises:
            ModelLoadError: It cannot be read.
        """
        digests = []
        try:
            with open_plain_file(self.path) as file:
                for name, it in sorted(self.tensors.items(), key=lambda each: each[1].begin):
                    digests.append((name, f"{it.kind} {[*it.shape]}", _hash_bytes(file, it)))
        except OSError as error:
            raise ModelLoadError(f"{self.path}: {error.strerror}") from error
        return hashlib.sha256(json.dumps(sorted(digests)).encode()).hexdigest()


def _row_bytes(tensor: GgufTensor) -> int:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
    return tensor.shape[-1] // block * block_bytes


def _hash_bytes(file: BufferedReader, tensor: GgufTensor) -> str:
    total = hashlib.sha256()
    file.seek(tensor.begin)
    left = tensor.end - tensor.begin
    while left and (content := file.read(min(left, _CHUNK_BYTES))):
        total.update(content)
        left -= len(content)
    return total.hexdigest()


class _Header:
    """Reads what stands before the tensors, from the file's beginning on."""

    def __init__(self, path: Path, file: BufferedReader, *, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._position = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        self._check_kind()
        tensor_count, key_count = self._long(), self._long()
        if tensor_count > _MOST_TENSORS or key_count > _MOST_KEYS:
            raise self._broken(
                f"it says that it has {tensor_count} tensors and {key_count} keys; there may be"
                f" {_MOST_TENSORS} and {_MOST_KEYS}"
            )
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._name("a key")
            if key in metadata:
                raise self._broken(f"it has the key {_shown(key)} twice")
            metadata[key] = self._value(key, self._whole())
        infos = [self._tensor_info() for _ in range(tensor_count)]
        return metadata, self._placed(infos, alignment=self._alignment(metadata))

    def _check_kind(self) -> None:
        beginning = self._file.read(64)
        refuse_pointer(self._path, beginning)
        self._file.seek(0)
        magic = beginning[: len(_MAGIC)]
        if magic in _OLDER_MAGICS:
            raise ModelLoadError(
                f"{self._path} is of a format older than GGUF: convert the model again"
            )
        if magic != _MAGIC:
            raise ModelLoadError(
                f"{self._path} is no GGUF file: it begins with {magic!r}; a model is a directory"
                " with config.json and tokenizer.json, a GGUF file, or a hub id"
            )
        self._take(len(_MAGIC))
        version = self._whole()
        if version & 0xFFFF == 0:
            raise ModelLoadError(f"{self._path}: it is written for big-endian machines")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise ModelLoadError(
                f"{self._path}: it is of GGUF version {version}, and {known} are known"
            )

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        found = metadata.get("general.alignment", _ALIGNMENT)
        if type(found) is not int or not 0 < found <= _MOST_ALIGNMENT or found & (found - 1):
            raise self._broken(f"general.alignment is {_shown(found)}, and no power of two")
        return found

    def _tensor_info(self) -> tuple[str, str, tuple[int, ...], int]:
        """Return a tensor's name, kind, shape, and where it begins after the header."""
        name = self._name("a tensor's name")
        dimension_count = self._whole()
        if not 0 < dimension_count <= _MOST_DIMENSIONS:
            raise self._broken(f"tensor {_shown(name)} has {dimension_count} dimensions")
        shape = tuple(reversed([self._long() for _ in range(dimension_count)]))
        number, offset = self._whole(), self._long()
        try:
            kind = GGMLQuantizationType(number).name
        except ValueError:
            kind = f"type {number}"
        if kind not in _KINDS:
            raise self._broken(f"tensor {_shown(name)} is {kind}, which cannot be dequantised")
        block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
        if not all(shape) or shape[-1] % block:
            raise self._broken(f"tensor {_shown(name)}, {kind}, cannot have the shape {[*shape]}")
        return name, kind, shape, offset

    def _placed(
        self, infos: list[tuple[str, str, tuple[int, ...], int]], *, alignment: int
    ) -> dict[str, GgufTensor]:
        """Return the tensors by name, and check that each has bytes of its own in the file."""
        start = _aligned(self._position, alignment)
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in infos:
            if name in tensors:
                raise self._broken(f"it has the tensor {_shown(name)} twice")
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
            begin = start + offset
            end = begin + math.prod(shape) // block * block_bytes
            tensors[name] = GgufTensor(name, kind, shape, begin, end)
        expected = start
        for each in sorted(tensors.values(), key=lambda it: it.begin):
            if each.begin != expected:
                raise self._broken(f"tensor {_shown(each.name)} does not follow the one before it")
            expected = _aligned(each.end, alignment)
        # Some programs leave out the padding after the last tensor.
        if self._size < max((it.end for it in tensors.values()), default=start):
            raise ModelLoadError(
                f"{self._path} is cut off: it has {self._size} bytes, and its header tells of"
                f" {expected}"
            )
        if self._size > expected:
            raise ModelLoadError(
                f"{self._path} is too long: it has {self._size} bytes, and its header tells of"
                f" {expected}"
            )
        return tensors

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            item_kind, count = self._whole(), self._long()
            if count > _MOST_ITEMS:
                raise self._broken(f"{_shown(key)} has {count} items")
            if item_kind == _STRING:
                self._check_room(count, item_bytes=_LONG.size)
                return [self._text(key) for _ in range(count)]
            return self._scalars(key, item_kind, count)
        return self._scalars(key, kind, 1)[0]

    def _scalars(self, key: str, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise self._broken(f"{_shown(key)} is of an unknown type, {kind}")
        dtype = np.dtype(_SCALARS[kind])
        self._check_room(count, item_bytes=dtype.itemsize)
        found = np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype)
        if kind == _BOOL:
            found = found.astype(bool)
        if dtype == np.float32:
            # 1e-05 and not 9.999999747378752e-06: as a number of 32 bits it is the same.
            return [float(str(each)) for each in found]
        values: list[Any] = found.tolist()
        return values

    def _name(self, what: str) -> str:
        return self._text(what, most_bytes=_MOST_NAME_BYTES)

    def _text(self, what: str, *, most_bytes: int = _MOST_HEADER_BYTES) -> str:
        size = self._long()
        if size > most_bytes:
            raise self._broken(f"{_shown(what)} has {size} bytes")
        try:
            return self._take(size).decode()
        except UnicodeDecodeError as error:
            raise self._broken(f"{_shown(what)} is no text ({error})") from error

    def _whole(self) -> int:
        (found,) = _WHOLE.unpack(self._take(_WHOLE.size))
        return int(found)

    def _long(self) -> int:
        (found,) = _LONG.unpack(self._take(_LONG.size))
        return int(found)

    def _take(self, count: int) -> bytes:
        self._check_room(count)
        content = self._file.read(count)
        self._position += count
        if len(content) != count:
            raise self._cut_off()
        return content

    def _check_room(self, count: int, *, item_bytes: int = 1) -> None:
        """Check that the file has these bytes, and that a header may have them."""
        end = self._position + count * item_bytes
        if end > self._size:
            raise self._cut_off()
        if end > _MOST_HEADER_BYTES:
            raise self._broken(f"it has more than {_MOST_HEADER_BYTES} bytes")

    def _cut_off(self) -> ModelLoadError:
        return ModelLoadError(
            f"{self._path} is cut off: it has {self._size} bytes, and ends in its header"
        )

    def _broken(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: its header is not usable: {what}")


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN_CHARACTERS]
