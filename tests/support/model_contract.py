"""What the contract suite of drafters and targets says and asks: tests/contract/model_servers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidFieldError, PacelineError
from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from support.model_servers import ModelClient, serving

if TYPE_CHECKING:
    import threading
    from collections.abc import AsyncIterator, Callable, Mapping

    from paceline.v1 import model_service_pb2

PROMPT = (5, 6, 7, 8)
NEVER_SECONDS = 600.0
_MODEL = SimulatedModel(
    ttft_seconds=0, tpot_seconds=0, vocabulary_size=300, self_rates=(0.8, 0.6, 0.4)
)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def a_host(
    *,
    stalls: bool = False,
    loaded: threading.Event | None = None,
    model: SimulatedModel = _MODEL,
    parts: Mapping[str, Any] = _NOTHING,
    **limits: Any,
) -> ModelHost:
    """Return a host of a simulated model that takes no time.

    Args:
        stalls: Whether only the first forward of a session ends.
        loaded: What loading waits for.
        model: The model.
        parts: Attributes of the backend, such as its tokenizer.
        limits: What it takes on.
    """
    if stalls:
        model = replace(model, tpot_seconds=NEVER_SECONDS)

    def load() -> SimulatedBackend:
        if loaded is not None:
            loaded.wait()
        backend = SimulatedBackend(model)
        for name, value in parts.items():
            setattr(backend, name, value)
        return backend

    return ModelHost(load, limits=HostLimits(warm_up_rounds=0, **limits))


@asynccontextmanager
async def connected(
    role: Any, host: Any, *, by_messages: bool = False, **settings: Any
) -> AsyncIterator[ModelClient]:
    """Serve a host by the real servicers, and connect to it."""
    async with serving(role, host, **settings) as process:
        address = process.addresses["address"]
        client = await ModelClient(role, address, by_messages=by_messages).learn()
        client.host = host
        try:
            yield client
        finally:
            await client.channel.close()


async def continuation(target: ModelClient, prompt: tuple[int, ...], count: int) -> list[int]:
    """Decode plainly: the oracle."""
    session = await target.open()
    text = list(prompt)
    answer = await target.verify(target.call(session, 1, new=text))
    for sequence in range(2, count + 1):
        held = tuple(text)
        text.append(answer.next_token_id)
        call = target.call(session, sequence, held=held, new=text[-1:])
        answer = await target.verify(call)
    await target.close(session)
    return [*text[len(prompt) :], answer.next_token_id]


@dataclass(frozen=True)
class Told:
    """A limit that the server tells, and so much more or less."""

    name: str
    more: int = 0

    def __repr__(self) -> str:
        return f"{self.name}{self.more:+}" if self.more else self.name

    @staticmethod
    def put_in(value: Any, info: model_service_pb2.GetModelInfoResponse) -> Any:
        """Return a value with the limits in it known."""
        match value:
            case Told(name, more):
                return getattr(info, name) + more
            case list():
                return [Told.put_in(each, info) for each in value]
            case _:
                return value


def assert_names(error: PacelineError, path: str) -> None:
    """Assert that an error is about the field at a path, and says what is wrong with it."""
    assert isinstance(error, InvalidFieldError)
    (violation,) = error.violations
    # A limit on a length that several fields make up is named after the last of them.
    assert violation.field.startswith(path.removesuffix(".seconds").removesuffix(".nanos"))
    assert violation.description


def assert_no_forward(client: ModelClient) -> None:
    """Assert that a model has computed nothing, where it is within reach."""
    if client.host is not None:  # else it cannot be seen
        assert client.host.statistics().forwards == 0


def is_running(host: Any) -> bool:
    """Whether a call waits at a stalling host."""
    return bool(host.statistics().forwards_running == 1)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something holds; the test's own timeout is the limit."""
    while not condition():  # noqa: ASYNC110 - what another thread does sets no event
        await asyncio.sleep(0.001)
