"""Checks JSON schemas before they are compiled, and rewrites what would be enforced wrongly."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import InvalidFieldError
from paceline_contract.limits import MOST_GRAMMAR_DEPTH, depth_of
from paceline_engine.deciding.schema_merges import check_merges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_T = TypeVar("_T", dict[str, Any], list[Any])
_LEAST_STEP = 1e-9
_MOST_REMAINDERS = 10_000  # 4 MB; with 1,000,003 compiling takes 7 s and 290 MB
# What has to match several patterns at once takes long to compile: 15 take minutes, 10 take 0.1 s.
_MOST_MERGED_PATTERNS = 10
_MOST_NAME_PATTERNS = 128  # each is compared with all: 0.2 s; with 320, 5 s
_MERGED = "merged, by allOf or beside $ref"
_DATA = {"const", "enum", "default", "examples"}  # keywords whose values are no schemas
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
_OPPOSITES = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}


def sound_schema(text: str, *, field: str) -> str:
    """Return a schema that llguidance enforces: see `sound_schemas`.

    Raises:
        InvalidFieldError: It is no object of JSON, or `sound_schemas` refuses it.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidFieldError.of(field, "is not JSON") from None
    if not isinstance(schema, dict):
        raise InvalidFieldError.of(field, "is not an object")
    return json.dumps(schema) if sound_schemas([schema], field=field)[0] else text


def sound_schemas(schemas: Sequence[object], *, field: str) -> list[bool]:
    """Check the schemas of one grammar, and rewrite in place what would be enforced wrongly.

    llguidance 1.9 takes a bound itself for a number that has to be beyond it, if the bound is whole
    and the other bound is less than 1 away: {"exclusiveMinimum": 2, "maximum": 2.5} allows 2. Then
    the bound is moved by a billionth. Bounds of several subschemas can become those of one number,
    so each is compared with all of its schema.

    Returns:
        Of each whether it was rewritten.

    Raises:
        InvalidFieldError: One is nested too deep, or they would take long to compile.
    """
    if any(depth_of(it) > MOST_GRAMMAR_DEPTH for it in schemas):
        raise InvalidFieldError.of(field, f"is nested deeper than {MOST_GRAMMAR_DEPTH}")
    parts = [[*parts_of(it)] for it in schemas]
    _check_divisors(parts, field=field)
    _check_patterns(schemas, field=field)
    return [_move_bounds(it) for it in parts]


def _move_bounds(parts: Sequence[dict[str, Any]]) -> bool:
    is_changed = False
    for name, others in _OPPOSITES.items():
        values = [part.get(other) for part in parts for other in others]
        near = {int(it) for it in values if isinstance(it, float) and _is_split(it)}
        for part in parts:
            bound = part.get(name)
            is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
            if is_number and bound in near:
                step = max(_LEAST_STEP, 2 * math.ulp(bound))
                part[name] = bound + step if name == "exclusiveMinimum" else bound - step
                is_changed = True
    return is_changed


def _check_divisors(schemas: Sequence[Sequence[dict[str, Any]]], *, field: str) -> None:
    """Refuse multiples with too many remainders: each remainder is a state of an automaton.

    Factors 2 and 5 only concern the last digits. Divisors of several subschemas can become those of
    one number, so all divisors of a schema count together; the automatons of several schemas are
    made one after another.
    """
    states = 0
    for parts in schemas:
        all_of_them = 1
        for part in parts:
            value = part.get("multipleOf")
            if isinstance(value, int | float) and math.isfinite(value):
                all_of_them = math.lcm(all_of_them, _without_2_and_5(abs(Fraction(str(value)))))
            if states + all_of_them > _MOST_REMAINDERS:
                reason = f"has multipleOf with more than {_MOST_REMAINDERS} remainders together"
                raise InvalidFieldError.of(field, reason)
        states += all_of_them - 1


def _check_patterns(schemas: Sequence[object], *, field: str) -> None:
    """Refuse many patterns that one text may have to match, many merges, and many names' patterns.

    What is data counts, too: a reference may point to it.
    """
    names_of_all = 0
    for schema in schemas:
        parts = [*parts_of(schema, with_data=True)]
        merged = sum(
            len(_of(part, "allOf", list)) + ("$ref" in part and len(part) > 1) for part in parts
        )
        names = sum(len(_of(part, "patternProperties", dict)) for part in parts)
        names_of_all += names
        most, reason = _MOST_NAME_PATTERNS, f"has more than {_MOST_NAME_PATTERNS} patterns of names"
        if names_of_all > most:
            raise InvalidFieldError.of(field, reason)
        if names > _MOST_MERGED_PATTERNS and names * (1 + merged) > most:
            raise InvalidFieldError.of(field, f"{reason}, times schemas that are {_MERGED}")
        patterns = sum(isinstance(part.get("pattern"), str) for part in parts)
        if patterns > _MOST_MERGED_PATTERNS and merged > _MOST_MERGED_PATTERNS:
            reason = f"has more than {_MOST_MERGED_PATTERNS} patterns and as many schemas that are"
            raise InvalidFieldError.of(field, f"{reason} {_MERGED}")
        check_merges(schema, parts, field=field)


def _of(part: dict[str, Any], name: str, kind: type[_T]) -> _T:
    value = part.get(name)
    return value if isinstance(value, kind) else kind()


def _without_2_and_5(value: Fraction) -> int:
    number = value.numerator or 1
    for factor in (2, 5):
        while number % factor == 0:
            number //= factor
    return number


def parts_of(schema: object, *, with_data: bool = False) -> Iterator[dict[str, Any]]:
    """Yield each object of a schema, those that are data only if asked to; its depth is checked."""
    if isinstance(schema, list):
        for each in schema:
            yield from parts_of(each, with_data=with_data)
    elif isinstance(schema, dict):
        yield schema
        for name, each in schema.items():
            if name in _BY_NAME and isinstance(each, dict) and not with_data:
                yield from parts_of([*each.values()])  # a property may be called as a keyword is
            elif with_data or name not in _DATA:
                yield from parts_of(each, with_data=with_data)


def _is_split(value: float) -> bool:
    """Whether this is a finite number that is not whole."""
    return math.isfinite(value) and not value.is_integer()
