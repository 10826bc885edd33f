"""Accepts connections without gRPC: as many as there are descriptors for.

    below the limit              the new connection is accepted
    at the limit                 it is accepted, and the longest silent connection is closed
    at the limit, none silent    it gets one of a few places in reserve, for probes only
    the reserve is used up       the longest silent connection is closed; without one, the new one

So silent connections keep no client out: a client that connects and asks at once is younger than
all of them. asyncio's own accept loop has no limit. When descriptors run out, it logs a traceback
for each place of its backlog, and then accepts nothing for a second.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)

# Accepted between two turns of the loop, so that a flood does not delay running requests.
_ACCEPTS_A_TURN = 64
_REPORT_SECONDS = 60.0
# Without a spare descriptor, another part of the process has to close one.
_PAUSE_SECONDS = 0.1
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NO_CONNECTION = (BlockingIOError, InterruptedError, ConnectionAbortedError)


class Place:
    """One connection's place at a listener.

    Args:
        listener: The listener.
        is_spare: Whether it is a place in reserve, for a probe only.

    Attributes:
        transport: The connection, after it is set up.
        task: Sets the connection up: a TLS handshake takes as long as the client wants.
    """

    def __init__(self, listener: Listener, *, is_spare: bool) -> None:
        self._listener = listener
        self.is_spare = is_spare
        self.transport: asyncio.BaseTransport | None = None
        self.task: asyncio.Task[None] | None = None

    def speaks(self) -> None:
        """Note that the connection has a request, which is being answered."""
        self._listener.silent.pop(self, None)

    def falls_silent(self) -> None:
        """Note that the connection has no request; it is the youngest silent one."""
        self._listener.note_silent(self)

    def leave(self) -> None:
        """Free the place. A second call does nothing."""
        self._listener.forget(self)

    def abort(self) -> None:
        """Close the connection at once, without an answer."""
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()


class Listener:
    """Accepts connections until it is closed.

    Args:
        listening: The socket, which listens already; closed with the listener.
        new_protocol: Makes the protocol of a connection. The protocol tells its place when the
            connection speaks, falls silent and leaves; until then the connection is silent.
        limit: Most connections; fewer while descriptors run out below the limit.
        reserve: Most connections above the limit while none is silent. As many descriptors are
            kept for them, so that a process without any other descriptor still answers.
        tls: The TLS context; None: plaintext.
        handshake_seconds: Most seconds of a TLS handshake.

    Attributes:
        places: Connections that are open.
        silent: The open connections without a request; the longest silent one comes first.

    Concurrency:
        Made and used on one event loop.
    """

    def __init__(
        self,
        listening: socket.socket,
        new_protocol: Callable[[Place], asyncio.BaseProtocol],
        *,
        limit: int,
        reserve: int,
        tls: ssl.SSLContext | None = None,
        handshake_seconds: float = 10.0,
    ) -> None:
        self._socket = listening
        self._new_protocol = new_protocol
        self._limit = self._most = limit
        self._reserve = reserve
        self._tls = tls
        self._handshake_seconds = handshake_seconds
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._untold = 0
        self._report: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self.places: set[Place] = set()
        self.silent: dict[Place, None] = {}
        listening.setblocking(False)
        self._resume()
        self._spares = _SpareDescriptors(reserve)

    @property
    def _spare_count(self) -> int:
        return sum(place.is_spare for place in self.places)

    def close(self) -> None:
        """Stop listening; open connections stay open."""
        if self._is_closed:
            return
        self._is_closed = True
        for timer in (self._pause, self._report):
            if timer is not None:
                timer.cancel()
        for place in tuple(self.places):
            if place.task is not None:
                place.abort()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._spares.close()
        self._tell()

    async def wait_closed(self) -> None:
        """Return at once: uvicorn awaits this method of asyncio's servers."""

    def forget(self, place: Place) -> None:
        """Remove a connection, and keep its descriptor if it was a spare one."""
        self.silent.pop(place, None)
        if place in self.places:
            self.places.discard(place)
            self._loop.call_soon(
                self._spares.refill
            )  # the connection's descriptor is closed by then

    def note_silent(self, place: Place) -> None:
        """Add a connection to the silent ones, and close one if there are too many."""
        if place in self.places:
            self.silent.setdefault(place)
            while len(self.places) > self._limit and self._evicts_one(is_spare=False):
                pass

    @contextmanager
    def lent_descriptor(self) -> Iterator[None]:
        """Release a spare descriptor for files that are opened and closed inside the block."""
        self._spares.spend()
        try:
            yield
        finally:
            self._spares.refill()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket, self._accept)

    def _resume_without_descriptors(self) -> None:
        self._spares.refill()
        self._resume()

    def _accept(self) -> None:
        """Accept the waiting connections; called whenever there is one."""
        for _ in range(_ACCEPTS_A_TURN):
            try:
                connection, _peer = self._socket.accept()
            except _NO_CONNECTION:
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
                connection_or_none = self._accept_without_descriptor()
                if connection_or_none is None:
                    return
                connection = connection_or_none
                is_spare = True
            else:
                if len(self.places) >= self._limit:
                    self._evicts_one(is_spare=False)
                is_spare = len(self.places) >= self._limit
            connection.setblocking(False)
            if (
                is_spare
                and self._spare_count >= self._reserve
                and not self._evicts_one(is_spare=True)
            ):
                connection.close()
                self._refused()
            else:
                self._take(connection, is_spare=is_spare)

    def _evicts_one(self, *, is_spare: bool) -> bool:
        """Close the longest silent connection of this kind; return whether there was one."""
        oldest = next((place for place in self.silent if place.is_spare == is_spare), None)
        if oldest is None:
            return False
        oldest.abort()
        self.forget(oldest)
        self._refused()
        return True

    def _accept_without_descriptor(self) -> socket.socket | None:
        """Accept in place of a silent connection, whose descriptor is free in the next loop turn.

        Otherwise use a spare descriptor; without one, accept nothing for a moment. Other parts of
        the process have more descriptors than expected, so there is room for fewer connections.
        """
        if not self._waits_anyone():
            return None
        self._limit = max(1, min(self._limit, len(self.places) - self._reserve))
        if self._evicts_one(is_spare=False):
            return None
        try:
            if self._spares.spend():
                return self._socket.accept()[0]
        except OSError:
            self._spares.refill()
        if self._evicts_one(is_spare=True):
            return None
        self._refused()
        self._loop.remove_reader(self._socket)
        self._pause = self._loop.call_later(_PAUSE_SECONDS, self._resume_without_descriptors)
        return None

    def _waits_anyone(self) -> bool:
        """Whether a connection waits: accept fails without a descriptor before it looks."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(0))

    def _take(self, connection: socket.socket, *, is_spare: bool) -> None:
        place = Place(self, is_spare=is_spare)
        self.places.add(place)
        self.silent[place] = None
        task = self._loop.create_task(self._connect(connection, place), name="connect")
        place.task = task

        def close_if_unmade(_task: asyncio.Task[None]) -> None:
            """Close the socket of a task that was cancelled before it began."""
            if place.transport is None:
                connection.close()

        task.add_done_callback(close_if_unmade)

    async def _connect(self, connection: socket.socket, place: Place) -> None:
        try:
            place.transport, _ = await self._loop.connect_accepted_socket(
                lambda: self._new_protocol(place),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_seconds if self._tls else None,
            )
        except OSError as error:  # also TLS errors, and the handshake's timeout
            _log.debug("a connection was not set up: %s", error)
            place.leave()
        except BaseException:
            place.leave()
            raise
        finally:
            place.task = None

    def _refused(self) -> None:
        """Count a connection that was closed at the limit; log at once, then once a minute."""
        self._untold += 1
        if self._report is None:
            self._tell()
            self._report = self._loop.call_later(_REPORT_SECONDS, self._tell_again)

    def _tell_again(self) -> None:
        """Log the refusals since the last time; after a minute without any, raise the limit."""
        self._report = None
        if not self._untold:
            self._limit = self._most
        else:
            self._tell()
            self._report = self._loop.call_later(_REPORT_SECONDS, self._tell_again)

    def _tell(self) -> None:
        if self._untold:
            _log.warning(
                "the limit of connections is reached: %d were closed, %d are open",
                self._untold,
                len(self.places),
            )
        self._untold = 0


class _SpareDescriptors:
    """Descriptors in reserve, for the time when the process has no others."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: list[int] = []
        self.refill()

    def spend(self) -> bool:
        """Release a descriptor, if one is held."""
        if self._held:
            os.close(self._held.pop())
            return True
        return False

    def refill(self) -> None:
        """Take descriptors until the reserve is full, or none is left."""
        with suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Release all descriptors."""
        self._count = 0
        while self.spend():
            pass
