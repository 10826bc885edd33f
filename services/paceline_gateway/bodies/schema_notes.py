"""Leaves out of a JSON schema what it only says to its reader.

Descriptions can be the larger part of an agent's schemas. They shape no answer, so they do not
count where a grammar may have so many bytes, and are not sent. A template still writes them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline import Grammar

_NOTES = frozenset({"$comment", "description", "title"})
_DATA = frozenset({"const", "default", "enum", "examples"})
_OF_NAMES = frozenset({"$defs", "definitions", "patternProperties", "properties"})


def without_notes(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without its notes. Values that are data stay as they are."""
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NOTES and isinstance(value, str):
            continue
        if name in _OF_NAMES and isinstance(value, dict):
            kept[name] = {it: _bare(each) for it, each in value.items()}
        else:
            kept[name] = value if name in _DATA else _bare(value)
    return kept


def bare_grammar(grammar: Grammar | None) -> Grammar | None:
    """Return a grammar whose schema has no notes; a schema that is a text stays as it is."""
    if grammar is None or grammar.json_schema is None or isinstance(grammar.json_schema, str):
        return grammar
    return replace(grammar, json_schema=without_notes(grammar.json_schema))


def _bare(value: Any) -> Any:
    if isinstance(value, list):
        return [_bare(it) for it in value]
    return without_notes(value) if isinstance(value, dict) else value
