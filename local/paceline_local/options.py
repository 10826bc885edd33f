"""The options of several commands, and the reading of a command's options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, model_validator

from paceline_serving.command_line import parse
from paceline_serving.settings import Address, Settings, variables_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_SettingsT = TypeVar("_SettingsT", bound=Settings)


def _check_place(path: Path) -> Path:
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"cannot write {path}")
    return path


def _ends_in(*endings: str) -> AfterValidator:
    def check(path: Path) -> Path:
        if path.suffix not in endings:
            raise ValueError(f"must end in {' or '.join(endings)}")
        return path

    return AfterValidator(check)


# A path to write to, which is checked before the work is done.
ResultFile: TypeAlias = Annotated[Path, AfterValidator(_check_place)]
PictureFile: TypeAlias = Annotated[ResultFile, _ends_in(".svg", ".png")]
SvgFile: TypeAlias = Annotated[ResultFile, _ends_in(".svg")]


class ClientTlsSettings(Settings):
    """Transport security."""

    tls_authority: Path | None = Field(
        None, description="PEM file with the authorities to trust; turns TLS on"
    )
    tls_certificate: Path | None = Field(
        None, description="PEM file with this client's certificate, for mTLS"
    )
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key")
    insecure: bool = Field(False, description="allow plaintext to another machine")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("--tls-certificate and --tls-key go together")
        return self


class ConnectionSettings(ClientTlsSettings):
    """Connection."""

    address: Address = Field("127.0.0.1:50050", description="address of the orchestrator")
    timeout_seconds: float = Field(120, gt=0, description="seconds until the call is given up")


class CallerSettings(ConnectionSettings):
    """Credentials."""

    api_key_file: Path | None = Field(
        None, description="file with the API key, if the orchestrator requires one"
    )


def read_options(
    settings_class: type[_SettingsT], arguments: Sequence[str], *, program: str, examples: str
) -> _SettingsT:
    """Read a command's options; for `--help` or an error print the text and exit.

    Raises:
        SystemExit: 0 after `--help`, 2 after a line that names the wrong option.
    """
    # `paceline` has checked that another command knows each of the other variables.
    own = variables_of(settings_class)
    environment = {name: value for name, value in os.environ.items() if name in own}
    return parse(
        settings_class, arguments, program=program, environment=environment, examples=examples
    )
