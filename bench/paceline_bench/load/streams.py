"""Many streams at once, each a client's.

The load is a closed loop: each stream sends its next request as soon as the one before has ended,
so their number stays the same until the last requests have been sent.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import TYPE_CHECKING, TypeAlias

from paceline import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline import AsyncClient

_TIMEOUT_SECONDS = 600.0
_WARM_UP = (Strategy.AUTOREGRESSIVE, *(4 * [Strategy.DISTRIBUTED]))
# With which prompts are decoded for reference: enough that several targets have work.
_REFERENCE_STREAMS = 8

Prompt: TypeAlias = "str | tuple[int, ...]"
"""Text, or token ids."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for.

    Attributes:
        prompts: What requests continue, one after the other, and again from the first.
        strategy: How every request is to be decoded.
        stream_count: Requests that run at the same time.
        request_count: Requests in all.
        max_tokens: Tokens of each.
    """

    prompts: tuple[Prompt, ...]
    strategy: Strategy
    stream_count: int
    request_count: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    """One request, as its client saw it.

    Attributes:
        prompt: What it continued.
        stream: The stream that it belonged to.
        strategy: What it was decoded with.
        sent_at: When it was sent, in seconds on this process's clock.
        arrivals: When each message with tokens came, and how many tokens it had.
    """

    prompt: Prompt
    stream: int
    strategy: Strategy
    sent_at: float
    arrivals: tuple[tuple[float, int], ...]
    token_ids: tuple[int, ...]

    @property
    def ended_at(self) -> float:
        """When its last tokens came."""
        return self.arrivals[-1][0]

    @property
    def ttft_seconds(self) -> float:
        """Time to first token."""
        return self.arrivals[0][0] - self.sent_at

    @property
    def tpot_seconds(self) -> float:
        """Time per output token: for each after the first message."""
        first_at, first_count = self.arrivals[0]
        return (self.ended_at - first_at) / max(1, len(self.token_ids) - first_count)

    @property
    def itl_seconds(self) -> Iterator[float]:
        """Inter-token latency: how long its reader waited between two messages."""
        return (later - earlier for (earlier, _), (later, _) in pairwise(self.arrivals))

    @property
    def token_seconds(self) -> Iterator[float]:
        """That waiting divided over the tokens that ended it: for each after the first message."""
        for waited, (_, count) in zip(self.itl_seconds, self.arrivals[1:], strict=True):
            yield from [waited / count] * count


async def warm_up(clients: Sequence[AsyncClient], *, max_tokens: int) -> None:
    """Let each orchestrator learn what its models are like."""
    for client in clients:
        for strategy in _WARM_UP:
            await client.generate(
                "Warm up:", strategy=strategy, max_tokens=max_tokens, ignore_eos=True
            ).collect()


async def decode_plainly(
    client: AsyncClient, prompts: Sequence[Prompt], *, max_tokens: int
) -> dict[Prompt, tuple[int, ...]]:
    """Return what plain decoding makes of each prompt, which everything is compared with.

    Raises:
        PacelineError: A request failed.
    """
    load = Load(
        prompts=tuple(prompts),
        strategy=Strategy.AUTOREGRESSIVE,
        stream_count=min(_REFERENCE_STREAMS, len(prompts)),
        request_count=len(prompts),
        max_tokens=max_tokens,
    )
    return {each.prompt: each.token_ids for each in await offer([client], load)}


async def offer(clients: Sequence[AsyncClient], load: Load) -> list[Served]:
    """Run the streams to their end.

    Raises:
        PacelineError: A request failed.
    """
    prompts = iter(islice(cycle(load.prompts), load.request_count))
    served: list[Served] = []

    async def run(stream: int) -> None:
        for prompt in prompts:
            client = clients[stream % len(clients)]
            served.append(await _serve(client, load, prompt=prompt, stream=stream))

    try:
        async with asyncio.TaskGroup() as streams:
            for stream in range(load.stream_count):
                streams.create_task(run(stream), name=f"stream {stream}")
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return served


async def _serve(client: AsyncClient, load: Load, *, prompt: Prompt, stream: int) -> Served:
    sent_at = time.perf_counter()
    generation = client.generate(
        prompt,
        strategy=load.strategy,
        max_tokens=load.max_tokens,
        ignore_eos=True,
        timeout=_TIMEOUT_SECONDS,
    )
    arrivals = [(time.perf_counter(), len(chunk.token_ids)) async for chunk in generation]
    completion = await generation.collect()
    return Served(
        prompt=prompt,
        stream=stream,
        strategy=completion.started.strategy,
        sent_at=sent_at,
        arrivals=tuple(arrivals),
        token_ids=completion.token_ids,
    )
