"""Model servers behind relays: everything that can happen on the way to them, and to them."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Self

from support.call_relay import CallRelay
from support.connection_relay import ConnectionRelay
from support.on_a_thread import relaying
from support.system import System

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.processes import ServerProcess

_CONNECT_SECONDS = 10.0


class Link:
    """The way from the orchestrators to a server: a relay of connections, then one of calls.

    Attributes:
        server: At its end.
        calls: What can happen to its calls.
        connections: What can happen to its connections.
        silent: Connections to the server itself that say nothing.
    """

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.silent: list[socket.socket] = []
        self.calls = CallRelay(server.address)
        self.connections = ConnectionRelay("")

    def __repr__(self) -> str:
        return f"<link to {self.server.name}>"

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.calls)
            self.connections.upstream = self.calls.address
            await stack.enter_async_context(self.connections)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    @property
    def address(self) -> str:
        return self.connections.address

    @property
    def hits(self) -> int:
        """How often a fault on the way met something."""
        return self.connections.hits + self.calls.hits.total()

    def open_silent_connections(self, count: int) -> None:
        """Connect to the server so often, and say nothing."""
        host, _, port = self.server.address.rpartition(":")
        for _ in range(count):
            self.silent.append(socket.create_connection((host, int(port)), _CONNECT_SECONDS))

    def heal(self) -> None:
        while self.silent:
            self.silent.pop().close()
        self.calls.heal()
        self.connections.heal()


@contextmanager
def linked_system(
    *, drafters: list[ServerProcess], targets: list[ServerProcess]
) -> Iterator[tuple[System, dict[str, Link]]]:
    """Run a system whose model servers are behind links; yield it and the links, by name."""
    links = {server.name: Link(server) for server in (*drafters, *targets)}
    with relaying(*links.values()):
        addresses = {name: link.address for name, link in links.items()}
        system = System(drafters=drafters, targets=targets, relayed=addresses)
        with system.running():
            yield system, links
