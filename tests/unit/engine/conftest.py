"""Models, hosts and calls for the engine's tests."""

from __future__ import annotations

import asyncio
import gc
from array import array
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from paceline_contract.calls import PrefixCall
from paceline_contract.proposal import Proposal, SparseDistribution
from paceline_engine.model_backend import Feed, ModelBackend
from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from paceline_engine.terms.backend import Backend, Interrupt
from paceline_engine.torch_backend.compiled_steps import compile_steps
from paceline_engine.torch_backend.compiler import StepsUnavailableError
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.prefix_digest import prefix_digest
from support.tiny_models import TinyPair, sixteen_token_model, tiny_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from paceline_engine.scheduling.model_text import ModelText
    from paceline_engine.terms.model_cache import ModelCache

__all__ = ["sixteen_token_model", "tiny_pair"]

# Two threads on a busy machine spend milliseconds at each other's barriers.
torch.set_num_threads(1)

NEVER = Interrupt()
QUICK = HostLimits(warm_up_rounds=0)


@pytest.fixture
def no_collector():
    """A server's comes late, so what has ended must go without it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=[1, 2], ids=lambda count: f"{count} threads")
def threads(request):
    """Let torch compute with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def steps(request):
    """The compiled steps, and attention; products, too, where a module has `NEEDS_PRODUCTS`."""
    try:
        return compile_steps(products=getattr(request.module, "NEEDS_PRODUCTS", False))
    except StepsUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def target(tiny_pair: TinyPair) -> TransformersBackend:
    return TransformersBackend(str(tiny_pair.target))


@pytest.fixture(scope="session")
def drafter(tiny_pair: TinyPair) -> TransformersBackend:
    return TransformersBackend(str(tiny_pair.drafter))


def instant(**settings: float) -> SimulatedBackend:
    """A simulated model that takes no time."""
    return SimulatedBackend(
        SimulatedModel(ttft_seconds=0.0, tpot_seconds=0.0, **settings)  # type: ignore[arg-type]
    )


class Gate(SimulatedBackend):
    """An instant simulated model, each of whose forwards waits at a gate until it may pass."""

    def __init__(self) -> None:
        super().__init__(SimulatedModel(ttft_seconds=0.0, tpot_seconds=0.0))
        self.open = Interrupt()
        self.entered: list[int] = []
        self.failures: list[BaseException] = []

    def _forward(self, feeds, interrupt):
        self.entered.append(sum(feed.scored_count for feed in feeds))
        while not self.open.wait(0.0005) and not interrupt.is_set():
            pass
        if self.failures:
            raise self.failures.pop()
        return super()._forward(feeds, interrupt)


@asynccontextmanager
async def running(
    backend: Backend, *, limits: HostLimits = QUICK, **settings: object
) -> AsyncIterator[ModelHost]:
    host = ModelHost(lambda: backend, limits=limits, **settings)  # type: ignore[arg-type]
    await host.start()
    try:
        yield host
    finally:
        await host.stop()


def call_on(session_id: str, sequence: int, *, base: list[int], append: list[int]) -> PrefixCall:
    """A call on top of the tokens that the session holds."""
    digest = prefix_digest(base) if base else b""
    return PrefixCall(session_id, sequence, len(base), digest, tuple(append))


def chain(token_ids: Sequence[int], distributions: Sequence[SparseDistribution] = ()) -> Proposal:
    return Proposal(tuple(token_ids), distributions=distributions)


def path(count: int) -> tuple[int, ...]:
    """A chain's accepted path."""
    return tuple(range(count))


def continuation(model: ModelText, prompt: list[int], count: int) -> list[int]:
    """The oracle: plain decoding, one token at a time."""
    text = array("I", prompt)
    for _ in range(count):
        text.extend(model.draft(text).token_ids)
    return text.tolist()[len(prompt) :]


def scores_after(
    backend: ModelBackend, cache: ModelCache, prefix: array[int], block: Sequence[int] = ()
):
    """The scores of a forward: what follows the prefix, and each token of the block."""
    fed = prefix[cache.keep(prefix) :]
    fed.extend(block)
    feed = Feed(cache, fed, scored_count=len(block) + 1)
    backend._make_room(feed)
    (scores,) = backend._forward([feed], NEVER)
    cache.extend(fed)
    return scores


class StopAtLayer(Interrupt):
    """An interrupt that is set once it has been looked at so many times."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self._left = layer

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop and the worker go on until something is so; the test's timeout is the limit."""
    while not condition():  # noqa: ASYNC110 - the worker thread has no event to offer
        await asyncio.sleep(0.0005)
