"""Settings and their sources: flags before environment before YAML file before defaults.

A settings class is a frozen pydantic model. One field is one option, under three names:
`drain_seconds` in YAML, `PACELINE_DRAIN_SECONDS` in the environment, `--drain-seconds` as a flag.
Every field has a description with its unit; it is the help text. `option` declares the exceptions
of a command line: an argument without a flag, a flag of another name. A tuple or a mapping takes
several values separated by commas, and its flag can be given again. The values of `OneOrMore` may
contain commas, so only its flag can be given again. `repetition` adds this to the help.
"""

from __future__ import annotations

import difflib
import re
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from paceline.plain_files import read_plain_file
from paceline_serving.plain_yaml import MOST_YAML_BYTES, parse_yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from types import ModuleType

    from pydantic.fields import FieldInfo

CONFIG_VARIABLE = "PACELINE_CONFIG"
"""Names the YAML file, if no flag does."""

VARIABLE_PREFIX = "PACELINE_"
"""The prefix of each environment variable that is a setting."""
# Kubernetes puts PACELINE_TARGET_SERVICE_HOST and the like into every pod in the namespace of a
# Service of that name. They are not settings, and no mistakes of the operator.
_SERVICE_LINK = re.compile(
    r".*_(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)"
)


class SettingsError(Exception):
    """A setting that does not parse; the text is one line that says what to change."""


class Settings(BaseModel):
    """The base of every settings class."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _check_address(address: str) -> str:
    port = address.rpartition(":")[2]
    has_path = re.fullmatch(r"unix:.*[^/]", address)
    has_port = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+):\d{1,5}", address) and int(port) <= 65535
    if has_path or has_port:
        return address
    raise ValueError("must be HOST:PORT, [IPV6]:PORT or unix:PATH")


def separated(value: Any) -> Any:
    """Split text at commas: that of a variable, or of each flag."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return [part for each in value for part in separated(each)]
    return value


def _wrap(value: object) -> object:
    """Put a single string into a list: a variable is like a flag that is given once."""
    return (value,) if isinstance(value, str) else value


def _check_tcp(address: str) -> str:
    if address.startswith("unix:"):
        raise ValueError("must be HOST:PORT or [IPV6]:PORT")
    return address


Address = Annotated[str, AfterValidator(_check_address)]
TcpAddress = Annotated[Address, AfterValidator(_check_tcp)]
StringList = Annotated[tuple[str, ...], BeforeValidator(separated)]
_WHOLE = BeforeValidator(_wrap)
OneOrMore = Annotated[tuple[str, ...], _WHOLE]
RateList = Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], BeforeValidator(separated)]

OptionKind = Literal["option", "argument", "arguments"]


def option(
    default: Any, *, description: str, flag: str = "", kind: OptionKind = "option", **limits: Any
) -> Any:
    """Declare a field whose command-line form is not derived from its name.

    Args:
        flag: The flag, if it differs from the field's name.
        kind: "argument": one value without a flag; "arguments": any number of them.
        limits: Pydantic's, such as `gt`.
    """
    extra: dict[str, Any] = {"flag": flag, "kind": kind}
    return Field(default, description=description, json_schema_extra=extra, **limits)


SettingsT = TypeVar("SettingsT", bound=Settings)


def load(
    settings_class: type[SettingsT],
    *,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Path | None,
) -> SettingsT:
    """Read settings from their sources.

    Raises:
        SettingsError: a key is unknown, or a value is not allowed; names key and source.
    """
    known = settings_class.model_fields
    from_file = _read_yaml(file, known=known)
    from_environment = _read_environment(environment, known=known)
    values = {**from_file, **from_environment, **flags}
    names = {
        **{key: option_name(key, field) for key, field in known.items()},
        **{key: f"{file}: {key}" for key in from_file},
        **{key: VARIABLE_PREFIX + key.upper() for key in from_environment},
        **{key: option_name(key, known[key]) for key in flags},
    }
    try:
        return settings_class.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        is_missing = problem["type"] == "missing"
        text = "is needed" if is_missing else problem["msg"].removeprefix("Value error, ")
        key = str(problem["loc"][0]) if problem["loc"] else ""
        raise SettingsError(f"{names.get(key, key)}: {text}" if key else text) from None


def _read_yaml(file: Path | None, *, known: Mapping[str, FieldInfo]) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        content = parse_yaml(read_plain_file(file, most_bytes=MOST_YAML_BYTES).decode())
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{file}: {error}") from None
    if not isinstance(content, dict | None):
        raise SettingsError(f"{file}: must be a mapping of keys to values")
    for key in content or {}:
        if key not in known:
            raise SettingsError(f"{file}: unknown key {key!r}{nearest(str(key), known)}")
    return content or {}


def _read_environment(
    environment: Mapping[str, str], *, known: Mapping[str, FieldInfo]
) -> dict[str, str]:
    values = {}
    for variable, value in environment.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        key = variable.removeprefix(VARIABLE_PREFIX).lower()
        if key in known:
            values[key] = value
        elif not is_service_link(variable):
            candidates = [VARIABLE_PREFIX + name.upper() for name in known]
            raise SettingsError(f"unknown variable {variable}{nearest(variable, candidates)}")
    return values


def settings_in(module: ModuleType) -> list[type[Settings]]:
    """Return the settings classes that a module declares or imports."""
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Settings)
    ]


def variables_of(settings_class: type[Settings]) -> set[str]:
    """Return the environment variables that set a class's fields, or name its file."""
    return {
        CONFIG_VARIABLE,
        *(VARIABLE_PREFIX + name.upper() for name in settings_class.model_fields),
    }


def is_service_link(variable: str) -> bool:
    """Whether Kubernetes sets the variable for a Service, so that it is not a setting."""
    return _SERVICE_LINK.fullmatch(variable) is not None


def noted(field: FieldInfo, key: str) -> str:
    """Return a note of `option` on a field."""
    extra = field.json_schema_extra
    return str(extra[key]) if isinstance(extra, dict) else ""


def repetition(field: FieldInfo) -> str:
    """Say how several values of an option are given; empty if it takes a single value."""
    if typing.get_origin(field.annotation) not in {tuple, dict}:
        return ""
    return "can be given again" if _WHOLE in field.metadata else "can be A,B, or given again"


def flag_of(name: str, field: FieldInfo | None = None) -> str:
    """Return an option's flag."""
    own = noted(field, "flag") if field else ""
    return "--" + (own or name).replace("_", "-")


def option_name(name: str, field: FieldInfo) -> str:
    """Return an option's name on a command line."""
    is_argument = noted(field, "kind") in {"argument", "arguments"}
    return name.upper() if is_argument else flag_of(name, field)


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the known name nearest to an unknown one, as the end of a message."""
    names = list(known)
    close = [each for each in names if each.startswith(name)]
    # What all names begin with makes none of them nearer.
    bare = {_bare(each): each for each in names}
    close += (bare[it] for it in difflib.get_close_matches(_bare(name), bare, n=1))
    return f"; did you mean {close[0]}?" if close else ""


def _bare(name: str) -> str:
    return name.removeprefix(VARIABLE_PREFIX).lstrip("-")
