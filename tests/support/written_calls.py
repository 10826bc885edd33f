"""Calls as models of each family write them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline_gateway.dialects.family import TEXT_MARK, Hole, Maybe, Shape, Tags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_gateway.dialects.family import Family


def written_calls(family: Family, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Write calls."""
    begin, end = (
        "".join(it if isinstance(it, str) else "" for it in pieces)
        for pieces in (family.begin, family.end)
    )
    written = (_call(family, index, *call) for index, call in enumerate(calls))
    return begin + family.separator.join(written) + end


def _call(family: Family, index: int, name: str, arguments: dict[str, Any]) -> str:
    text = ""
    for piece in family.call:
        if piece is Hole.NAME:
            text += f"functions.{name}:{index}" if family.is_numbered else name
        elif piece is Hole.ARGUMENTS:
            text += _arguments(family.arguments, arguments)
        else:
            is_left_out = isinstance(piece, Maybe) and not piece.is_usual
            text += "" if is_left_out else piece.text if isinstance(piece, Maybe) else str(piece)
    return text


def _arguments(form: Shape | Tags, arguments: dict[str, Any]) -> str:
    if form is Shape.JSON:
        return json.dumps(arguments)
    if form is Shape.PYTHON:
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    if form is Shape.BARE:
        return ",".join(f"{key}:{_bare(value)}" for key, value in arguments.items())
    assert isinstance(form, Tags)
    return "".join(
        f"{form.key_open}{key}{form.key_close}{_value(form, value)}{form.value_close}"
        for key, value in arguments.items()
    )


def _bare(value: Any) -> str:
    match value:
        case str():
            return f"{TEXT_MARK}{value}{TEXT_MARK}"
        case dict():
            return "{" + ",".join(f"{key}:{_bare(it)}" for key, it in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_bare, value)) + "]"
    return json.dumps(value)


def _value(form: Tags, value: Any) -> str:
    if isinstance(value, str):
        return form.value_open + value
    return (form.json_open or form.value_open) + json.dumps(value)
