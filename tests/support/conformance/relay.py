"""A TCP relay in front of a server: connections that are cut, slow, or lead nowhere."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from support.ports import free_address

if TYPE_CHECKING:
    from collections.abc import Coroutine

# HTTP/2: kinds of frames, an answer's flag, and two errors.
_HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 1, 3, 4, 6, 7
_ACK = 1
_NO_ERROR, _REFUSED_STREAM = 0, 7
_PREFACE_BYTES = 24

_Line: TypeAlias = "asyncio.Queue[tuple[float, bytes]]"  # when it is due, and what


class Relay:
    """Passes bytes on both ways, until it is told to cut.

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
        self.address = ""
        self._delay_seconds = delay_seconds
        self._silent_left = silent_connections
        self._refusals_left = refused_streams
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    async def start(self, address: str) -> None:
        """Listen on a free port for connections to this address."""
        self.lead_to(address)
        self.address = free_address()
        host, port = self.address.split(":")
        self._server = await asyncio.start_server(self._connect, host, int(port))

    def lead_to(self, address: str) -> None:
        """Pass new connections on to this address; those that there are stay."""
        self._port = int(address.rpartition(":")[2])

    def cut(self) -> None:
        """Reset every connection; new ones are let through."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        if self._silent_left > 0:
            self._silent_left -= 1
            return
        if self._refusals_left > 0:
            self._run(self._refuse(reader, writer), name="relay refuses")
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.add(far_writer)
        self._relay(reader, far_writer, name="up")
        self._relay(far_reader, writer, name="down")

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
        writer.close()

    def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, name: str
    ) -> None:
        line: _Line = asyncio.Queue()
        self._run(self._take_in(reader, line), name=f"relay {name}, reading")
        self._run(_let_out(line, writer), name=f"relay {name}, writing")

    def _run(self, work: Coroutine[None, None, None], *, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take_in(self, reader: asyncio.StreamReader, line: _Line) -> None:
        data = b"-"
        while data:
            data = b""
            with suppress(OSError):
                data = await reader.read(65536)
            line.put_nowait((asyncio.get_running_loop().time() + self._delay_seconds, data))


async def _let_out(line: _Line, writer: asyncio.StreamWriter) -> None:
    """Write what is due; an empty one ends the connection."""
    with suppress(OSError):
        while (due := await line.get())[1]:
            await asyncio.sleep(due[0] - asyncio.get_running_loop().time())
            writer.write(due[1])
            await writer.drain()
    writer.transport.abort()


def _frame(kind: int, content: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + content


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, int, int, bytes]:
    """Return a frame's kind, flags, stream and content."""
    head = await reader.readexactly(9)
    kind, flags, stream = struct.unpack(">BBI", head[3:])
    return kind, flags, stream, await reader.readexactly(int.from_bytes(head[:3], "big"))
