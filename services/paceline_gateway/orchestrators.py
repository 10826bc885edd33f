"""The gateway's orchestrators: its client, who of them serves, and what they said of the model."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Self

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from paceline import AsyncClient
from paceline.channel import open_async_channel
from paceline.errors import NoTargetError
from paceline_serving import tracing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import ChatTemplate, SystemInfo, Tls
    from paceline.connection import AsyncConnection
    from paceline.endpoints import Endpoint

__all__ = ["Orchestrators"]

_log = logging.getLogger(__name__)

_ASK_SECONDS = 10.0
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

    Raises:
        InvalidFieldError: An address is malformed, or a TLS file unusable.

    Attributes:
        client: The client of all of them.
    """

    def __init__(self, addresses: Sequence[str], *, tls: Tls | None, insecure: bool) -> None:
        self.client = AsyncClient(
            addresses,
            tls=tls,
            insecure=insecure,
            metadata=lambda: dict(tracing.outgoing_metadata()),
        )
        self._tls = tls
        self._insecure = insecure
        self._watches: list[asyncio.Task[None]] = []
        self._tasks = asyncio.TaskGroup()
        self._serving = asyncio.Event()
        self._info: tuple[float, SystemInfo] | None = None
        self._template: tuple[float, ChatTemplate] | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for each in self.client.endpoints:
            each.serves = False  # until it says so
            watch = self._tasks.create_task(self._watch(each), name=f"watch {each.address}")
            self._watches.append(watch)
        return self

    async def __aexit__(self, *exception: object) -> None:
        for watch in self._watches:
            watch.cancel()
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
        kept = self._info
        if kept is None or time.monotonic() - kept[0] > _FRESH_SECONDS:
            info = await self.client.info(timeout=_ASK_SECONDS)
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
            template = await self.client.chat_template(timeout=_ASK_SECONDS)
            self._template = kept = (time.monotonic(), template)
        return kept[1]

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
