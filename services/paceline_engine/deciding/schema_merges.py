"""Checks JSON schemas for what multiplies when they are compiled: alternatives that are merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from paceline.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Sequence

# `allOf` with 7 times two patterns in `anyOf` are 128 alternatives, and take half a minute.
_MOST_WAYS = 256
_MOST_INTERSECTIONS = 100
_MOST_PATTERNS = 10  # that one text has to match; 15 take minutes
_MOST_LEVELS = 100


class _Ways(NamedTuple):
    """What a schema is once all that it merges is multiplied out."""

    number: int = 1
    patterns: int = 0
    """The most in one way."""
    intersections: int = 0


def check_merges(root: object, parts: Sequence[dict[str, Any]], *, field: str) -> None:
    """Refuse a schema in which `anyOf` and `oneOf` are multiplied with each other, or patterns are.

    Args:
        root: The whole schema.
        parts: All its objects.
        field: What an error names.

    Raises:
        InvalidFieldError: It is one.
    """
    multiplied = {"pattern", "anyOf", "oneOf"}
    if any(not multiplied.isdisjoint(part) for part in parts):
        counting = _Counting(root, parts, field=field)
        for part in parts:
            counting.ways(part, 0)


class _Counting:
    def __init__(self, root: object, parts: Sequence[dict[str, Any]], *, field: str) -> None:
        self._root = root
        self._field = field
        self._known: dict[int, _Ways] = {}
        self._named: dict[str, object] = {}
        for part in parts:
            for keyword, mark in (("$id", ""), ("$anchor", "#"), ("$dynamicAnchor", "#")):
                if isinstance(name := part.get(keyword), str):
                    self._named[mark + name] = part

    def ways(self, schema: object, level: int) -> _Ways:
        if not isinstance(schema, dict):
            return _Ways()
        if (known := self._known.get(id(schema))) is not None:
            return known
        if level > _MOST_LEVELS:
            raise self._refusal(f"merges more than {_MOST_LEVELS} schemas into each other")
        self._known[id(schema)] = _Ways()  # where it refers to itself
        found = _Ways(patterns=int(isinstance(schema.get("pattern"), str)))
        if isinstance(reference := schema.get("$ref"), str):
            found = self._both(found, self.ways(self._target(reference), level + 1))
        for each in _list(schema, "allOf"):
            found = self._both(found, self.ways(each, level + 1))
        for keyword in ("anyOf", "oneOf"):
            if each_way := [self.ways(each, level + 1) for each in _list(schema, keyword)]:
                found = self._both(found, _either(each_way))
        self._known[id(schema)] = found
        return found

    def _both(self, one: _Ways, other: _Ways) -> _Ways:
        count = one.number * other.number
        patterns = one.patterns + other.patterns
        meetings = count if one.patterns and other.patterns else 0
        intersections = (
            one.intersections * other.number + other.intersections * one.number + meetings
        )
        if min(one.number, other.number) > 1 and count > _MOST_WAYS:
            raise self._refusal(f"has anyOf or oneOf that make more than {_MOST_WAYS} alternatives")
        if patterns > _MOST_PATTERNS:
            raise self._refusal(f"has more than {_MOST_PATTERNS} patterns for one text")
        if intersections > _MOST_INTERSECTIONS:
            reason = f"has patterns that meet more than {_MOST_INTERSECTIONS} times"
            raise self._refusal(f"{reason} when alternatives are merged")
        return _Ways(count, patterns, intersections)

    def _target(self, reference: str) -> object:
        """Return what a reference means; nothing if it is of a kind that cannot be followed."""
        if reference in self._named:
            return self._named[reference]
        base, _, pointer = reference.partition("#")
        found = self._named.get(base) if base else self._root
        for step in unquote(pointer).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and len(name) < 6:
                found = found[int(name)] if int(name) < len(found) else None
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found

    def _refusal(self, reason: str) -> InvalidFieldError:
        return InvalidFieldError.of(self._field, reason)


def _either(ways: Sequence[_Ways]) -> _Ways:
    return _Ways(
        sum(it.number for it in ways),
        max(it.patterns for it in ways),
        sum(it.intersections for it in ways),
    )


def _list(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
