"""The gateway's orchestrators: the client, their health, and their answers about the model."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from paceline import AsyncClient
from paceline.errors import DeadlineError, LoadingError, NoTargetError, TryAgainError
from paceline_contract.limits import LEAST_MESSAGE_BYTES
from paceline_gateway.errors import RequestError
from paceline_gateway.fleet.health_watch import Watch
from paceline_gateway.fleet.shared_answer import SharedAnswer
from paceline_serving import tracing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from paceline import ChatTemplate, GenerateOptions, SystemInfo, Tls
    from paceline.call_metadata import Token

_T = TypeVar("_T")

_ASK_SECONDS = 10.0
# The same while none serves: then a client had better be told to retry.
_ASK_IN_VAIN_SECONDS = 2.0
# A restarted orchestrator may serve by then; an HTTP client would wait for a second at least.
_ASK_AGAIN_SECONDS = 0.2
# The largest age of an answer about the model: a rollout takes longer.
_FRESH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests can ask for: the targets', alone or with a LoRA adapter.

    Attributes:
        name: The model's, or the adapter's.
        options: The options with which a generation has it.
    """

    name: str
    options: GenerateOptions


class Orchestrators:
    """All orchestrators of a gateway. Use it as an asynchronous context manager.

    The client chooses an orchestrator, and resumes at another one if that one ends. The watches
    here tell the client and probes which orchestrators serve.

    Args:
        addresses: Their addresses.
        tls: Certificates; None: plaintext.
        insecure: Allow plaintext to other machines.
        token: Returns this gateway's key; None: no key is sent.
        patience_seconds: How long a broken generation waits for an orchestrator that resumes it.

    Raises:
        InvalidFieldError: An address is malformed, or a TLS file unusable.

    Attributes:
        client: The client of all orchestrators.
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
        self._last_info: SystemInfo | None = None
        self._info = SharedAnswer(self._ask_info, tasks=self._tasks, fresh_seconds=_FRESH_SECONDS)
        self._template = SharedAnswer(
            self._ask_template, tasks=self._tasks, fresh_seconds=_FRESH_SECONDS
        )

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for each in self.client.endpoints:
            each.serves = False  # until its health says otherwise
            # An unfinished generation may also resume at the same orchestrator after a restart: an
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
        """Whether an orchestrator takes work."""
        return self._serving.is_set()

    @property
    def any_refuses(self) -> bool:
        """Whether an orchestrator refuses this gateway's own key or certificate."""
        return any(watch.refusal is not None for watch in self._watches)

    def doubt(self) -> None:
        """Check again which orchestrators accept this gateway: one has refused a request."""
        for watch in self._watches:
            watch.doubt()

    async def until_one_serves(self) -> None:
        """Wait until an orchestrator serves."""
        await self._serving.wait()

    async def info(self) -> SystemInfo:
        """Return the model and the servers; the answer may be 2 s old.

        Raises:
            NoTargetError: No target has described its model yet.
            PacelineError: Another error of the orchestrators or the transport.
        """
        return await self._info.get()

    @property
    def last_info(self) -> SystemInfo | None:
        """The newest answer of `info`; None before the first."""
        return self._last_info

    async def check_model(self, asked: str) -> ServedModel:
        """Return the model that a request asked for, if it is served here.

        Raises:
            RequestError: The gateway has another model, without a LoRA adapter of this name.
            PacelineError: No orchestrator answered.
        """
        info = await self.info()
        if asked == info.model_name:
            return ServedModel(asked, {})
        if asked in info.lora_adapters:
            return ServedModel(asked, {"lora": asked})
        others = f", with {len(info.lora_adapters)} LoRA adapters" if info.lora_adapters else ""
        raise RequestError(
            f"there is no model {asked[:200]!r} here; there is {info.model_name!r}{others}",
            status=404,
            param="model",
            code="model_not_found",
        )

    async def most_request_bytes(self) -> int:
        """Return the largest request; for an orchestrator that does not say, the general limit.

        Raises:
            PacelineError: No orchestrator answered.
        """
        return (await self.info()).most_request_bytes or LEAST_MESSAGE_BYTES

    async def chat_template(self) -> ChatTemplate:
        """Return the model's chat template; the answer may be 2 s old.

        Raises:
            UnsupportedError: The model has no chat template.
            PacelineError: Another error of the orchestrators or the transport.
        """
        return await self._template.get()

    async def _ask_info(self) -> SystemInfo:
        seconds = self._ask_seconds
        info = await _asked_twice(lambda: self.client.info(timeout=seconds), seconds=seconds)
        if not info.model_name:
            raise NoTargetError("no target has said yet what its model is")
        self._last_info = info
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
        """Ask an orchestrator a question that needs a key or a certificate.

        Raises:
            PacelineError: The orchestrator refuses this gateway, or did not answer.
        """
        async with self._open([address]) as client:
            await client.info(timeout=_ASK_SECONDS)

    def _tell(self) -> None:
        if any(each.serves for each in self.client.endpoints):
            self._serving.set()
        else:
            self._serving.clear()


async def _asked_twice(ask: Callable[[], Awaitable[_T]], *, seconds: float) -> _T:
    """Ask all orchestrators, and once more if none can answer.

    Args:
        seconds: Their time limit, for the error's message.

    Raises:
        LoadingError: They took too long; the client's own deadline has not passed.
        PacelineError: Another error of theirs.
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
