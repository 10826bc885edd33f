"""Compares what came with what was expected, where exact values or matchers stand."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def differences(expected: Any, actual: Any, *, at: str = "answer") -> list[str]:
    """Say where they differ, one line each; none if they match.

    Of an object only the keys that are expected are looked at; lists are compared whole.
    """
    return list(_differences(expected, actual, at))


def _differences(expected: Any, actual: Any, at: str) -> Iterator[str]:
    if isinstance(expected, dict) and any(key.startswith("$") for key in expected):
        for key, limit in expected.items():
            yield from _MATCHERS[key](limit, actual, at)
    elif isinstance(expected, dict) and isinstance(actual, dict):
        for key, each in expected.items():
            if key in actual:
                yield from _differences(each, actual[key], f"{at}.{key}")
            else:
                yield f"{at}.{key} is missing"
    elif isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            yield f"{at} has {len(actual)} elements, not {len(expected)}: {_short(actual)}"
        for index, (one, other) in enumerate(zip(expected, actual, strict=False)):
            yield from _differences(one, other, f"{at}.{index}")
    elif not _equal(expected, actual):
        yield f"{at} is {_short(actual)}, not {_short(expected)}"


def _equal(expected: Any, actual: Any) -> bool:
    if _is_number(expected) and _is_number(actual):
        return math.isclose(expected, actual, rel_tol=1e-9)
    if _is_number(expected) and isinstance(actual, str):
        return str(expected) == actual  # 64 bits do not fit each language's JSON numbers
    return type(expected) is type(actual) and bool(expected == actual)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}… ({len(text)} characters)"


def _any(_: Any, actual: Any, at: str) -> Iterator[str]:
    if actual is None or actual == "":
        yield f"{at} is {actual!r}"


def _in(choices: list[Any], actual: Any, at: str) -> Iterator[str]:
    if all(differences(choice, actual) for choice in choices):
        yield f"{at} is {_short(actual)}, none of {_short(choices)}"


def _min(limit: float, actual: Any, at: str) -> Iterator[str]:
    if not (_is_number(actual) and actual >= limit):
        yield f"{at} is {_short(actual)}, not {limit} or more"


def _max(limit: float, actual: Any, at: str) -> Iterator[str]:
    if not (_is_number(actual) and actual <= limit):
        yield f"{at} is {_short(actual)}, not {limit} or less"


def _matches(pattern: str, actual: Any, at: str) -> Iterator[str]:
    if not (isinstance(actual, str) and re.search(pattern, actual)):
        yield f"{at} is {_short(actual)}, which does not match {pattern!r}"


def _length(expected: Any, actual: Any, at: str) -> Iterator[str]:
    if isinstance(actual, list | str):
        yield from _differences(expected, len(actual), f"length of {at}")
    else:
        yield f"{at} is {_short(actual)}, which has no length"


def _each(expected: Any, actual: Any, at: str) -> Iterator[str]:
    if not isinstance(actual, list):
        yield f"{at} is {_short(actual)}, no list"
        return
    for index, each in enumerate(actual):
        yield from _differences(expected, each, f"{at}.{index}")


def _some(expected: Any, actual: Any, at: str) -> Iterator[str]:
    if not any(not differences(expected, each) for each in actual or []):
        yield f"{at} has no {_short(expected)}: {_short(actual)}"


def _begins(whole: Any, actual: Any, at: str) -> Iterator[str]:
    if not (actual and whole[: len(actual)] == actual):
        yield f"{at} is {_short(actual)}, no beginning of {_short(whole)}"


def _exactly(expected: Any, actual: Any, at: str) -> Iterator[str]:
    if expected != actual:
        yield f"{at} is {_short(actual)}, not exactly {_short(expected)}"


def _not(expected: Any, actual: Any, at: str) -> Iterator[str]:
    if not differences(expected, actual):
        yield f"{at} is {_short(actual)}"


_MATCHERS: dict[str, Callable[[Any, Any, str], Iterator[str]]] = {
    "$any": _any,
    "$in": _in,
    "$min": _min,
    "$max": _max,
    "$matches": _matches,
    "$length": _length,
    "$each": _each,
    "$some": _some,
    "$begins": _begins,
    "$exactly": _exactly,
    "$not": _not,
}
