"""Clients that let nothing be sent to them: their HTTP/2 window is 0 bytes."""

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
_WATCH = "/grpc.health.v1.Health/Watch"
_FIELDS = {
    ":method": "POST",
    ":scheme": "http",
    ":authority": "localhost",
    "content-type": "application/grpc",
    "te": "trailers",
}


@contextmanager
def unread_watch(address: str) -> Iterator[None]:
    """Watch the health of a server, until the block ends; return once it has the request."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as line:
        line.sendall(_BEGIN + _call(_WATCH, stream=1))
        # The answer's headers come without a window: then its first message is being written.
        while not _has_headers(line.recv(1 << 16)):
            pass
        yield


@contextmanager
def unread_calls(address: str, path: str, *, count: int, source: str) -> Iterator[None]:
    """Make so many calls with empty messages, until the block ends.

    Args:
        address: The server's.
        path: The method's.
        count: How many.
        source: The address that the client has.
    """
    host, _, port = address.rpartition(":")
    where = (host, int(port))
    with socket.create_connection(where, timeout=60, source_address=(source, 0)) as line:
        calls = (_call(path, stream=2 * number + 1) for number in range(count))
        line.sendall(_BEGIN + b"".join(calls))
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


def _call(path: str, *, stream: int) -> bytes:
    """Write a call with an empty message."""
    fields = {**_FIELDS, ":path": path}
    # Names with a colon come first.
    lines = b"".join(_literal(name, fields[name]) for name in sorted(fields))
    return _frame(_HEADERS, _END_HEADERS, lines, stream=stream) + _frame(
        _DATA, _END_STREAM, bytes(5), stream=stream
    )


def _frame(kind: int, flags: int, payload: bytes, *, stream: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """Write a header field without compression."""
    return b"\0" + b"".join(bytes([len(it)]) + it.encode() for it in (name, value))


_BEGIN = _PREFACE + _frame(_SETTINGS, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0))
