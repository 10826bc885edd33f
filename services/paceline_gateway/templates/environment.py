"""The environment of a chat template: the same as in transformers, for which templates are made.

All of it is as in `transformers.utils.chat_template_utils`: the treatment of whitespace, the tags,
filters and names, and their parameters, no more and no less. An error names the template's line and
the fault there, without the names of Python's types.
"""

from __future__ import annotations

import json
import re
import traceback
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import (
    TemplateError,
    TemplateRuntimeError,
    TemplateSyntaxError,
    UndefinedError,
    nodes,
    pass_eval_context,
)
from jinja2.exceptions import FilterArgumentError, SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2.nodes import EvalContext
    from jinja2.parser import Parser

_MOST_WORDS = 500  # characters of a fault
# Jinja's file name for a template that has no file.
_CODE_NAMES = frozenset({"<template>", "<unknown>"})
_LACKING = re.compile(r"has no (attribute|element) (.+)$", re.DOTALL)
# Messages for errors whose own text is about Python; the first class that fits decides.
_WORDS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
    (SecurityError, "it uses something forbidden to templates"),
    (ZeroDivisionError, "it divides by zero"),
    (OverflowError, "a number in it is too large"),
    (LookupError, "it looks up a missing key or attribute"),
    ((TypeError, AttributeError), "it uses a value in an unsupported way"),
    (FilterArgumentError, "it gives a filter a wrong argument"),
    (RecursionError, "it calls itself endlessly"),
    (ValueError, "a value in it cannot be used"),
)


class RefusalError(TemplateError):
    """The template refuses a conversation; the text is its author's (`raise_exception`)."""


def template_environment() -> ImmutableSandboxedEnvironment:
    """Make the environment in which a template is compiled. It keeps nothing of a conversation."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationMarks, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    environment.globals["dict"] = _Dictionaries()
    environment.globals["namespace"] = _PlainNamespace
    return environment


def fault_of(error: Exception) -> str:
    """Describe a template's fault, with its line."""
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error.message or 'it is not a template'}"[:_MOST_WORDS]
    line = _line_of(error)
    words = _words_of(error)
    return f"line {line}: {words}"[:_MOST_WORDS] if line else words[:_MOST_WORDS]


def _words_of(error: Exception) -> str:
    if isinstance(error, UndefinedError):
        lacking = _LACKING.search(str(error))
        return f"there is no {lacking[1]} {lacking[2]}" if lacking else str(error)
    for kind, words in _WORDS:
        if isinstance(error, kind):
            return words
    return str(error) if isinstance(error, TemplateRuntimeError) else "it fails"


def _line_of(error: Exception) -> int | None:
    """Return the template's line that ran last; Jinja writes it into the traceback."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename in _CODE_NAMES]
    return lines[-1] if lines else None


class _GenerationMarks(Extension):
    """Renders the text between `{% generation %}` and `{% endgeneration %}` unchanged.

    The tags mark the assistant's text for training; a prompt does not need them.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja's name and type

    def parse(self, parser: Parser) -> nodes.Node:
        """Read one block; its assignments are local to it, as in the library."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _said(self, _context: EvalContext, caller: Callable[[], str]) -> str:
        return caller()


class _Dictionaries:
    """The templates' `dict`, without the attributes of Python's class."""

    def __call__(self, *entries: Any, **more: Any) -> dict[Any, Any]:
        return dict(*entries, **more)

    def fromkeys(self, *arguments: Any, **more: Any) -> dict[Any, Any]:
        """Make a dictionary of keys with the same value."""
        return dict.fromkeys(*arguments, **more)


class _PlainNamespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore."""

    def __init__(*arguments: Any, **more: Any) -> None:
        # As in Jinja: a namespace may have a value called `self`.
        self, entries = arguments[0], dict(*arguments[1:], **more)
        for name in entries:
            _check_name(name)
        Namespace.__init__(self, entries)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} begins with an underscore")


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(format: str) -> str:  # noqa: A002 - the library's name
    """Write the local time, without a zone, as the library does."""
    return datetime.now().strftime(format)


def _refuse(message: str) -> NoReturn:
    raise RefusalError(message)
