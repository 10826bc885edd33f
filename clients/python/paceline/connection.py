"""A client's way to its orchestrator, which can be taken anew while calls run on the old one.

An orchestrator that shuts down lets running calls finish and refuses new ones. Its clients leave it
for the one that its name leads to then; gRPC does so by itself only if the old connection ends.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakKeyDictionary

import grpc
from google.protobuf.message import DecodeError

from paceline.errors import ClientCancelledError, ConnectionLostError, DrainingError
from paceline.status import decode
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb
from paceline.v1 import orchestrator_service_pb2_grpc as orchestrator_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from paceline.channel import Route
    from paceline.errors import PacelineError

_Channel = TypeVar("_Channel")
_Stub = TypeVar("_Stub")


class Wire(Generic[_Channel, _Stub]):
    """One channel, and how many calls run on it.

    Args:
        is_outdated: Whether a new channel would have other credentials.

    Attributes:
        stub: What makes calls on it.
    """

    def __init__(
        self, channel: _Channel, stub: _Stub, *, is_outdated: Callable[[], bool] = lambda: False
    ) -> None:
        self.channel = channel
        self.stub = stub
        self._is_outdated = is_outdated
        self.call_count = 0
        self.is_left = False

    def decoded(self, broken: grpc.RpcError) -> PacelineError:
        """Say why a call on it ended, and whether the next call has to connect anew.

        It has to after DRAINING, and where the connection is lost and certificates were renewed.
        """
        error = decode(broken)
        self.is_left |= isinstance(error, DrainingError)
        if isinstance(error, ConnectionLostError):
            self.is_left |= self._is_outdated()
        return error

    @property
    def is_idle(self) -> bool:
        """Whether nothing will come over it any more."""
        return self.is_left and not self.call_count


_GENERATE = "/paceline.v1.OrchestratorService/Generate"


def _parse(content: bytes) -> orchestrator_pb.GenerateResponse | DecodeError:
    try:
        return orchestrator_pb.GenerateResponse.FromString(content)
    except DecodeError as error:
        return error


BlockingWire = Wire[grpc.Channel, orchestrator_grpc.OrchestratorServiceStub]
AsyncWire = Wire["grpc.aio.Channel", "orchestrator_grpc.OrchestratorServiceAsyncStub"]


class _Closable:
    """What is closed once, by any thread; who waits for something else meanwhile can be woken."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._waking = threading.Lock()  # guards what follows
        self._wakes: set[Callable[[], object]] = set()

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Have this called when it is closed, in the thread that closes it.

        Raises:
            ClientCancelledError: `close` was called before.
        """
        with self._waking:
            self._wakes.add(wake)
        try:
            self.check_open()
            yield
        finally:
            with self._waking:
                self._wakes.discard(wake)

    def _shut(self) -> None:
        self._closed.set()
        with self._waking:
            wakes = tuple(self._wakes)
        for wake in wakes:
            wake()

    def check_open(self) -> None:
        """Say it in our own words: gRPC has errors of its own for a closed channel.

        Raises:
            ClientCancelledError: `close` was called.
        """
        if self._closed.is_set():
            raise ClientCancelledError("the client was closed")


class Connection(_Closable):
    """The connection of a blocking client. Any thread may use it."""

    def __init__(self, route: Route) -> None:
        super().__init__()
        self._route = route
        self._lock = threading.Lock()
        self._wires: list[BlockingWire] = []  # the last one is for new calls, if it was not left

    @contextmanager
    def wire(self) -> Iterator[BlockingWire]:
        """Lend the wire for new calls; it stays open for so long.

        Raises:
            ClientCancelledError: `close` was called.
        """
        with self._lock:
            self.check_open()
            wire = self._current()
            wire.call_count += 1
        try:
            yield wire
        except ValueError:  # what gRPC raises where another thread has closed the channel
            self.check_open()
            raise
        finally:
            with self._lock:
                wire.call_count -= 1
                self._drop_if_idle(wire)

    def close(self) -> None:
        """Close all, and cancel what runs."""
        with self._lock:
            self._shut()
            wires, self._wires = self._wires, []
        for wire in wires:
            wire.channel.close()

    def _current(self) -> BlockingWire:
        if not self._wires or self._wires[-1].is_left:
            is_outdated = self._route.renewal()
            channel = self._route.open()
            stub = orchestrator_grpc.OrchestratorServiceStub(channel)
            # gRPC's own parsing would end the call here and leave it running at the server.
            stub.Generate = channel.unary_stream(
                _GENERATE,
                request_serializer=orchestrator_pb.GenerateRequest.SerializeToString,
                response_deserializer=_parse,
            )
            self._wires.append(Wire(channel, stub, is_outdated=is_outdated))
        return self._wires[-1]

    def _drop_if_idle(self, wire: BlockingWire) -> None:
        if wire.is_idle and wire in self._wires:
            self._wires.remove(wire)
            wire.channel.close()


class AsyncConnection(_Closable):
    """The connection of an asyncio client: one for each event loop that it is used on.

    gRPC binds a channel to the loop that runs when it is opened, and a client may be made before
    any does, or outlive it.
    """

    def __init__(self, route: Route) -> None:
        super().__init__()
        self._route = route
        self._wires: WeakKeyDictionary[asyncio.AbstractEventLoop, list[AsyncWire]]
        self._wires = WeakKeyDictionary()

    @asynccontextmanager
    async def wire(self) -> AsyncIterator[AsyncWire]:
        """Lend the wire for new calls of this loop; it stays open for so long.

        Raises:
            ClientCancelledError: `close` was called.
        """
        self.check_open()
        wires = self._wires.setdefault(asyncio.get_running_loop(), [])
        if not wires or wires[-1].is_left:
            wires.append(self._open_wire())
        wire = wires[-1]
        wire.call_count += 1
        try:
            yield wire
        finally:
            wire.call_count -= 1
            if wire.is_idle and wire in wires:
                wires.remove(wire)
                await wire.channel.close(grace=None)

    def open_channel(self) -> grpc.aio.Channel:
        """Open one more channel over the same route, which is the caller's own."""
        return self._route.open_async()

    def _open_wire(self) -> AsyncWire:
        is_outdated = self._route.renewal()
        channel = self._route.open_async()
        stub = orchestrator_grpc.OrchestratorServiceStub(channel)
        return Wire(channel, stub, is_outdated=is_outdated)

    async def close(self) -> None:
        """Close all, and cancel what runs."""
        self._shut()
        for loop, wires in self._wires.items():
            for wire in wires:
                if loop is asyncio.get_running_loop():
                    await wire.channel.close(grace=None)
                elif not loop.is_closed():
                    asyncio.run_coroutine_threadsafe(wire.channel.close(grace=None), loop)
            wires.clear()
