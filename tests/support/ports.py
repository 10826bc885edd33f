"""Addresses for the servers of tests, at which nobody of another test looks for a server.

An orchestrator of one test goes on asking for a server that was killed. Had the system given that
server's port to a server of another test, in another process, this one would get strange sessions.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import cache
from itertools import cycle, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Below those that the system gives to whoever asks for any: so nobody gets one that is let go of
# for a moment.
_PORTS = range(20_000, 32_000)
_PORTS_OF_A_PROCESS = 400


def free_address() -> str:
    """Return an address that no other process of tests picks, nor this one soon again."""
    _, ports = _own_ports()
    for port in islice(ports, _PORTS_OF_A_PROCESS):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"
    raise AssertionError("no port is free")


@cache
def _own_ports() -> tuple[socket.socket, Iterator[int]]:
    """Take a block of ports; its first one is held for as long as this process lives.

    Two processes that looked for any port would now and then find the same one: what a server is to
    listen at is free until it does.
    """
    for first in _PORTS[::_PORTS_OF_A_PROCESS]:
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", first))
        except OSError:
            holder.close()
            continue
        return holder, cycle(range(first + 1, first + _PORTS_OF_A_PROCESS))
    raise AssertionError("too many processes of tests run at once")
