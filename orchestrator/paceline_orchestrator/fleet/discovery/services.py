"""Headless Services, as an operator names them: what DNS and Kubernetes discovery look for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline_orchestrator.fleet.discovery.endpoints import Role

DEFAULT_PORT = 50051
"""Where model servers listen unless they are told to listen elsewhere."""

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Service:
    """One headless Service.

    Attributes:
        name: Its name; for DNS also with its namespace and domain.
        role: What the servers behind it are for.
        port: Their port, if it was given.
    """

    name: str
    role: Role
    port: int | None = None


def parse_services(values: Iterable[str], role: Role) -> tuple[Service, ...]:
    """Read `NAME` or `NAME:PORT`.

    Raises:
        InvalidFieldError: An entry is malformed, or two have the same name.
    """
    services = tuple(_parse(value.strip(), role) for value in values)
    if len({service.name for service in services}) < len(services):
        raise InvalidFieldError.of(f"{role}_service", "two entries have the same name")
    return services


def _parse(value: str, role: Role) -> Service:
    name, colon, port = value.partition(":")
    if not _NAME.fullmatch(name) or not (not colon or (port.isdecimal() and 0 < int(port) < 65536)):
        raise InvalidFieldError.of(f"{role}_service", f"{value!r} is not NAME or NAME:PORT")
    return Service(name, role, int(port) if colon else None)
