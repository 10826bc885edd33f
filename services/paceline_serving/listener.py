"""Accepting connections, where not gRPC does it: as many as there are descriptors for.

    below the limit              a connection is taken
    at the limit                 it is taken, and the one that is silent for longest is closed
    at the limit, none silent    it is one of a few in reserve, which only probes are answered on
    the reserve is used up       the same: the silent one is closed, or, where none is, the new one

So connections that say nothing keep nobody out: whoever connects and asks at once is younger than
all of them. asyncio's own accept loop knows no limit. When descriptors run out it logs a traceback
for each place of its backlog, and then stands still for a second, in which nobody is let in.
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

# Between two turns of the loop, so that a flood does not hold up what is served.
_ACCEPTS_A_TURN = 64
_REPORT_SECONDS = 60.0
# Where not even a spare descriptor is left, somebody else has to close one.
_PAUSE_SECONDS = 0.1
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NO_CONNECTION = (BlockingIOError, InterruptedError, ConnectionAbortedError)


class Place:
    """One connection's place among those of a listener.

    Args:
        listener: Whose it is.
        is_spare: Whether there was no room for it, only for a probe.

    Attributes:
        transport: The connection, once it is made.
        task: What makes it: a TLS handshake takes as long as the client wants.
    """

    def __init__(self, listener: Listener, *, is_spare: bool) -> None:
        self._listener = listener
        self.is_spare = is_spare
        self.transport: asyncio.BaseTransport | None = None
        self.task: asyncio.Task[None] | None = None

    def speaks(self) -> None:
        """Note that it has asked for something, which is being answered."""
        self._listener.silent.pop(self, None)

    def falls_silent(self) -> None:
        """Note that nothing is asked for from now on; it is the youngest of those."""
        self._listener.note_silent(self)

    def leave(self) -> None:
        """Give the place to another one. Harmless if it is given already."""
        self._listener.forget(self)

    def abort(self) -> None:
        """Close the connection without a word."""
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()


class Listener:
    """Accepts connections until it is closed.

    Args:
        listening: The socket, which listens already; closed with the listener.
        new_protocol: Makes what serves a connection. It says when the connection speaks, falls
            silent and leaves; one that says nothing is silent.
        limit: How many connections are taken; fewer while descriptors run out all the same.
        reserve: How many more, where none is silent; and how many descriptors are kept for those,
            so that a process that has none left still answers.
        tls: How connections are secured; None is plaintext.
        handshake_seconds: How long that may take.

    Attributes:
        places: Connections that are open.
        silent: Those of them that ask for nothing; the one that has been so for longest first.

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
        """Stop listening; connections that were made stay open."""
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
        """Return at once: what asyncio's servers have, and uvicorn waits for."""

    def forget(self, place: Place) -> None:
        """Count a connection out, and keep its descriptor if it was a spare one."""
        self.silent.pop(place, None)
        if place in self.places:
            self.places.discard(place)
            self._loop.call_soon(self._spares.refill)  # its own is closed by then

    def note_silent(self, place: Place) -> None:
        """Count a connection among the silent ones, of which there may be too many."""
        if place in self.places:
            self.silent.setdefault(place)
            while len(self.places) > self._limit and self._evicts_one(is_spare=False):
                pass

    @contextmanager
    def lent_descriptor(self) -> Iterator[None]:
        """Give up a spare descriptor for what is opened and closed in here."""
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
        """Take those who wait; called whenever there is one."""
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
        """Close the connection of this kind that is silent for longest, if one is."""
        oldest = next((place for place in self.silent if place.is_spare == is_spare), None)
        if oldest is None:
            return False
        oldest.abort()
        self.forget(oldest)
        self._refused()
        return True

    def _accept_without_descriptor(self) -> socket.socket | None:
        """Accept in place of a silent connection, which frees its own in the loop's next turn.

        Or with a spare descriptor; without even one, nobody is let in for a moment. Somebody has
        more descriptors than was thought, so there is room for fewer connections.
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
        """Whether somebody is there: Linux looks for a descriptor first, and fails without one."""
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
            """Close what nobody does: a task that is cancelled at once never begins."""
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
        except OSError as error:  # of which TLS's are, and its timeout
            _log.debug("a connection was not set up: %s", error)
            place.leave()
        except BaseException:
            place.leave()
            raise
        finally:
            place.task = None

    def _refused(self) -> None:
        """Count a connection that was closed for want of room; say so, and then once a minute."""
        self._untold += 1
        if self._report is None:
            self._tell()
            self._report = self._loop.call_later(_REPORT_SECONDS, self._tell_again)

    def _tell_again(self) -> None:
        """Say what was refused meanwhile; after a minute without that there may be room again."""
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
    """Descriptors that are held so that there are some when there are none."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: list[int] = []
        self.refill()

    def spend(self) -> bool:
        """Let go of one, if one is held."""
        if self._held:
            os.close(self._held.pop())
            return True
        return False

    def refill(self) -> None:
        """Hold as many as there should be, or as there are."""
        with suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Hold none any more."""
        self._count = 0
        while self.spend():
            pass
