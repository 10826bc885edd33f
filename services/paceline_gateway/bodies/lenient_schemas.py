"""Leaves out of a JSON schema what servers cannot enforce, where a request allows that.

Servers refuse a schema with such a keyword. A request that says `lenient` would rather have an
answer that follows the rest, and be told what was left out. What is left out is decided here, and
not in the servers: they get an ordinary schema, and the answer's header names the keywords.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

from paceline_contract.limits import MOST_GRAMMAR_BYTES, MOST_GRAMMAR_DEPTH, depth_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_Reference: TypeAlias = tuple[str, dict[str, Any]]
"""The place of a `$ref`, and the kept schema that has it."""

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
_INDEX = re.compile(r"[0-9]{1,6}")
# Escapes and groups, one after another: an escaped backslash says nothing of what follows it.
_PIECES = re.compile(r"\\.|\(\?", re.DOTALL)
# Looking around, the edge of a word, what a group has matched before, and what only others know.
_UNENFORCED_PIECE = re.compile(
    r"\\[0-9BCEGHIJKLMNOQRTVXYZbceghijklmoqy]|\(\?(?!P?<[^=!]|[A-Za-z-]*[:)])"
)


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
    references: list[_Reference] = []
    kept = _without(schema, "", places, references)
    for place, holder in references:
        pointer = holder["$ref"]
        if _finds(schema, pointer) and not _finds(kept, pointer):
            del holder["$ref"]
            places.append(place)
    return kept, places


def _without(schema: Any, place: str, places: list[str], references: list[_Reference]) -> Any:
    if isinstance(schema, list):
        return [
            _without(it, f"{place}[{index}]", places, references) for index, it in enumerate(schema)
        ]
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
        elif name == "$ref" and isinstance(value, str):
            kept[name] = value
            references.append((there, kept))
        elif name in _OF_NAMES and isinstance(value, dict):
            names = value if name != "patternProperties" else _known(value, there, places)
            kept[name] = {
                it: _without(value[it], f"{there}.{it}", places, references) for it in names
            }
        elif name == "oneOf":
            places.append(there)
            alternatives = _without(value, there, places, references)
        else:
            kept[name] = _without(value, there, places, references)
    if alternatives is not None:
        _allow_any(kept, alternatives)
    return kept


def _allow_any(kept: dict[str, Any], alternatives: Any) -> None:
    if "anyOf" not in kept:
        kept["anyOf"] = alternatives
        return
    others = kept.get("allOf", [])
    if isinstance(others, list):  # servers refuse anything else
        kept["allOf"] = [*others, {"anyOf": alternatives}]


def _is_enforced(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    match name, value:
        case "format", str():
            return value in _FORMATS or "string" not in _types(schema)
        case "pattern", str():
            return _is_enforced_pattern(value)
        case "additionalProperties", it if it is not True:
            # Without one of the patterns, names that it allows would count as additional.
            patterns = schema.get("patternProperties")
            return not isinstance(patterns, dict) or all(map(_is_enforced_pattern, patterns))
        case "$ref", str():
            return value == "#" or value.startswith("#/")  # no anchors, and nothing is fetched
    return name not in _UNENFORCED


def _types(schema: Mapping[str, Any]) -> Iterable[Any]:
    """Return the types that a schema names; where it names none, a text is possible."""
    named = schema.get("type", "string")
    return named if isinstance(named, list) else [named]


def _known(patterns: Mapping[str, Any], place: str, places: list[str]) -> list[str]:
    """Return the patterns of names that can be enforced."""
    unknown = [it for it in patterns if not _is_enforced_pattern(it)]
    places += [f"{place}.{it}" for it in unknown]
    return [it for it in patterns if it not in unknown]


def _is_enforced_pattern(pattern: str) -> bool:
    return not any(
        _UNENFORCED_PIECE.match(pattern, found.start()) for found in _PIECES.finditer(pattern)
    )


def _finds(schema: Any, pointer: str) -> bool:
    """Whether a pointer (`#/$defs/a`) leads to something in a schema."""
    for step in unquote(pointer).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and name in schema:
            schema = schema[name]
        elif isinstance(schema, list) and _INDEX.fullmatch(name) and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return False
    return True
