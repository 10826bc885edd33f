"""What is wrong by a field's type alone: the small table that the list of lies is made from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor as Field

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HUGE_BYTES = 1 << 20
# So many numbers of two bytes are nearly what a channel takes as one message; and more than that.
FEW, MANY, TOO_MANY = 5_000, 2_000_000, 7_000_000
NUMBER = b"\x81\x02"  # 257: Python makes an object of each


def _integers(*, bits: int, is_signed: bool) -> Mapping[str, Callable[[int], int]]:
    largest = (1 << (bits - is_signed)) - 1
    signed = {"negative": lambda _: -1, "least": lambda _: -largest - 1} if is_signed else {}
    return {
        "zero": lambda _: 0,
        "one": lambda _: 1,
        "one more": lambda it: min(it + 1, largest),
        "one less": lambda it: max(it - 1, 0),
        "half of the largest": lambda _: largest // 2 + 1,
        "largest": lambda _: largest,
        **signed,
    }


def _floats(*, largest: float, denormal: float) -> Mapping[str, Callable[[float], float]]:
    return {
        "zero": lambda _: 0.0,
        "negative": lambda _: -1.0,
        "denormal": lambda _: -denormal,
        "least": lambda _: -largest,
        "largest": lambda _: largest,
        "not a number": lambda _: math.nan,
        "infinity": lambda _: math.inf,
        "negative infinity": lambda _: -math.inf,
    }


# By a field's type: wrong values, as functions of the right one.
VALUES: Mapping[int, Mapping[str, Callable[[Any], Any]]] = {
    Field.TYPE_UINT32: _integers(bits=32, is_signed=False),
    Field.TYPE_UINT64: _integers(bits=64, is_signed=False),
    Field.TYPE_INT32: _integers(bits=32, is_signed=True),
    Field.TYPE_INT64: _integers(bits=64, is_signed=True),
    Field.TYPE_FLOAT: _floats(largest=3.4e38, denormal=1e-45),
    Field.TYPE_DOUBLE: _floats(largest=1.7e308, denormal=5e-324),
    Field.TYPE_BOOL: {"the opposite": lambda it: not it},
    Field.TYPE_ENUM: {
        "unspecified": lambda _: 0,
        "another one": lambda it: 1 if it == 2 else 2,
        "unknown": lambda _: 99,
        "negative": lambda _: -1,
    },
    Field.TYPE_STRING: {
        "empty": lambda _: "",
        "another": lambda _: "another",
        "control characters": lambda _: "\x00\x1b[31m\r\n\u202e",
        "huge": lambda _: "x" * HUGE_BYTES,
    },
    Field.TYPE_BYTES: {
        "empty": lambda _: b"",
        "zeros": lambda it: bytes(len(it)),
        "huge": lambda _: bytes(HUGE_BYTES),
    },
    Field.TYPE_MESSAGE: {},
}

# Of a list: wrong ones, as functions of the right one. None of them is empty that was not.
REPEATED: Mapping[str, Callable[[list[Any]], list[Any]]] = {
    "empty": lambda _: [],
    "one too few": lambda it: it[:-1],
    "one too many": lambda it: [*it, it[-1]],
    "doubled": lambda it: [each for each in it for _ in range(2)],
    "reversed": lambda it: it[::-1],
    f"{FEW:,}": lambda it: it[-1:] * FEW,
}


# --- what no library writes, byte by byte -----------------------------------------------------


def varint(value: int) -> bytes:
    """Write a number as the wire does."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


def tag(field: Field, wire_type: int) -> bytes:
    """Write a field's number and how its value is written."""
    return varint(field.number << 3 | wire_type)


def length_prefixed(field: Field, content: bytes) -> bytes:
    """Write a field whose value is bytes: a string, a message, a packed list."""
    return tag(field, 2) + varint(len(content)) + content
