"""Where the configurations of two models differ, for people.

A program that saves a model anew may spell its config.json in another way: with defaults written
out, or with other keys for the same thing. Nobody can be sure that it means the same, so that it is
another model (docs/adr/0039-a-model-is-what-its-files-mean.md). What differs is told by name.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

_MOST_CHARACTERS = 40  # of a key, and of a value
_MISSING = object()


@lru_cache(maxsize=64)
def tell_difference(own: str, other: str) -> str:
    """Say in which key the configuration of a server differs from that of most targets.

    Args:
        own: What the server said of its configuration, as JSON.
        other: What one of most targets said.

    Returns:
        Empty where they are alike, or one of them is not known.
    """
    if not own or not other or own == other:
        return ""
    try:
        found, wanted = json.loads(own), json.loads(other)
        path, ours, theirs = _first_difference(found, wanted)
        count = sum(_get(found, it) != _get(wanted, it) for it in {*found, *wanted})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return "its config.json is not that of most targets"
    more = f" and {count - 1} more of its keys" if count > 1 else ""
    return f"its config.json has {path} {_shown(ours)}, most targets' {_shown(theirs)}{more}"


def _first_difference(ours: Any, theirs: Any) -> tuple[str, Any, Any]:
    """Return the first key in the order of the alphabet, and its values."""
    path: list[str] = []
    while isinstance(ours, dict) and isinstance(theirs, dict):
        key = min(it for it in {*ours, *theirs} if _get(ours, it) != _get(theirs, it))
        path.append(key)
        ours, theirs = _get(ours, key), _get(theirs, key)
    # As in JSON: a key can hold what no message and no line of a log can.
    return _cut(json.dumps(".".join(path))[1:-1]), ours, theirs


def _get(values: dict[str, Any], key: str) -> Any:
    return values.get(key, _MISSING)


def _shown(value: object) -> str:
    return "missing" if value is _MISSING else _cut(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
