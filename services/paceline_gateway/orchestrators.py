"""The gateway's orchestrators: its client, who of them serves, and what they said of the model."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from paceline import AsyncClient
from paceline.errors import DeadlineError, LoadingError, NoTargetError, TryAgainError
from paceline_contract.limits import LEAST_MESSAGE_BYTES
from paceline_gateway.errors import RequestError
from paceline_gateway.health_watch import Watch
from paceline_gateway.shared_answer import SharedAnswer
from paceline_serving import tracing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from paceline import ChatTemplate, SystemInfo, Tls
    from paceline.call_metadata import Token

_T = TypeVar("_T")

_ASK_SECONDS = 10.0
# The same where none serves: whoever waits then had better be told to come again.
_ASK_IN_VAIN_SECONDS = 2.0
# Who restarts may be back by then; an HTTP client waits for a second at least.
_ASK_AGAIN_SECONDS = 0.2
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
        patience_seconds: How long a generation that has begun waits for one that goes on with it.

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
        patience_seconds: float = math.inf,
    ) -> None:
        self._open = partial(
            AsyncClient,
            tls=tls,
            insecure=insecure,
            metadata=lambda: dict(tracing.outgoing_metadata()),
            token=token,
            patience=patience_seconds,
        )
        self.client = self._open(addresses)
        self._watches = [
            Watch(
                each,
                connect=each.connection.open_channel,
                knock=partial(self._knock, each.address),
                changed=self._tell,
            )
            for each in self.client.endpoints
        ]
        self._watching: list[asyncio.Task[None]] = []
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
            # HTTP client could only begin again.
            each.leads_to_one = False
        for watch in self._watches:
            self._watching.append(self._tasks.create_task(watch.follow(), name="watch"))
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._watching:
            task.cancel()
        self._info.close()
        self._template.close()
        await self._tasks.__aexit__(None, None, None)
        await self.client.close()

    @property
    def any_serves(self) -> bool:
        """Whether there is one that takes work."""
        return self._serving.is_set()

    @property
    def any_refuses(self) -> bool:
        """Whether there is one that refuses this gateway's own key or certificate."""
        return any(watch.refusal is not None for watch in self._watches)

    def doubt(self) -> None:
        """Ask them again whether they let this gateway in: one has refused a request."""
        for watch in self._watches:
            watch.doubt()

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

    async def check_model(self, asked: str) -> str:
        """Return the model's name, if it is the one that was asked for.

        Raises:
            RequestError: There is another one here.
            PacelineError: Nobody could say.
        """
        name = (await self.info()).model_name
        if asked != name:
            raise RequestError(
                f"there is no model {asked[:200]!r} here; there is {name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name

    async def most_request_bytes(self) -> int:
        """Ask how large a request may be; one that does not say takes what all of them take.

        Raises:
            PacelineError: Nobody could say.
        """
        return (await self.info()).most_request_bytes or LEAST_MESSAGE_BYTES

    async def chat_template(self) -> ChatTemplate:
        """Ask how the model wants conversations; the answer may be 2 s old.

        Raises:
            UnsupportedError: The model has no chat template.
            PacelineError: What else an orchestrator or the transport said.
        """
        return await self._template.get()

    async def _ask_info(self) -> SystemInfo:
        seconds = self._ask_seconds
        info = await _asked_twice(lambda: self.client.info(timeout=seconds), seconds=seconds)
        if not info.model_name:
            raise NoTargetError("no target has said yet what its model is")
        return info

    async def _ask_template(self) -> ChatTemplate:
        seconds = self._ask_seconds
        return await _asked_twice(
            lambda: self.client.chat_template(timeout=seconds), seconds=seconds
        )

    @property
    def _ask_seconds(self) -> float:
        return _ASK_SECONDS if self.any_serves else _ASK_IN_VAIN_SECONDS

    async def _knock(self, address: str) -> None:
        """Ask one orchestrator what it tells only to whom it lets in.

        Raises:
            PacelineError: It does not let this gateway in, or could not answer.
        """
        async with self._open([address]) as client:
            await client.info(timeout=_ASK_SECONDS)

    def _tell(self) -> None:
        if any(each.serves for each in self.client.endpoints):
            self._serving.set()
        else:
            self._serving.clear()


async def _asked_twice(ask: Callable[[], Awaitable[_T]], *, seconds: float) -> _T:
    """Ask all orchestrators, and once more if none can answer just now.

    Args:
        seconds: How long they may take, for the error's words.

    Raises:
        LoadingError: They took too long. It is not the client's time that is over.
        PacelineError: What else they said.
    """
    try:
        try:
            return await ask()
        except TryAgainError:
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
            return await ask()
    except DeadlineError:
        raise LoadingError(
            f"no orchestrator has said within {seconds:g} s what its model is"
        ) from None
