"""The fields of a protobuf message, found on its bytes.

Parsing makes an object of each part: half a MiB of empty parts takes 28 MiB and 0.1 s of the event
loop. So a message that could have too many parts is checked before it is parsed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

_VARINT_BYTES = 10  # the longest of all


class Field(NamedTuple):
    """A field of a message.

    Attributes:
        tag: Its number and wire type, as they stand there.
        start: Where its tag begins.
        content: Where its content begins; without a length of its own, behind the tag.
        end: Where it ends.
    """

    tag: int
    start: int
    content: int
    end: int


def unknown_field(message: Message) -> str:
    """Say which field a message, or a part of it, has that this version does not know; empty: none.

    Cost: that of a copy, however many unknown fields there are.
    """
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    if known.ByteSize() == message.ByteSize():
        return ""
    numbers = (field.tag >> 3 for field in fields_of(message.SerializeToString()))
    own = (it for it in numbers if it not in message.DESCRIPTOR.fields_by_number)
    number = next(own, None)
    return "a field of one of its parts" if number is None else f"its field number {number}"


def fields_of(raw: bytes, *, start: int = 0, limit: int | None = None) -> Iterator[Field]:
    """Yield the fields of the message that `raw[start:limit]` is.

    Raises:
        DecodeError: It is no message, or has a group, which no message of ours has.
    """
    limit = len(raw) if limit is None else limit
    while start < limit:
        tag, end = varint(raw, start)
        content = end
        match tag & 7:
            case 0:
                _, end = varint(raw, end)
            case 1:
                end += 8
            case 2:
                length, content = varint(raw, end)
                end = content + length
            case 5:
                end += 4
            case _:
                raise DecodeError("a field has a wire type that is not in use")
        if end > limit:
            raise DecodeError("a field is cut off")
        yield Field(tag, start, content, end)
        start = end


def check_field_count(raw: bytes, *, most: int) -> None:
    """Check how many fields a message has; each entry of a list of messages is a field.

    Raises:
        DecodeError: It has more than `most`, or is no message.
    """
    for count, _ in enumerate(fields_of(raw), start=1):
        if count > most:
            raise DecodeError(f"the message has more than {most} fields")


def varint(raw: bytes, start: int) -> tuple[int, int]:
    """Return the number at a place, and where it ends.

    Raises:
        DecodeError: It is cut off, or longer than any.
    """
    value = 0
    for index in range(start, min(start + _VARINT_BYTES, len(raw))):
        value |= (raw[index] & 0x7F) << 7 * (index - start)
        if raw[index] < 0x80:
            return value, index + 1
    raise DecodeError("a number is cut off")
