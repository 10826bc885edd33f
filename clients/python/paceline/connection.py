"""A client's connection to its orchestrator; it can be replaced while calls run on the old one.

An orchestrator that shuts down lets running calls finish and refuses new calls. Its clients then
connect again, to the orchestrator that its name now leads to. gRPC does this by itself only when
the old connection ends.
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
    """One channel, with the number of calls that run on it.

    Args:
        is_outdated: Whether a new channel would have other credentials.

    Attributes:
        stub: Makes calls on the channel.
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
        """Return why a call ended, and note whether the next call needs another connection.

        It does after DRAINING, and after a lost connection if certificates were renewed.
        """
        error = decode(broken)
        self.is_left |= isinstance(error, DrainingError)
        if isinstance(error, ConnectionLostError):
            self.is_left |= self._is_outdated()
        return error

    @property
    def is_idle(self) -> bool:
        """Whether the channel has no calls and will get none."""
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
    """An object that any thread can close; closing wakes the waits of its users."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._waking = threading.Lock()  # guards _wakes
        self._wakes: set[Callable[[], object]] = set()

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Have a function called at the closing, in the closing thread.

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
        """Raise our own error for a closed client, in place of gRPC's various ones.

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
        """Lend the wire for a call; the wire stays open meanwhile.

        Raises:
            ClientCancelledError: `close` was called.
        """
        with self._lock:
            self.check_open()
            wire = self._current()
            wire.call_count += 1
        try:
            yield wire
        except ValueError:  # gRPC's error after another thread closed the channel
            self.check_open()
            raise
        finally:
            with self._lock:
                wire.call_count -= 1
                self._drop_if_idle(wire)

    def close(self) -> None:
        """Close all channels, and cancel their calls."""
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
    """The connection of an asyncio client: one channel for each event loop that uses it.

    gRPC binds a channel to the loop that runs when the channel is opened. A client may be made
    before a loop runs, and may outlive it.
    """

    def __init__(self, route: Route) -> None:
        super().__init__()
        self._route = route
        self._wires: WeakKeyDictionary[asyncio.AbstractEventLoop, list[AsyncWire]]
        self._wires = WeakKeyDictionary()

    @asynccontextmanager
    async def wire(self) -> AsyncIterator[AsyncWire]:
        """Lend this loop's wire for a call; the wire stays open meanwhile.

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
        """Open another channel to the same address; it belongs to the caller."""
        return self._route.open_async()

    def _open_wire(self) -> AsyncWire:
        is_outdated = self._route.renewal()
        channel = self._route.open_async()
        stub = orchestrator_grpc.OrchestratorServiceStub(channel)
        return Wire(channel, stub, is_outdated=is_outdated)

    async def close(self) -> None:
        """Close all channels, and cancel their calls."""
        self._shut()
        for loop, wires in self._wires.items():
            for wire in wires:
                if loop is asyncio.get_running_loop():
                    await wire.channel.close(grace=None)
                elif not loop.is_closed():
                    asyncio.run_coroutine_threadsafe(wire.channel.close(grace=None), loop)
            wires.clear()
