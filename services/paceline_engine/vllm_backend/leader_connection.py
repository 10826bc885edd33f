"""A connection that tells when another node is gone, also one that lost its power."""

from __future__ import annotations

import socket

_CONNECT_SECONDS = 30.0
# A node that says nothing any more is gone after 10 + 3 * 5 seconds; Linux itself would take hours.
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def connect_to_leader(address: str, port: int) -> socket.socket:
    """Return a connection that breaks within half a minute of the other node's end.

    Raises:
        OSError: The node does not answer.
    """
    leader = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
    leader.settimeout(None)
    leader.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # not on every platform
            leader.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return leader
