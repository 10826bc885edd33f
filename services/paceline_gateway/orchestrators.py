"""The gateway's orchestrators: its client, who of them serves, and what they said of the model."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Self, TypeVar

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from paceline import AsyncClient
from paceline.channel import open_async_channel
from paceline.errors import DeadlineError, NoTargetError, OverloadedError, TryAgainError
from paceline_gateway.shared_answer import SharedAnswer
from paceline_serving import tracing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from paceline import ChatTemplate, SystemInfo, Tls
    from paceline.call_metadata import Token
    from paceline.connection import AsyncConnection
    from paceline.endpoints import Endpoint

__all__ = ["Orchestrators"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_ASK_SECONDS = 10.0
# Who restarts may be back by then; an HTTP client waits for a second at least.
_ASK_AGAIN_SECONDS = 0.2
_RECONNECT_SECONDS = 0.2
# How old an answer about the model may be: a rollout takes longer than that.
_FRESH_SECONDS = 2.0


class Orchestrators:
    """All of them. Use it as an asynchronous context manager.

    The client chooses among them, and goes on elsewhere where one ends; what is watched here tells
    it, and probes, who serves.

    Args:
        addresses: Where they are.
        tls: How to trust them; None is plaintext.
        insecure: Allow plaintext to other machines.
        token: Tells the key that is shown to them; None where they ask for none.

    Raises:
        InvalidFieldError: An address is malformed, or a TLS file unusable.

    Attributes:
        client: The client of all of them.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        tls: Tls | None,
        insecure: bool,
        token: Token | None = None,
    ) -> None:
        self.client = AsyncClient(
            addresses,
            tls=tls,
            insecure=insecure,
            metadata=lambda: dict(tracing.outgoing_metadata()),
            token=token,
        )
        self._tls = tls
        self._insecure = insecure
        self._watches: list[asyncio.Task[None]] = []
        self._tasks = asyncio.TaskGroup()
        self._serving = asyncio.Event()
        self._info = SharedAnswer(self._ask_info, tasks=self._tasks, fresh_seconds=_FRESH_SECONDS)
        self._template = SharedAnswer(
            self._ask_template, tasks=self._tasks, fresh_seconds=_FRESH_SECONDS
        )

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for each in self.client.endpoints:
            each.serves = False  # until it says so
            # What an orchestrator leaves unfinished goes on there, too, once it was restarted: an
            # HTTP client could only begin anew.
            each.leads_to_one = False
            watch = self._tasks.create_task(self._watch(each), name=f"watch {each.address}")
            self._watches.append(watch)
        return self

    async def __aexit__(self, *exception: object) -> None:
        for watch in self._watches:
            watch.cancel()
        self._info.close()
        self._template.close()
        await self._tasks.__aexit__(None, None, None)
        await self.client.close()

    @property
    def any_serves(self) -> bool:
        """Whether there is one that takes work."""
        return self._serving.is_set()

    async def until_one_serves(self) -> None:
        """Wait for the first."""
        await self._serving.wait()

    async def info(self) -> SystemInfo:
        """Ask what model there is; the answer may be 2 s old.

        Raises:
            NoTargetError: No target has said yet.
            PacelineError: What else an orchestrator or the transport said.
        """
        return await self._info.get()

    async def chat_template(self) -> ChatTemplate:
        """Ask how the model wants conversations; the answer may be 2 s old.

        Raises:
            UnsupportedError: The model has no chat template.
            PacelineError: What else an orchestrator or the transport said.
        """
        return await self._template.get()

    async def _ask_info(self) -> SystemInfo:
        info = await _asked_twice(lambda: self.client.info(timeout=_ASK_SECONDS))
        if not info.model_name:
            raise NoTargetError("no target has said yet what its model is")
        return info

    async def _ask_template(self) -> ChatTemplate:
        return await _asked_twice(lambda: self.client.chat_template(timeout=_ASK_SECONDS))

    async def _watch(self, endpoint: Endpoint[AsyncConnection]) -> None:
        """Follow what an orchestrator says of itself, for ever."""
        while True:
            try:
                async with open_async_channel(
                    endpoint.address, tls=self._tls, insecure=self._insecure
                ) as channel:
                    health = HealthStub(channel)
                    stream = health.Watch(HealthCheckRequest(), wait_for_ready=True)
                    async for state in stream:
                        self._set(endpoint, state.status == HealthCheckResponse.SERVING)
            except grpc.RpcError:
                pass
            self._set(endpoint, False)
            await asyncio.sleep(_RECONNECT_SECONDS)

    def _set(self, endpoint: Endpoint[AsyncConnection], serves: bool) -> None:
        if serves == endpoint.serves:
            return
        endpoint.serves = serves
        _log.info(
            "an orchestrator %s",
            "serves" if serves else "does not serve",
            extra={"orchestrator": endpoint.address},
        )
        if any(each.serves for each in self.client.endpoints):
            self._serving.set()
        else:
            self._serving.clear()


async def _asked_twice(ask: Callable[[], Awaitable[_T]]) -> _T:
    """Ask all orchestrators, and once more if none can answer just now.

    Raises:
        OverloadedError: They took too long. It is not the client's time that is over.
        PacelineError: What else they said.
    """
    try:
        try:
            return await ask()
        except TryAgainError:
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
            return await ask()
    except DeadlineError:
        raise OverloadedError(
            f"no orchestrator has said within {_ASK_SECONDS:g} s what its model is"
        ) from None
