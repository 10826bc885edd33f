"""Leaves out of a JSON schema what servers cannot enforce, where a request allows that.

Servers refuse a schema with such a keyword. A request that says `lenient` would rather have an
answer that follows the rest, and be told what was left out. What is left out is decided here, and
not in the servers: they get an ordinary schema, and the answer's header names the keywords.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from paceline_contract.limits import MOST_GRAMMAR_BYTES, MOST_GRAMMAR_DEPTH
from paceline_gateway.conversations.conversation import depth_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_UNENFORCED = frozenset(
    {
        "$dynamicAnchor",
        "$dynamicRef",
        "$recursiveAnchor",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
_FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "unknown",
        "uri",
        "uuid",
    }
)
_DATA = frozenset({"const", "default", "enum", "examples"})
_OF_NAMES = frozenset({"$defs", "definitions", "patternProperties", "properties"})
# Looking around, the edge of a word, and what a group has matched before.
_UNENFORCED_PATTERN = re.compile(r"\(\?<?[=!]|\\[bBk1-9]")


def is_within(schema: Mapping[str, Any] | str, most_bytes: int) -> bool:
    """Whether a schema has at most so many bytes as JSON, without a look at more of it."""
    if isinstance(schema, str):
        return len(schema) <= most_bytes and len(schema.encode("utf-8", "replace")) <= most_bytes
    size = 0
    try:
        for piece in json.JSONEncoder().iterencode(schema):
            size += len(piece)
            if size > most_bytes:
                return False
    except RecursionError:  # so deep that its brackets alone are refused
        pass
    return True


def lenient(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Leave out what cannot be enforced.

    Of alternatives of which exactly one has to fit (`oneOf`), several may fit then (`anyOf`).

    Returns:
        The schema without it, and the places of what was left out. A schema that is too large or
        too deep stays as it is: servers refuse it.
    """
    if not is_within(schema, MOST_GRAMMAR_BYTES) or depth_of(schema) > MOST_GRAMMAR_DEPTH:
        return schema, []
    places: list[str] = []
    return _without(schema, "", places), places


def _without(schema: Any, place: str, places: list[str]) -> Any:
    if isinstance(schema, list):
        return [_without(it, f"{place}[{index}]", places) for index, it in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    alternatives = None
    for name, value in schema.items():
        there = f"{place}.{name}"
        if not _is_enforced(name, value, schema):
            places.append(there)
        elif name in _DATA:
            kept[name] = value
        elif name in _OF_NAMES and isinstance(value, dict):
            names = value if name != "patternProperties" else _known(value, there, places)
            kept[name] = {it: _without(value[it], f"{there}.{it}", places) for it in names}
        elif name == "oneOf":
            places.append(there)
            alternatives = _without(value, there, places)
        else:
            kept[name] = _without(value, there, places)
    if alternatives is not None and "anyOf" in kept:
        others = kept.get("allOf", [])
        if isinstance(others, list):  # servers refuse anything else
            kept["allOf"] = [*others, {"anyOf": alternatives}]
    elif alternatives is not None:
        kept["anyOf"] = alternatives
    return kept


def _is_enforced(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    match name, value:
        case "format", str():
            return value in _FORMATS or "string" not in _types(schema)
        case "pattern", str():
            return not _UNENFORCED_PATTERN.search(value)
        case "$ref", str():
            return value.startswith("#")  # nothing is fetched
    return name not in _UNENFORCED


def _types(schema: Mapping[str, Any]) -> Iterable[Any]:
    """Return the types that a schema names; where it names none, a text is possible."""
    named = schema.get("type", "string")
    return named if isinstance(named, list) else [named]


def _known(patterns: Mapping[str, Any], place: str, places: list[str]) -> list[str]:
    """Return the patterns of names that can be enforced."""
    unknown = [it for it in patterns if _UNENFORCED_PATTERN.search(it)]
    places += [f"{place}.{it}" for it in unknown]
    return [it for it in patterns if it not in unknown]
