"""A relay in front of a scripted server: a case says how its connections are at first."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress

from support.connection_relay import ConnectionRelay

# HTTP/2: kinds of frames, an answer's flag, and two errors.
_HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 1, 3, 4, 6, 7
_ACK = 1
_NO_ERROR, _REFUSED_STREAM = 0, 7
_PREFACE_BYTES = 24


class Relay(ConnectionRelay):
    """A relay that refuses at first.

    Args:
        delay_seconds: How long each byte is under way, as on a long line: half a round trip.
        silent_connections: So many connections are accepted first, and never answered.
        refused_streams: So many streams are refused first (REFUSED_STREAM), as by a server that has
            too many; then the connection says goodbye, and the next one leads on.
    """

    def __init__(
        self,
        *,
        delay_seconds: float = 0.0,
        silent_connections: int = 0,
        refused_streams: int = 0,
    ) -> None:
        super().__init__("")
        self.delay(round_trip_seconds=2 * delay_seconds)
        self._silent_left = silent_connections
        self._refusals_left = refused_streams

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Refuse, or lead to the server."""
        if self._silent_left > 0:
            self._silent_left -= 1
            await asyncio.Event().wait()
        elif self._refusals_left > 0:
            await self._refuse(reader, writer)
        else:
            await super().meet(reader, writer)

    async def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Speak as much HTTP/2 as it takes to refuse every stream."""
        with suppress(OSError, EOFError):
            await reader.readexactly(_PREFACE_BYTES)
            writer.write(_frame(_SETTINGS))
            stream = 0
            while self._refusals_left > 0:
                kind, flags, stream, content = await _read_frame(reader)
                if kind == _SETTINGS and not flags & _ACK:
                    writer.write(_frame(_SETTINGS, flags=_ACK))
                elif kind == _PING and not flags & _ACK:
                    writer.write(_frame(_PING, content, flags=_ACK))
                elif kind == _HEADERS:
                    self._refusals_left -= 1
                    refusal = struct.pack(">I", _REFUSED_STREAM)
                    writer.write(_frame(_RST_STREAM, refusal, stream=stream))
            writer.write(_frame(_GOAWAY, struct.pack(">II", stream, _NO_ERROR)))
            await writer.drain()


def _frame(kind: int, content: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + content


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, int, int, bytes]:
    """Return a frame's kind, flags, stream and content."""
    head = await reader.readexactly(9)
    kind, flags, stream = struct.unpack(">BBI", head[3:])
    return kind, flags, stream, await reader.readexactly(int.from_bytes(head[:3], "big"))
