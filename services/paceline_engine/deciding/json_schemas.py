"""JSON schemas before they are compiled: what is refused of them, and what is written otherwise."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidFieldError
from paceline_contract.limits import MOST_GRAMMAR_DEPTH

if TYPE_CHECKING:
    from collections.abc import Iterator

_LEAST_STEP = 1e-9
_DATA = {"const", "enum", "default", "examples"}  # keywords whose values are no schemas
_OPPOSITES = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}


def sound_schema(text: str, *, field: str) -> str:
    """Return a schema that llguidance enforces.

    llguidance 1.9 takes a bound itself for a number that has to be beyond it, if the bound is whole
    and the other bound is less than 1 away: {"exclusiveMinimum": 2, "maximum": 2.5} allows 2. Then
    the bound is moved by a billionth. Bounds of several subschemas can become those of one number,
    so each is compared with all.

    Raises:
        InvalidFieldError: It is no object of JSON, or is nested too deep.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidFieldError.of(field, "is not JSON") from None
    if not isinstance(schema, dict):
        raise InvalidFieldError.of(field, "is not an object")
    if _depth(schema) > MOST_GRAMMAR_DEPTH:
        raise InvalidFieldError.of(field, f"is nested deeper than {MOST_GRAMMAR_DEPTH}")
    if not any(f'"{name}"' in text for name in _OPPOSITES):
        return text
    parts = [*_schemas(schema)]
    is_changed = False
    for name, others in _OPPOSITES.items():
        values = [part.get(other) for part in parts for other in others]
        near = {int(it) for it in values if isinstance(it, float) and _is_split(it)}
        for part in parts:
            bound = part.get(name)
            if _is_number(bound) and bound in near:
                step = max(_LEAST_STEP, 2 * math.ulp(bound))
                part[name] = bound + step if name == "exclusiveMinimum" else bound - step
                is_changed = True
    return json.dumps(schema) if is_changed else text


def _schemas(schema: object) -> Iterator[dict[str, Any]]:
    """Yield each object of a schema that is no data; its depth is checked."""
    if isinstance(schema, list):
        for each in schema:
            yield from _schemas(each)
    elif isinstance(schema, dict):
        yield schema
        for name, each in schema.items():
            if name not in _DATA:
                yield from _schemas(each)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_split(value: float) -> bool:
    """Whether this is a finite number that is not whole."""
    return math.isfinite(value) and not value.is_integer()


def _depth(value: object) -> int:
    """Count the levels of objects and lists in JSON, one level after another."""
    depth, level = 0, [value]
    while level := [it for it in level if isinstance(it, dict | list)]:
        depth += 1
        level = [it for each in level for it in (each.values() if isinstance(each, dict) else each)]
    return depth
