"""A TCP relay, to treat connections as bad networks do: slow, silent, one-sided, cut, reset."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from support.ports import free_address

if TYPE_CHECKING:
    from collections.abc import Callable

Direction: TypeAlias = Literal["up", "down"]
"""Up to the server, down to the client."""

_CHUNK_BYTES = 1 << 16
# The most that is on its way at once; more pushes back, as a network does.
_CHUNKS_ON_THE_WAY = 64
# SO_LINGER for no time: closing sends RST instead of FIN.
_NO_LINGER = struct.pack("ii", 1, 0)


class ConnectionRelay:
    """Passes bytes on both ways; use it as an asynchronous context manager.

    Concurrency: faults may be begun and lifted from any thread.

    Args:
        upstream: The server's `host:port`.

    Attributes:
        address: Where the relay listens.
        hits: How often a fault met something: a connection, or bytes on their way.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.address = ""
        self.hits = 0
        self._delay_seconds = 0.0
        self._ways: set[_Way] = set()
        self._accepted: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._flowing = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._answering = asyncio.Event()
        self._pass_everything_on()
        self.address = free_address()
        host, port = self.address.split(":")
        self._server = await asyncio.start_server(self._accept, host, int(port))
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        for task in self._accepted:
            task.cancel()
        await asyncio.gather(*self._accepted, return_exceptions=True)

    @property
    def connection_count(self) -> int:
        return len(self._accepted)

    def delay(self, *, round_trip_seconds: float) -> None:
        """Let all bytes arrive late, by half of it in each direction.

        The kernel shakes hands with the relay at once; all that follows is late.
        """
        self._delay_seconds = round_trip_seconds / 2

    def stall(self, *directions: Direction) -> None:
        """Pass nothing on in one direction (half open) or both; connections stay open."""
        for direction in directions or ("up", "down"):
            self._soon(self._flowing[direction].clear)

    def black_hole(self) -> None:
        """Accept connections and say nothing; those that are open stall."""
        self._soon(self._answering.clear)
        self.stall()

    def cut(self, direction: Direction = "down") -> None:
        """Close each connection after the half of what comes next: in the middle of a message."""
        self._soon(lambda: self._tell_each(_Way.cut, direction))

    def end(self) -> None:
        """Close each connection; new ones are let through."""
        self._soon(lambda: self._tell_each(_Way.close, "up", "down"))

    def reset(self) -> None:
        """Reset each connection (RST); new ones are let through."""
        self._soon(lambda: self._tell_each(_Way.reset, "up", "down"))

    def heal(self) -> None:
        """Pass everything on again, what waited first; what was cut stays cut."""
        self._delay_seconds = 0.0
        self._soon(self._pass_everything_on)

    def _soon(self, change: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(change)

    def _pass_everything_on(self) -> None:
        for event in (*self._flowing.values(), self._answering):
            event.set()

    def _tell_each(self, change: Callable[[_Way], None], *directions: Direction) -> None:
        for way in tuple(self._ways):
            if way.direction in directions:
                change(way)

    async def _wait_for(self, event: asyncio.Event) -> None:
        if not event.is_set():
            self.hits += 1
            await event.wait()

    async def wait_to_flow(self, direction: Direction) -> None:
        """Return once bytes may go that way."""
        await self._wait_for(self._flowing[direction])

    def due(self) -> float:
        """Return when bytes that come now are to arrive."""
        self.hits += self._delay_seconds > 0
        return self._loop.time() + self._delay_seconds

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._accepted.add(task)
        try:
            await self._wait_for(self._answering)
            with suppress(OSError):  # where no server is, the connection ends
                await self.meet(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()  # its own end is the relay's, which is over
        finally:
            self._accepted.discard(task)
            writer.close()

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect to the server, and pass on until the connection is over."""
        host, _, port = self.upstream.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await self._carry(
            _Way(self, "up", reader, far_writer), _Way(self, "down", far_reader, writer)
        )

    async def _carry(self, *ways: _Way) -> None:
        """Pass on until one side has closed and the other one heard it."""
        self._ways.update(ways)
        tasks = [asyncio.create_task(way.run(), name=f"relay {way.direction}") for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ways.difference_update(ways)
            for task, way in zip(tasks, ways, strict=True):
                task.cancel()
                way.close()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Way:
    """One direction of a connection."""

    def __init__(
        self,
        relay: ConnectionRelay,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.direction = direction
        self._relay = relay
        self._reader = reader
        self._writer = writer
        self._on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_ON_THE_WAY)
        self._is_cut = False

    async def run(self) -> None:
        """Pass on until there is no more, or until it is cut."""
        collecting = asyncio.create_task(self._collect(), name=f"relay collects {self.direction}")
        try:
            with suppress(OSError):
                await self._deliver()
        finally:
            collecting.cancel()

    def cut(self) -> None:
        self._is_cut = True

    def reset(self) -> None:
        if not self._writer.transport.is_closing():
            sock = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._writer.transport.abort()
            self._relay.hits += 1

    def close(self) -> None:
        self._writer.close()

    async def _collect(self) -> None:
        data = b"begun"
        while data:
            try:
                data = await self._reader.read(_CHUNK_BYTES)
            except OSError:
                data = b""
            await self._on_the_way.put((self._relay.due(), data))

    async def _deliver(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await self._on_the_way.get()
            await asyncio.sleep(due - loop.time())
            await self._relay.wait_to_flow(self.direction)
            if self._is_cut:
                data = data[: len(data) // 2]
                self._relay.hits += 1
            self._writer.write(data)
            await self._writer.drain()
            if self._is_cut or not data:
                return
