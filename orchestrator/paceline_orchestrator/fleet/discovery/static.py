"""A list of servers that does not change."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from paceline.errors import InvalidFieldError
from paceline_orchestrator.fleet.discovery.endpoints import Endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from paceline_orchestrator.fleet.discovery.endpoints import Role

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class StaticDiscovery:
    """A list that does not change."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = frozenset(endpoints)

    async def endpoints(self) -> AsyncIterator[frozenset[Endpoint]]:
        """Yield the list once."""
        yield self._endpoints
        await asyncio.Event().wait()


def parse_endpoints(values: Sequence[str], role: Role) -> tuple[Endpoint, ...]:
    """Read `host:port` or `name=host:port`; without a name it is the role and its number.

    Raises:
        InvalidFieldError: An entry is malformed, or two share a name or an address.
    """
    endpoints = tuple(_parse(value, role, index) for index, value in enumerate(values))
    for what in ("name", "address"):
        known = {getattr(endpoint, what) for endpoint in endpoints}
        if len(known) < len(endpoints):
            raise InvalidFieldError.of(f"{role}s", f"two entries have the same {what}")
    return endpoints


def _parse(value: str, role: Role, index: int) -> Endpoint:
    name, separator, address = value.strip().rpartition("=")
    if not separator:
        name = f"{role}-{index}"
    host, _, port = address.rpartition(":")
    is_socket = address.startswith("unix:")
    if not _NAME.fullmatch(name) or not (
        is_socket or (host and port.isdecimal() and 0 < int(port) < 65536)
    ):
        raise InvalidFieldError.of(f"{role}s", f"{value!r} is not host:port or name=host:port")
    return Endpoint(name=name, address=address, role=role)
