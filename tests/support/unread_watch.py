"""A client that watches health and lets nothing be sent to it: its HTTP/2 window is 0 bytes."""

from __future__ import annotations

import socket
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4
_FIELDS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/grpc.health.v1.Health/Watch",
    ":authority": "localhost",
    "content-type": "application/grpc",
    "te": "trailers",
}


@contextmanager
def unread_watch(address: str) -> Iterator[None]:
    """Watch the health of a server, until the block ends; return once it has the request."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as line:
        fields = b"".join(_literal(name, value) for name, value in _FIELDS.items())
        line.sendall(
            _PREFACE
            + _frame(_SETTINGS, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0))
            + _frame(_HEADERS, _END_HEADERS, fields, stream=1)
            + _frame(_DATA, _END_STREAM, bytes(5), stream=1)  # an empty message
        )
        # The answer's headers come without a window: then its first message is being written.
        while not _has_headers(line.recv(1 << 16)):
            pass
        yield


def _has_headers(received: bytes) -> bool:
    """Whether frames, which come whole on loopback, have an answer's headers among them."""
    assert received, "the server has closed the connection"
    start = 0
    while start < len(received):
        if received[start + 3] == _HEADERS:
            return True
        start += 9 + int.from_bytes(received[start : start + 3], "big")
    return False


def _frame(kind: int, flags: int, payload: bytes, *, stream: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """Write a header field without compression."""
    return b"\0" + b"".join(bytes([len(it)]) + it.encode() for it in (name, value))
