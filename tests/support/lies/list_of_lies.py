"""The list of lies: each field of each answer of a model server, wrong in each way.

It is generated from the protos' descriptors: what is wrong follows from a field's type
(`wrong_values`) and from the range that its comment gives (`known_fields`). What is wrong about a
whole conversation, whatever the messages say, is in `conversation`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.struct_pb2 import Value
from grpc_health.v1 import health_pb2

from paceline.v1 import (
    drafter_service_pb2,
    model_service_pb2,
    session_service_pb2,
    target_service_pb2,
)
from support.lies.known_fields import KNOWN
from support.lies.wrong_values import (
    FEW,
    MANY,
    NUMBER,
    REPEATED,
    TOO_MANY,
    VALUES,
    length_prefixed,
    tag,
    varint,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

    _Path = tuple[Field, ...]
    _Distort = Callable[[Message], bytes]

_SERVICES = (
    model_service_pb2.DESCRIPTOR.services_by_name["ModelService"],
    session_service_pb2.DESCRIPTOR.services_by_name["SessionService"],
    drafter_service_pb2.DESCRIPTOR.services_by_name["DrafterService"],
    target_service_pb2.DESCRIPTOR.services_by_name["TargetService"],
)
ANSWERS: dict[str, Descriptor] = {
    **{method.name: method.output_type for service in _SERVICES for method in service.methods},
    "Watch": health_pb2.HealthCheckResponse.DESCRIPTOR,
}
"""What each method of a model server answers with."""
_OF_AN_ELEMENT = "with an element that is "


@dataclass(frozen=True, eq=False)
class FieldLie:
    """One field of each answer to one method, wrong in one way.

    Attributes:
        method: Such as "Verify".
        path: The field, from the answer on.
        kind: What is wrong.
        distort: Makes the answer's bytes wrong.
        is_unseen: Whether it can be believed, and do harm: no orchestrator could know better.
    """

    method: str
    path: str
    kind: str
    distort: _Distort
    is_unseen: bool = False

    @property
    def group(self) -> str:
        """Where on the list its kind is."""
        kind = self.kind.removeprefix(_OF_AN_ELEMENT)
        return next((name for name, kinds in _GROUPS.items() if kind in kinds), OUTSIDE)

    def __str__(self) -> str:
        return f"{self.method}: {self.path} is {self.kind}"


UNWRITTEN = "bytes that no library writes"
_LISTS = ({*REPEATED} | {f"{it:,}" for it in (FEW, MANY, TOO_MANY)}) - {"empty"}
_TEXTS = {"another", "control characters", "huge", "zeros"}
_GROUPS = {
    "absent": {"missing", "empty"},
    "a wrong number, flag or enum": {kind for values in VALUES.values() for kind in values}
    - {"empty", *_TEXTS},
    "a wrong text or bytes": _TEXTS,
    "a wrong list": _LISTS,
    UNWRITTEN: {"of another type", "not UTF-8", "longer than any number"},
}
OUTSIDE = "outside what its comment allows"


def counts() -> dict[str, int]:
    """Count the lies about fields, by group."""
    found = Counter(it.group for it in field_lies())
    return {group: found[group] for group in (*_GROUPS, OUTSIDE)}


def row_of(field: Field) -> str:
    """Name a field's row among the known ones."""
    return f"{field.containing_type.name}.{field.name}"


def fields_of(message: Descriptor) -> Iterator[_Path]:
    """Yield every field of a message, and of the messages in it, with the way there."""
    for field in message.fields:
        yield (field,)
        if field.message_type is not None:
            for path in fields_of(field.message_type):
                yield (field, *path)


def is_believed_of_targets(path: str) -> bool:
    """Whether there is a wrong value of this field that a target is believed."""
    return any(
        row.unseen for name, row in KNOWN.items() if name.rpartition(".")[2] == path.split(".")[-1]
    )


@cache
def field_lies() -> tuple[FieldLie, ...]:
    """Return all of them, always in the same order."""
    return tuple(
        _lie(method, path, kind, distort)
        for method, answer in ANSWERS.items()
        for path in fields_of(answer)
        for kind, distort in _ways(path)
    )


def _lie(method: str, path: _Path, kind: str, distort: _Distort) -> FieldLie:
    row = KNOWN.get(row_of(path[-1]))
    is_of_a_target = method in ("Verify", "Decode", "GetModelInfo")
    is_unseen = is_of_a_target and row is not None and row.hides(kind.removeprefix(_OF_AN_ELEMENT))
    return FieldLie(method, ".".join(it.name for it in path), kind, distort, is_unseen)


def _ways(path: _Path) -> Iterator[tuple[str, _Distort]]:
    """Yield each way in which a field can be wrong, and what makes it so."""
    field, wrong = path[-1], VALUES[path[-1].type]
    known = KNOWN.get(row_of(field))
    beyond = known.beyond if known is not None else {}
    values = {**wrong, **{kind: partial(_always, value) for kind, value in beyond.items()}}
    if not any(_is_map(it) for it in path):
        yield from _ways_of_a_list(path) if field.is_repeated else _ways_of_one(path)
        for kind, change in values.items():
            said = _OF_AN_ELEMENT + kind if field.is_repeated else kind
            yield said, partial(_with_value, path, change)
    yield from _raw_ways(path)


def _ways_of_one(path: _Path) -> Iterator[tuple[str, _Distort]]:
    yield "missing", partial(_without, path)


def _ways_of_a_list(path: _Path) -> Iterator[tuple[str, _Distort]]:
    for kind, change in REPEATED.items():
        yield kind, partial(_with_list, path, change)
    if path[-1].is_packed:
        for count in (MANY, TOO_MANY):
            yield f"{count:,}", partial(_with_many, path, count)


def _raw_ways(path: _Path) -> Iterator[tuple[str, _Distort]]:
    """Yield what no library writes."""
    field = path[-1]
    if field.type == Field.TYPE_STRING:
        not_text = length_prefixed(field, b"\xff\xfe\x00")
        yield "not UTF-8", partial(_with_bytes, path, not_text)
    if _is_map(field):
        entries = b"".join(
            length_prefixed(field, _entry(field, f"name {index}")) for index in range(FEW)
        )
        yield f"{FEW:,}", partial(_with_bytes, path, entries)
    if field.type in (Field.TYPE_STRING, Field.TYPE_BYTES, Field.TYPE_MESSAGE):
        of_another = tag(field, 0) + varint(1)
    else:
        of_another = tag(field, 5) + b"\x01\x02\x03\x04"
        if field.type == Field.TYPE_FLOAT:
            of_another = tag(field, 0) + varint(1)
    yield "of another type", partial(_of_another_type, path, of_another)
    if field.type in (Field.TYPE_UINT32, Field.TYPE_UINT64):
        too_long = tag(field, 0) + b"\xff" * 11 + b"\x01"
        yield "longer than any number", partial(_with_bytes, path, too_long)


def _entry(field: Field, text: str) -> bytes:
    return b"".join(length_prefixed(it, text.encode()) for it in field.message_type.fields)


def _is_map(field: Field) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


# --- what makes an answer wrong ---------------------------------------------------------------


def _always(value: Any, _right: Any) -> Any:
    return value


def _owner(message: Any, path: _Path) -> Any:
    """Return the message that has the field: the last of a list's, where the way goes through."""
    for field in path[:-1]:
        message = getattr(message, field.name)
        if field.is_repeated:
            message = message[-1] if message else message.add()
    return message


def _with_value(path: _Path, change: Callable[[Any], Any], message: Message) -> bytes:
    owner, name = _owner(message, path), path[-1].name
    if path[-1].is_repeated:
        values = getattr(owner, name)
        right = values.pop() if values else path[-1].default_value or _ZERO[path[-1].type]
        values.append(change(right))
    else:
        setattr(owner, name, change(getattr(owner, name)))
    return message.SerializeToString()


_ZERO: dict[int, Any] = {
    **dict.fromkeys(VALUES, 0),
    Field.TYPE_STRING: "",
    Field.TYPE_BYTES: b"",
    Field.TYPE_MESSAGE: Value(),
}


def _with_list(path: _Path, change: Callable[[list[Any]], list[Any]], message: Message) -> bytes:
    owner, field = _owner(message, path), path[-1]
    values = getattr(owner, field.name)
    if not values:
        values.add() if field.message_type is not None else values.append(_ZERO[field.type])
    right = [*values]
    if field.message_type is not None:  # the list owns its messages
        right = [type(it).FromString(it.SerializeToString()) for it in right]
    del values[:]
    values.extend(change(right))
    return message.SerializeToString()


def _without(path: _Path, message: Message) -> bytes:
    _owner(message, path).ClearField(path[-1].name)
    return message.SerializeToString()


def _with_bytes(path: _Path, content: bytes, message: Message) -> bytes:
    """Add bytes to where the field is: to a list's further message, where the way goes through."""
    for field in reversed(path[:-1]):
        content = length_prefixed(field, content)
    return message.SerializeToString() + content


def _with_many(path: _Path, count: int, message: Message) -> bytes:
    """Add so many numbers of two bytes; of longer ones as many as that makes."""
    return _with_bytes(path, length_prefixed(path[-1], NUMBER * count), message)


def _of_another_type(path: _Path, content: bytes, message: Message) -> bytes:
    if not any(map(_is_map, path)):
        _without(path, message)
    return _with_bytes(path, content, message)
