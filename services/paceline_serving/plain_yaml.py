"""Reads YAML of an operator's files by the fast parser, and refuses deep nesting."""

from __future__ import annotations

from typing import Any

import yaml

MOST_YAML_BYTES = 4 << 20
"""The largest file of settings or keys: 25,000 keys."""

# The deepest file that is read, a list of keys, has two. Each level takes stack of the parser.
_MOST_DEPTH = 32
# The parser in C takes a tenth of the time; PyYAML is built without it in some places.
_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str) -> Any:
    """Parse the first document of a text.

    Raises:
        ValueError: The text is not YAML, or nested too deeply; the error shows none of the text.
    """
    try:
        _refuse_depth(text)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe one
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}: {error.problem})" if mark is not None else ""
        raise ValueError(f"not readable as YAML{place}") from None
    except (yaml.YAMLError, RecursionError):
        raise ValueError("not readable as YAML") from None


def _refuse_depth(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MOST_DEPTH:
                raise ValueError(f"nested more than {_MOST_DEPTH} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
