"""The messages of a stream of calls, looked at before they are parsed.

Parsing makes an object of each entry: half a MiB of empty ones takes 28 MiB and 0.1 s of the event
loop. So entries are counted on the bytes first.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

_ENTRIES = 0x0A  # the tag of field 1 with a length, which is all that these messages have


def check_entry_count(raw: bytes, *, most: int) -> None:
    """Check how many entries a message has in its field 1.

    Raises:
        DecodeError: It has more than `most`, another field, or is cut off.
    """
    position = count = 0
    while position < len(raw):
        count += 1
        if raw[position] != _ENTRIES or count > most:
            raise DecodeError(f"not a message of at most {most} entries")
        size, position = _varint(raw, position + 1)
        position += size
    if position != len(raw):
        raise DecodeError("the last entry is cut off")


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    """Read a number; return it and the position behind it."""
    value = 0
    for shift in range(0, 35, 7):
        if position >= len(raw):
            break
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise DecodeError("a length is cut off")
