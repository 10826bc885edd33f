"""What an operator can set, and where it comes from: flags > environment > YAML file > defaults.

A settings class is a frozen pydantic model. One field is one option, under three names:
`drain_seconds` in YAML, `PACELINE_DRAIN_SECONDS` in the environment, `--drain-seconds` as a flag.
Every field has a description, with its unit: it is the help text. The classes that a settings class
is made of are the sections of `--help`, titled by their docstrings. `option` declares what
is more than that on a command line: an argument without a flag, a flag that can be given again.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import re
import sys
import textwrap
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from paceline_serving.security import ROLES, TlsFiles, refuse_plaintext

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pydantic.fields import FieldInfo

__all__ = [
    "LISTEN_DESCRIPTION",
    "Address",
    "ListenSettings",
    "LogSettings",
    "OneOrMore",
    "OptionKind",
    "ProcessSettings",
    "ServerSettings",
    "ServerTlsSettings",
    "Settings",
    "SettingsError",
    "StringList",
    "load",
    "option",
    "parse",
    "to_arguments",
]

_PREFIX = "PACELINE_"
_CONFIG_VARIABLE = "PACELINE_CONFIG"
# Kubernetes puts PACELINE_TARGET_SERVICE_HOST and the like into every pod beside a service of that
# name. Nobody set those, so they are no mistakes.
_SERVICE_LINK = re.compile(
    r".*_(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)"
)


class SettingsError(Exception):
    """A setting that does not parse: its text is one line that says what to change."""


class Settings(BaseModel):
    """The base of every settings class."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _check_address(address: str) -> str:
    port = address.rpartition(":")[2]
    if address.startswith("unix:") or (
        re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+):\d{1,5}", address) and int(port) <= 65535
    ):
        return address
    raise ValueError("must be HOST:PORT, [IPV6]:PORT or unix:PATH")


def _split(value: object) -> object:
    """Take a list from one string: a flag or a variable separates by commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _wrap(value: object) -> object:
    """Take a list of one from one string: a variable holds what a flag is given once."""
    return (value,) if isinstance(value, str) else value


Address = Annotated[str, AfterValidator(_check_address)]
StringList = Annotated[tuple[str, ...], BeforeValidator(_split)]
OneOrMore = Annotated[tuple[str, ...], BeforeValidator(_wrap)]

OptionKind = Literal["option", "argument", "arguments", "repeated"]


def option(
    default: Any, *, description: str, flag: str = "", kind: OptionKind = "option", **limits: Any
) -> Any:
    """Declare a field with a place of its own on the command line.

    Args:
        default: Its default.
        description: Its help.
        flag: The flag, where it is not the field's name.
        kind: "argument" is given without a flag, "arguments" as often as one likes; "repeated" is a
            flag that can be given again.
        limits: Pydantic's, such as `gt`.
    """
    extra: dict[str, Any] = {"flag": flag, "kind": kind}
    return Field(default, description=description, json_schema_extra=extra, **limits)


LISTEN_DESCRIPTION = "HOST:PORT (0: any free port) or unix:PATH for gRPC"


class ListenSettings(Settings):
    """Where to listen."""

    listen: Address = Field("127.0.0.1:50051", description=LISTEN_DESCRIPTION)
    health_listen: Address | Literal[""] = Field(
        "127.0.0.1:0",
        description="HOST:PORT for grpc.health.v1 alone, in plaintext, for probes; it is served"
        " at --listen, too. Empty: no port of its own",
    )
    metrics_listen: Address | Literal[""] = Field(
        "", description="HOST:PORT for Prometheus metrics over HTTP. Empty: none"
    )
    reflection: bool = Field(False, description="let clients ask for the protos (gRPC reflection)")


class ServerTlsSettings(Settings):
    """Transport security."""

    tls_certificate: Path | None = Field(
        None, description="PEM file with this server's certificate chain"
    )
    tls_key: Path | None = Field(None, description="PEM file with its private key")
    tls_client_authority: Path | None = Field(
        None, description="PEM file: demand client certificates that descend from these (mTLS)"
    )
    peer_roles: StringList = Field(
        (),
        description="who may call what, as SPIFFE_ID=ROLE with a role of"
        f" {', '.join(sorted(ROLES))}; then all others are refused. Needs"
        " --tls-client-authority. Empty: every client certificate may call",
    )
    insecure: bool = Field(
        False, description="allow plaintext on an address that other machines can reach"
    )

    @property
    def server_tls(self) -> TlsFiles:
        """The files of the server's end."""
        return TlsFiles(self.tls_certificate, self.tls_key, self.tls_client_authority)

    @property
    def role_of_peer(self) -> dict[str, str]:
        """SPIFFE id to role."""
        return dict(pair.split("=", 1) for pair in self.peer_roles)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together")
        if self.tls_client_authority is not None and self.tls_certificate is None:
            raise ValueError("tls_client_authority needs tls_certificate and tls_key")
        if self.peer_roles and self.tls_client_authority is None:
            raise ValueError("peer_roles needs tls_client_authority")
        for pair in self.peer_roles:
            if pair.partition("=")[2] not in ROLES or not pair.startswith("spiffe://"):
                raise ValueError(
                    f"peer_roles: {pair!r} is not spiffe://...=ROLE, ROLE one of"
                    f" {', '.join(sorted(ROLES))}"
                )
        return self


class LogSettings(Settings):
    """Logs, on standard error."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="the least severe level to log"
    )
    log_format: Literal["json", "text"] = Field(
        "json", description="one JSON object a line, or text for people"
    )


class ProcessSettings(Settings):
    """Start and stop."""

    call_limit_seconds: float = Field(
        600, gt=0, le=86_400, description="seconds a call may take at most, whatever its deadline"
    )
    drain_delay_seconds: float = Field(
        0,
        ge=0,
        le=600,
        description="seconds to go on serving after SIGTERM, so that balancers notice",
    )
    drain_seconds: float = Field(
        25, ge=0, le=3600, description="seconds after that for running work to end"
    )
    exit_with_parent: bool = Field(
        False, description="stop at once when standard input closes: the parent process is gone"
    )


class ServerSettings(ListenSettings, ServerTlsSettings, LogSettings, ProcessSettings):
    """What every server process can be told."""

    @model_validator(mode="after")
    def _is_not_exposed(self) -> Self:
        if self.tls_certificate is None and not self.insecure:
            refuse_plaintext(self.listen, flag="--insecure")
        return self


SettingsT = TypeVar("SettingsT", bound=Settings)


def parse(
    settings_class: type[SettingsT],
    arguments: Sequence[str],
    *,
    program: str,
    environment: Mapping[str, str] | None = None,
    examples: str = "",
) -> SettingsT:
    """Read settings for a program; print help or one line and exit if that is the end of it.

    Args:
        settings_class: What can be set.
        arguments: The command line, without the program's name.
        program: The program's name, for messages and help.
        environment: The environment; None is this process's.
        examples: Command lines for the help, one a line.

    Raises:
        SystemExit: 0 after `--help`, 2 after a line that names the wrong setting.
    """
    variables = os.environ if environment is None else environment
    try:
        flags = _parse_flags(settings_class, arguments, program=program, examples=examples)
        config = flags.pop("config", None) or variables.get(_CONFIG_VARIABLE)
        return load(
            settings_class,
            flags=flags,
            environment=variables,
            file=Path(config) if config else None,
        )
    except SettingsError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def load(
    settings_class: type[SettingsT],
    *,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Path | None,
) -> SettingsT:
    """Put settings together from their sources.

    Raises:
        SettingsError: a key is unknown, or a value is not allowed; names key and source.
    """
    known = settings_class.model_fields
    from_file = _read_yaml(file, known=known)
    from_environment = _read_environment(environment, known=known)
    values = {**from_file, **from_environment, **flags}
    names = {
        **{key: _option_name(key, field) for key, field in known.items()},
        **{key: f"{file}: {key}" for key in from_file},
        **{key: _PREFIX + key.upper() for key in from_environment},
        **{key: _option_name(key, known[key]) for key in flags},
    }
    try:
        return settings_class.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        text = problem["msg"].removeprefix("Value error, ")
        key = str(problem["loc"][0]) if problem["loc"] else ""
        raise SettingsError(f"{names.get(key, key)}: {text}" if key else text) from None


def to_arguments(settings: Settings) -> list[str]:
    """Return the flags that make these settings from the defaults, for a child's command line."""
    arguments: list[str] = []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value == field.get_default():
            continue
        if isinstance(value, bool):
            arguments.append(_flag(name) if value else _flag(f"no_{name}"))
        else:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            arguments.append(f"{_flag(name)}={text}")
    return arguments


def _read_yaml(file: Path | None, *, known: Mapping[str, FieldInfo]) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{file}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict | None):
        raise SettingsError(f"{file}: must be a mapping of keys to values")
    for key in content or {}:
        if key not in known:
            raise SettingsError(f"{file}: unknown key {key!r}{_nearest(str(key), known)}")
    return content or {}


def _read_environment(
    environment: Mapping[str, str], *, known: Mapping[str, FieldInfo]
) -> dict[str, str]:
    values = {}
    for variable, value in environment.items():
        if not variable.startswith(_PREFIX) or variable == _CONFIG_VARIABLE:
            continue
        key = variable.removeprefix(_PREFIX).lower()
        if key in known:
            values[key] = value
        elif not _SERVICE_LINK.fullmatch(variable):
            candidates = [_PREFIX + name.upper() for name in known]
            raise SettingsError(f"unknown variable {variable}{_nearest(variable, candidates)}")
    return values


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
Each option can also be set in the environment (--log-level as PACELINE_LOG_LEVEL) and in the YAML
file (as log_level). A flag wins over the environment, the environment over the file. An unknown
name is an error everywhere.
"""


def _parse_flags(
    settings_class: type[Settings], arguments: Sequence[str], *, program: str, examples: str
) -> dict[str, Any]:
    parser = _parser(settings_class, program=program, examples=examples)
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            raise SettingsError(f"unexpected argument {unknown[0]!r}; quote what has spaces")
        known = ["--config", *(_flag(*each) for each in settings_class.model_fields.items())]
        raise SettingsError(f"unknown option {word}{_nearest(word, known)}")
    return vars(namespace)


def _parser(settings_class: type[Settings], *, program: str, examples: str) -> _Parser:
    shown = textwrap.indent(textwrap.dedent(examples).strip(), "  ")
    parser = _Parser(
        prog=program,
        usage="%(prog)s [options]" + "".join(_usage(settings_class)),
        description=inspect.cleandoc(settings_class.__doc__ or ""),
        epilog=(f"examples:\n{shown}\n" if shown else "") + _SOURCES,
        formatter_class=_Help,
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    left = dict(settings_class.model_fields)  # a section may declare another one's field anew
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


def _usage(settings_class: type[Settings]) -> Iterator[str]:
    dots = {"argument": "", "arguments": " ..."}
    for name, field in settings_class.model_fields.items():
        if (kind := _extra(field, "kind")) in dots:
            yield f" [{name.upper()}{dots[kind]}]"


def _add_option(group: Any, name: str, *, field: FieldInfo) -> None:
    """Add one option. Values stay text: the model parses and checks them, from every source."""
    default, kind = field.get_default(), _extra(field, "kind")
    silent = default is False or default in (None, "", ()) or field.is_required()
    # argparse formats help with %.
    text = f"{field.description}{'' if silent else f' (default: {default})'}".replace("%", "%%")
    choices = _choices(field.annotation)
    metavar = "{" + ",".join(choices) + "}" if choices else name.rpartition("_")[2].upper()
    if kind in {"argument", "arguments"}:
        count = "?" if kind == "argument" else "*"
        group.add_argument(name, nargs=count, metavar=metavar, help=text)
    elif field.annotation is bool:
        group.add_argument(
            _flag(name, field), dest=name, action=argparse.BooleanOptionalAction, help=text
        )
    else:
        action = "append" if kind == "repeated" else "store"
        group.add_argument(_flag(name, field), dest=name, action=action, metavar=metavar, help=text)


def _extra(field: FieldInfo, key: str) -> str:
    """Return what `option` noted on a field."""
    extra = field.json_schema_extra
    return str(extra[key]) if isinstance(extra, dict) else ""


def _choices(annotation: Any) -> tuple[str, ...]:
    return typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()


def _flag(name: str, field: FieldInfo | None = None) -> str:
    own = _extra(field, "flag") if field else ""
    return "--" + (own or name).replace("_", "-")


def _option_name(name: str, field: FieldInfo) -> str:
    """Return what an option is called on a command line."""
    is_argument = _extra(field, "kind") in {"argument", "arguments"}
    return name.upper() if is_argument else _flag(name, field)


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = [each for each in names if each.startswith(name)]
    close += difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
