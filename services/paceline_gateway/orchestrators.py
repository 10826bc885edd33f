"""The orchestrators that requests are spread over, and what is known of each."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from paceline import AsyncClient
from paceline.channel import open_async_channel
from paceline.errors import NoTargetError, TryAgainError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
    from typing import TypeVar

    from paceline import ChatTemplate, SystemInfo, Tls

    _T = TypeVar("_T")

__all__ = ["Orchestrator", "Orchestrators"]

_log = logging.getLogger(__name__)

_ASK_SECONDS = 10.0
_RECONNECT_SECONDS = 0.2
# How old an answer about the model may be: a rollout takes longer than that.
_FRESH_SECONDS = 2.0


class Orchestrator:
    """One of them.

    Attributes:
        address: Where it is.
        client: Its client.
        serves: Whether it said so last.
        running_count: Generations of this gateway that run there.
    """

    def __init__(self, address: str, *, tls: Tls | None, insecure: bool) -> None:
        self.address = address
        self.client = AsyncClient(address, tls=tls, insecure=insecure)
        self.serves = False
        self.running_count = 0
        self._tls = tls
        self._insecure = insecure

    @contextmanager
    def counted(self) -> Iterator[AsyncClient]:
        """Lend its client for a generation."""
        self.running_count += 1
        try:
            yield self.client
        finally:
            self.running_count -= 1

    async def watch(self, changed: Callable[[], None]) -> None:
        """Follow what it says of itself, for ever."""
        while True:
            try:
                async with open_async_channel(
                    self.address, tls=self._tls, insecure=self._insecure
                ) as channel:
                    health = HealthStub(channel)
                    stream = health.Watch(HealthCheckRequest(), wait_for_ready=True)
                    async for state in stream:
                        self._set(state.status == HealthCheckResponse.SERVING, changed)
            except grpc.RpcError:
                pass
            self._set(False, changed)
            await asyncio.sleep(_RECONNECT_SECONDS)

    def _set(self, serves: bool, changed: Callable[[], None]) -> None:
        if serves != self.serves:
            self.serves = serves
            _log.info(
                "an orchestrator %s",
                "serves" if serves else "does not serve",
                extra={"orchestrator": self.address},
            )
            changed()


class Orchestrators:
    """All of them. Use it as an asynchronous context manager.

    Args:
        addresses: Where they are.
        tls: How to trust them; None is plaintext.
        insecure: Allow plaintext to other machines.

    Raises:
        InvalidFieldError: An address is malformed, or a TLS file unusable.
    """

    def __init__(self, addresses: Sequence[str], *, tls: Tls | None, insecure: bool) -> None:
        self._all = [Orchestrator(each, tls=tls, insecure=insecure) for each in addresses]
        self._turn = 0
        self._watches: list[asyncio.Task[None]] = []
        self._tasks = asyncio.TaskGroup()
        self._serving = asyncio.Event()
        self._info: tuple[float, SystemInfo] | None = None
        self._template: tuple[float, ChatTemplate] | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._watches = [
            self._tasks.create_task(each.watch(self._changed), name=f"watch {each.address}")
            for each in self._all
        ]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for watch in self._watches:
            watch.cancel()
        await self._tasks.__aexit__(None, None, None)
        for each in self._all:
            await each.client.close()

    def __iter__(self) -> Iterator[Orchestrator]:
        return iter(self._all)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._all)

    @property
    def any_serves(self) -> bool:
        """Whether there is one that takes work."""
        return self._serving.is_set()

    async def until_one_serves(self) -> None:
        """Wait for the first."""
        await self._serving.wait()

    def choose(self, asked: Collection[Orchestrator] = ()) -> Orchestrator:
        """Pick one for a generation: one that serves, was not asked yet, and has least to do.

        Where none serves, one is asked all the same, and says why.
        """
        self._turn += 1
        count = len(self._all)
        ordered = [self._all[(self._turn + index) % count] for index in range(count)]
        return min(ordered, key=lambda it: (not it.serves, it in asked, it.running_count))

    async def info(self) -> SystemInfo:
        """Ask what model there is; the answer may be 2 s old.

        Raises:
            NoTargetError: No target has said yet.
            PacelineError: What else an orchestrator or the transport said.
        """
        kept = self._info
        if kept is None or time.monotonic() - kept[0] > _FRESH_SECONDS:
            info = await self._ask(lambda client: client.info(timeout=_ASK_SECONDS))
            if not info.model_name:
                raise NoTargetError("no target has said yet what its model is")
            self._info = kept = (time.monotonic(), info)
        return kept[1]

    async def chat_template(self) -> ChatTemplate:
        """Ask how the model wants conversations; the answer may be 2 s old.

        Raises:
            UnsupportedError: The model has no chat template.
            PacelineError: What else an orchestrator or the transport said.
        """
        kept = self._template
        if kept is None or time.monotonic() - kept[0] > _FRESH_SECONDS:
            template = await self._ask(lambda client: client.chat_template(timeout=_ASK_SECONDS))
            self._template = kept = (time.monotonic(), template)
        return kept[1]

    async def _ask(self, question: Callable[[AsyncClient], Awaitable[_T]]) -> _T:
        """Ask one after the other until one answers."""
        asked: set[Orchestrator] = set()
        while True:
            orchestrator = self.choose(asked)
            try:
                return await question(orchestrator.client)
            except TryAgainError:
                asked.add(orchestrator)
                if len(asked) == len(self._all):
                    raise

    def _changed(self) -> None:
        if any(each.serves for each in self._all):
            self._serving.set()
        else:
            self._serving.clear()
