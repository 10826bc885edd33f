"""The command line of a settings class: its flags, its help and its error messages.

The classes that a settings class is made of are the sections of `--help`, titled by their
docstrings.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from paceline_serving.settings import (
    CONFIG_VARIABLE,
    Settings,
    SettingsError,
    flag_of,
    load,
    nearest,
    noted,
    repetition,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pydantic.fields import FieldInfo

SettingsT = TypeVar("SettingsT", bound=Settings)


def parse(
    settings_class: type[SettingsT],
    arguments: Sequence[str],
    *,
    program: str,
    environment: Mapping[str, str] | None = None,
    examples: str = "",
) -> SettingsT:
    """Read a program's settings; for `--help` or an error print the text and exit.

    Args:
        settings_class: Declares the settings.
        arguments: The command line, without the program's name.
        program: The program's name, for messages and help.
        environment: The environment; None: this process's.
        examples: Command lines for the help, one a line.

    Raises:
        SystemExit: 0 after `--help`, 2 after a line that names the wrong setting.
    """
    variables = os.environ if environment is None else environment
    try:
        flags = _parse_flags(settings_class, arguments, program=program, examples=examples)
        config = flags.pop("config", None) or variables.get(CONFIG_VARIABLE)
        return load(
            settings_class,
            flags=flags,
            environment=variables,
            file=Path(config) if config else None,
        )
    except SettingsError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise SettingsError(message)


class _Help(argparse.HelpFormatter):
    """Keeps the line breaks of descriptions and examples, and gives options room."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)

    def _fill_text(self, text: str, _width: int, indent: str) -> str:
        return textwrap.indent(text, indent)


_SOURCES = """
Each option can also be set in the environment, {flag} as PACELINE_{variable},
and in the YAML file, as {name}. A flag wins over the environment, the environment over
the file. An unknown name is an error everywhere.
"""


def _parse_flags(
    settings_class: type[Settings], arguments: Sequence[str], *, program: str, examples: str
) -> dict[str, Any]:
    parser = _parser(settings_class, program=program, examples=examples)
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            raise SettingsError(
                f"unexpected argument {unknown[0]!r}; quote an argument that has spaces"
            )
        known = ["--config", *(flag_of(*each) for each in settings_class.model_fields.items())]
        raise SettingsError(f"unknown option {word}{nearest(word, known)}")
    return vars(namespace)


def _parser(settings_class: type[Settings], *, program: str, examples: str) -> _Parser:
    shown = textwrap.indent(textwrap.dedent(examples).strip(), "  ")
    parser = _Parser(
        prog=program,
        usage="%(prog)s [options]" + "".join(_usage(settings_class)),
        description=inspect.cleandoc(settings_class.__doc__ or ""),
        epilog=(f"examples:\n{shown}\n" if shown else "") + _sources(settings_class),
        formatter_class=_Help,
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    left = dict(settings_class.model_fields)  # two sections may declare one field
    for section in settings_class.__mro__:
        names = [name for name in vars(section).get("__annotations__", ()) if name in left]
        if names:
            title = (section.__doc__ or "").strip().splitlines()[0].rstrip(".")
            group = parser.add_argument_group("Options" if section is settings_class else title)
            for name in names:
                _add_option(group, name, field=left.pop(name))
    general = parser.add_argument_group("General")
    general.add_argument("--config", metavar="FILE", help="YAML file with options")
    general.add_argument("-h", "--help", action="help", help="show this help and exit")
    return parser


def _sources(settings_class: type[Settings]) -> str:
    """Describe the other sources of options, with an option of the class as the example."""
    own = vars(settings_class).get("__annotations__", {})
    options = {
        name: flag_of(name, field)
        for name, field in settings_class.model_fields.items()
        if noted(field, "kind") not in {"argument", "arguments"} and not noted(field, "flag")
    }
    name = max(options, key=lambda name: (name in own, "_" in name))
    return _SOURCES.format(flag=options[name], variable=name.upper(), name=name)


def _usage(settings_class: type[Settings]) -> Iterator[str]:
    dots = {"argument": "", "arguments": " ..."}
    for name, field in settings_class.model_fields.items():
        if (kind := noted(field, "kind")) in dots:
            yield f" [{name.upper()}{dots[kind]}]"


def _add_option(group: Any, name: str, *, field: FieldInfo) -> None:
    """Add one option. Its value stays text: pydantic parses and checks all sources alike."""
    kind, again = noted(field, "kind"), repetition(field)
    choices = _choices(field.annotation)
    metavar = "{" + ",".join(choices) + "}" if choices else name.rpartition("_")[2].upper()
    if kind in {"argument", "arguments"}:
        count = "?" if kind == "argument" else "*"
        group.add_argument(name, nargs=count, metavar=metavar, help=_described(field))
    elif field.annotation is bool:
        group.add_argument(
            flag_of(name, field),
            dest=name,
            action=argparse.BooleanOptionalAction,
            help=_described(field),
        )
    else:
        group.add_argument(
            flag_of(name, field),
            dest=name,
            action="append" if again else "store",
            metavar=metavar,
            help=_described(field, again),
        )


def _described(field: FieldInfo, *notes: str) -> str:
    """Return an option's help: its description, then notes and its default in brackets."""
    default = field.get_default()
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    if not (default is False or default in (None, "", {}) or field.is_required()):
        notes = (*notes, f"default: {default}")
    said = "; ".join(filter(None, notes))
    text = f"{field.description} ({said})" if said else f"{field.description}"
    return text.replace("%", "%%")  # argparse formats help with %


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the words of a Literal, also of one that may be left out."""
    words = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return words
    match words:
        case (inner, types.NoneType):
            return _choices(inner)
    return ()
