"""Tells which schemas servers can enforce for sure: a tool's schema that is only told may be more.

A tool that is not strict asks for no check. Its schema is enforced where that is sure to work, and
otherwise its arguments are any object. What a strict tool says is enforced or refused, with the
servers' reason.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Keywords that mean nothing for a text.
_NOTES = frozenset(
    {
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "default",
        "deprecated",
        "description",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
_OF_THE_WHOLE = frozenset({"$id", "$schema"})
_NUMBERS = frozenset(
    {
        "exclusiveMaximum",
        "exclusiveMinimum",
        "maxItems",
        "maxLength",
        "maximum",
        "minItems",
        "minLength",
        "minimum",
    }
)
_FORMATS = frozenset({"date", "date-time", "email", "ipv4", "ipv6", "time", "uri", "uuid"})
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_SPECIAL_GROUP = re.compile(r"\(\?|\\[0-9]")


def enforceable(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a schema without what only names it; None if it is not sure to be enforced."""
    bare = {name: value for name, value in schema.items() if name not in _OF_THE_WHOLE}
    return bare if _Checker(bare).is_known(bare) else None


class _Checker:
    """Checks the parts of one schema."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        self._whole = whole
        self._checks: dict[str, Callable[[Any], bool]] = {
            **dict.fromkeys(_NOTES, lambda _: True),
            **dict.fromkeys(_NUMBERS, _is_number),
            **dict.fromkeys(("$defs", "definitions", "properties"), self._are_named_schemas),
            **dict.fromkeys(("anyOf", "allOf"), self._are_schemas),
            **dict.fromkeys(("additionalProperties", "items"), self._is_schema_or_false),
            "const": lambda _: True,
            "enum": lambda value: isinstance(value, list) and bool(value),
            "format": lambda value: isinstance(value, str) and value in _FORMATS,
            "pattern": lambda it: isinstance(it, str) and not _SPECIAL_GROUP.search(it),
            "required": _are_texts,
            "type": _is_type,
            "$ref": self._is_there,
        }

    def is_known(self, schema: Any) -> bool:
        if isinstance(schema, bool):
            return schema
        return isinstance(schema, dict) and all(
            name in self._checks and self._checks[name](value) for name, value in schema.items()
        )

    def _are_named_schemas(self, value: Any) -> bool:
        return isinstance(value, dict) and all(map(self.is_known, value.values()))

    def _are_schemas(self, value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(map(self.is_known, value))

    def _is_schema_or_false(self, value: Any) -> bool:
        return value is False or self.is_known(value)

    def _is_there(self, pointer: Any) -> bool:
        """Tell whether a reference leads to a part of the schema."""
        if not isinstance(pointer, str) or not pointer.startswith("#/"):
            return False
        found: Any = self._whole
        for name in pointer.removeprefix("#/").split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        return isinstance(found, dict)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(it, str) for it in value)


def _is_type(value: Any) -> bool:
    named = [value] if isinstance(value, str) else value
    return _are_texts(named) and bool(named) and all(it in _TYPES for it in named)
