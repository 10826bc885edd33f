"""A TCP relay in front of a server, to cut connections as a broken network does."""

from __future__ import annotations

import asyncio
from contextlib import suppress

__all__ = ["Relay"]


class Relay:
    """Passes bytes on both ways, until it is told to cut."""

    def __init__(self) -> None:
        self.address = ""
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    async def start(self, address: str) -> None:
        """Listen on a free port for connections to this address."""
        self._port = int(address.rpartition(":")[2])
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

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
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, far_writer}
        for name, source, sink in (("up", reader, far_writer), ("down", far_reader, writer)):
            task = asyncio.create_task(_pass_on(source, sink), name=f"relay {name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
