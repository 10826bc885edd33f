"""The rules of a call's arguments, in the form in which a family of models writes them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from paceline_gateway.dialects.enforceable import enforceable
from paceline_gateway.dialects.family import TEXT_MARK, Shape, Tags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline_gateway.conversations.conversation import Tool
    from paceline_gateway.dialects.family import Family
    from paceline_gateway.dialects.grammar_rules import Rules

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Keywords by which a schema allows, or may allow, properties that it does not list.
_ABOUT_OTHERS = frozenset(
    {
        "$ref",
        "additionalProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "patternProperties",
        "propertyNames",
        "unevaluatedProperties",
    }
)
_NUMBER = r"NUMBER: /-?[0-9]+(\.[0-9]+)?/"
_BARE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class UnenforceableError(Exception):
    """A tool is strict, and its family has no grammar of arguments."""


def argument_rule(rules: Rules, family: Family, tool: Tool, *, follows_schemas: bool) -> str:
    """Write a rule for the arguments of a call.

    Args:
        rules: The grammar's rules; further ones are added.
        family: How the model writes calls.
        tool: What is called.
        follows_schemas: Whether schemas of tools count that are not strict.

    Raises:
        UnenforceableError: The tool is strict, and the family has no grammar of arguments.
    """
    if isinstance(family.arguments, Tags):
        return _tagged(rules, family.arguments, tool)
    if family.arguments is Shape.JSON:
        return rules.json(schema_of(tool, follows_schemas=follows_schemas))
    if tool.strict:
        raise UnenforceableError
    return _python(rules, tool) if family.arguments is Shape.PYTHON else _bare(rules, tool)


def schema_of(tool: Tool, *, follows_schemas: bool) -> Mapping[str, Any]:
    """Return the schema that a tool's arguments have to follow."""
    wanted = tool.parameters
    if wanted is None or tool.strict is False:
        return _ANY_OBJECT
    if tool.strict is None:
        wanted = enforceable(wanted) if follows_schemas else None
    schema = _ANY_OBJECT | dict(wanted or {})
    if schema.keys() & {"properties"} and not schema.keys() & _ABOUT_OTHERS:
        schema["additionalProperties"] = False  # a function has no other arguments
    return schema


def _tagged(rules: Rules, tags: Tags, tool: Tool) -> str:
    """Write pairs in the order of the schema; those that it does not demand may be missing."""
    schema = tool.parameters or {}
    required = schema.get("required") or ()
    literal = rules.tokens.literal
    written = []
    for name, about in _properties(tool).items():
        head, opening = f"{tags.key_open}{name}{tags.key_close}", tags.value_open
        texts = _texts_of(about)
        if texts:
            alternatives = " | ".join(literal(f"{it}{tags.value_close}") for it in texts)
            value = f"({alternatives})"
        elif isinstance(about, dict) and about.get("type") not in (None, "string", ["string"]):
            defs = {it: schema[it] for it in ("$defs", "definitions") if it in schema}
            value = f"{rules.json({**defs, **about})} {literal(tags.value_close)}"
            opening = tags.json_open or opening
        else:
            value = rules.up_to(tags.value_close, "VALUE")
        pair = f"{literal(head + opening)} {value}"
        written.append(pair if name in required else f"({pair})?")
    return " ".join(written)


def _python(rules: Rules, tool: Tool) -> str:
    """Write keyword arguments whose values are literals of Python."""
    rules.add(
        'literal: STRING | NUMBER | "True" | "False" | "None" | list | dict',
        'list: "[" (literal (", " literal)*)? "]"',
        'dict: "{" (STRING ": " literal (", " STRING ": " literal)*)? "}"',
        r'STRING: /"([^"\\\n]|\\.)*"/',
        _NUMBER,
    )
    keys = [f"{it}=" for it in _properties(tool) if it.isidentifier()]
    return _pairs(keys, value="literal", comma=", ")


def _bare(rules: Rules, tool: Tool) -> str:
    """Write pairs of bare keys and values, whose texts stand between marks."""
    rules.add(
        'value: text | NUMBER | "true" | "false" | "null" | list | dict',
        f"text: {rules.tokens.literal(TEXT_MARK)} {rules.up_to(TEXT_MARK, 'QUOTED')}",
        'list: "[" (value ("," value)*)? "]"',
        'dict: "{" (KEY ":" value ("," KEY ":" value)*)? "}"',
        r"KEY: /[A-Za-z_][A-Za-z0-9_\-]*/",
        _NUMBER,
    )
    keys = [f"{it}:" for it in _properties(tool) if _BARE_NAME.fullmatch(it)]
    return _pairs(keys, value="value", comma=",")


def _pairs(keys: Sequence[str], *, value: str, comma: str) -> str:
    """Write pairs of one of these keys and a value, in any order and number."""
    if not keys:
        return '""'
    pair = f"({' | '.join(map(json.dumps, keys))}) {value}"
    return f'({pair} ("{comma}" {pair})*)?'


def _properties(tool: Tool) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments, by their names."""
    found = (tool.parameters or {}).get("properties")
    return found if isinstance(found, dict) else {}


def _texts_of(about: Any) -> list[str]:
    """Return the only texts that a value may be; none if it may be others."""
    if not isinstance(about, dict):
        return []
    texts = about.get("enum", [about["const"]] if "const" in about else [])
    is_listed = isinstance(texts, list) and all(isinstance(it, str) for it in texts)
    return texts if is_listed else []
