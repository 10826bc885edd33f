"""Listening on HOST:PORT, where not gRPC does it."""

from __future__ import annotations

import socket

__all__ = ["bound_address", "listen"]


def listen(address: str, *, backlog: int | None = None) -> socket.socket:
    """Listen on HOST:PORT or [IPV6]:PORT; port 0 is any free one.

    Raises:
        OSError: The address cannot be had.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, int(port)), family=family, backlog=backlog)


def bound_address(listener: socket.socket) -> str:
    """Return where a socket listens, as `listen` takes it."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
