"""Very many requests, and what is left of them: memory, descriptors, threads, tasks, sessions.

A soak is made of rounds. In a round some streams share out its requests: every strategy, greedy and
sampled, and some whose client leaves in the middle. After each round nothing is under way, so what
the processes hold then is what they keep. Which requests there are follows from the seed alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING

import psutil

from paceline import Strategy
from paceline_bench.least_squares import fitted_slope
from paceline_bench.processes import counters
from paceline_protocol.methods import METHODS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from paceline import AsyncClient
    from paceline.client import AsyncGeneration

STRATEGIES = {
    strategy.abbreviation.lower(): strategy
    for strategy in (
        *(Strategy(strategy.value) for strategy, row in METHODS.items() if not row.self_drafts),
        Strategy.AUTO,
    )
}
"""By the names that options have for them. Its targets do not draft for themselves."""

_TEMPERATURE = 0.8
_SAMPLED_SHARE = 0.3
_PROMPTS = tuple(f"Request {index}:" for index in range(16))
_TIMEOUT_SECONDS = 120.0
# Half of the clients that leave do so within this time, wherever their requests are then.
_LONGEST_WAIT_SECONDS = 0.05
# Sessions are closed behind the client's back; then all that a round has begun has ended.
_SETTLE_SECONDS = 20.0
_LOOK_SECONDS = 0.05
_SESSIONS, _TASKS = "paceline_sessions_active", "paceline_tasks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What is asked for.

    Attributes:
        request_count: Requests in all, those of the warm-up not counted.
        warm_up_count: Requests before: pools fill, and the planner simulates.
        round_size: Requests between two looks.
        stream_count: Requests that run at the same time.
        max_tokens: Tokens of each.
        leaving_share: How many clients leave in the middle, in [0, 1].
        seed: What the requests follow from.
        strategies: What they ask for, in turn.
    """

    request_count: int
    warm_up_count: int
    round_size: int
    stream_count: int
    max_tokens: int
    leaving_share: float
    seed: int
    strategies: tuple[Strategy, ...] = tuple(STRATEGIES.values())


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        leaves: Whether its client goes after the first tokens.
        waits_seconds: How long such a client waits for them; None: as long as it takes.
    """

    prompt: str
    strategy: Strategy
    temperature: float
    leaves: bool
    waits_seconds: float | None = None

    @property
    def sampling(self) -> tuple[str, float]:
        """What its tokens follow from."""
        return self.prompt, self.temperature


@dataclass(frozen=True, slots=True)
class Watched:
    """A process to look at; one without a metrics page has no tasks and no sessions."""

    name: str
    pid: int
    metrics_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a process held after so many requests.

    Attributes:
        own_bytes: Memory that it had allocated, as far as it was in RAM. Its libraries are not in
            it: whether those count as its own (USS) depends on who else runs.
        resident_bytes: All of its memory that was in RAM (RSS).
        task_count: Its asyncio tasks; None if it does not say.
        session_count: Its sessions; None if it has none to speak of.
    """

    request_count: int
    own_bytes: int
    resident_bytes: int
    descriptor_count: int
    thread_count: int
    task_count: int | None
    session_count: int | None


@dataclass(frozen=True, slots=True)
class Growth:
    """By how many bytes a process grew with each request, and the standard error of that."""

    bytes_per_request: float
    error: float


def requests(soak: Soak) -> Iterator[Request]:
    """Yield the requests of a soak, without an end."""
    rng = random.Random(soak.seed)  # noqa: S311 - no secret
    for index in count():
        yield Request(
            prompt=rng.choice(_PROMPTS),
            strategy=soak.strategies[index % len(soak.strategies)],
            temperature=_TEMPERATURE if rng.random() < _SAMPLED_SHARE else 0.0,
            leaves=rng.random() < soak.leaving_share,
            waits_seconds=rng.choice((None, rng.uniform(0, _LONGEST_WAIT_SECONDS))),
        )


async def references(client: AsyncClient, soak: Soak) -> dict[tuple[str, float], tuple[int, ...]]:
    """Return what plain decoding makes of every prompt, greedily and sampled.

    Raises:
        PacelineError: A request failed.
    """
    plain = [
        Request(prompt, Strategy.AUTOREGRESSIVE, temperature, leaves=False)
        for prompt in _PROMPTS
        for temperature in (0.0, _TEMPERATURE)
    ]
    return {
        each.sampling: (await _generation(client, each, soak).collect()).token_ids for each in plain
    }


async def soak(
    client: AsyncClient,
    plan: Soak,
    *,
    watched: Sequence[Watched],
    expected: dict[tuple[str, float], tuple[int, ...]],
) -> AsyncIterator[tuple[list[Reading], int]]:
    """Run a soak; after the warm-up, and after each round, yield readings and wrong outputs so far.

    Args:
        plan: What is asked for.
        watched: What is looked at; the readings have its order.
        expected: See `references`.

    Raises:
        PacelineError: A request failed.
        TimeoutError: Some sessions are never closed.
    """
    everything = requests(plan)
    wrong_count = await _round(
        client, plan, queue=islice(everything, plan.warm_up_count), expected=expected
    )
    done = 0
    while True:
        await _settled(watched)
        yield [_read(each, request_count=done) for each in watched], wrong_count
        size = min(plan.round_size, plan.request_count - done)
        if not size:
            return
        wrong_count += await _round(client, plan, queue=islice(everything, size), expected=expected)
        done += size


def growth(readings: Sequence[Reading], *, resident: bool = False) -> Growth:
    """Fit a line through what a process held.

    Args:
        readings: Three or more.
        resident: Of all that was in RAM; else of what it had to itself.
    """
    points = [
        (float(it.request_count), float(it.resident_bytes if resident else it.own_bytes))
        for it in readings
    ]
    return Growth(*fitted_slope(points))


async def _round(
    client: AsyncClient,
    plan: Soak,
    *,
    queue: Iterator[Request],
    expected: dict[tuple[str, float], tuple[int, ...]],
) -> int:
    """Run requests to their end; return how many outputs were wrong."""
    wrong_count = 0

    async def run() -> None:
        nonlocal wrong_count
        for request in queue:
            is_right = await _is_right(client, plan, request=request, expected=expected)
            wrong_count += not is_right  # not in one line: others count during the wait

    try:
        async with asyncio.TaskGroup() as streams:
            for stream in range(plan.stream_count):
                streams.create_task(run(), name=f"stream {stream}")
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return wrong_count


async def _is_right(
    client: AsyncClient,
    plan: Soak,
    *,
    request: Request,
    expected: dict[tuple[str, float], tuple[int, ...]],
) -> bool:
    """Run a request; tell whether its tokens, as far as they were wanted, are plain decoding's."""
    wanted = expected[request.sampling]
    token_ids: tuple[int, ...] = ()
    patience = request.waits_seconds if request.leaves else None
    with suppress(TimeoutError):
        async with asyncio.timeout(patience), _generation(client, request, plan) as generation:
            async for chunk in generation:
                token_ids += chunk.token_ids
                if request.leaves:
                    break
    return token_ids == (wanted[: len(token_ids)] if request.leaves else wanted)


def _generation(client: AsyncClient, request: Request, plan: Soak) -> AsyncGeneration:
    return client.generate(
        request.prompt,
        strategy=request.strategy,
        temperature=request.temperature,
        seed=plan.seed,
        max_tokens=plan.max_tokens,
        ignore_eos=True,
        timeout=_TIMEOUT_SECONDS,
    )


async def _settled(watched: Sequence[Watched]) -> None:
    """Return once no session is open."""
    ends = time.monotonic() + _SETTLE_SECONDS
    while any(_metrics(each).get(_SESSIONS) for each in watched):
        if time.monotonic() > ends:
            raise TimeoutError(f"sessions are left {_SETTLE_SECONDS:g} s after the last request")
        await asyncio.sleep(_LOOK_SECONDS)


def _read(watched: Watched, *, request_count: int) -> Reading:
    process = psutil.Process(watched.pid)
    page = _metrics(watched)
    with process.oneshot():
        return Reading(
            request_count=request_count,
            own_bytes=_allocated_bytes(process),
            resident_bytes=process.memory_info().rss,
            descriptor_count=process.num_fds(),
            thread_count=process.num_threads(),
            task_count=_whole(page.get(_TASKS)),
            session_count=_whole(page.get(_SESSIONS)),
        )


def _allocated_bytes(process: psutil.Process) -> int:
    memory = process.memory_info()
    if hasattr(memory, "shared"):  # Linux: mapped files and shared memory
        return int(memory.rss - memory.shared)
    return int(process.memory_full_info().uss)


def _metrics(watched: Watched) -> dict[str, float]:
    return counters(watched.metrics_address) if watched.metrics_address else {}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
