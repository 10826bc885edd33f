"""The same requests through gRPC and through HTTP: the time of the first token, and of others.

Both transports take turns, so that other work of the machine slows both alike; the numbers to look
at are ratios within one turn. This process reads all streams, by asyncio: the clients' time to read
is part of the result, as it is for any caller.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.errors import InternalError
from paceline_bench.processes import cpu_seconds
from paceline_bench.table import SAME_OUTPUT, Column, times

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    import aiohttp

    from paceline import AsyncClient, GenerateOptions

TRANSPORTS = ("gRPC", "HTTP")
_OPTIONS: GenerateOptions = {"strategy": "autoregressive", "ignore_eos": True}
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where requests go.

    Attributes:
        session: For HTTP.
        model: What it calls the model.
        pids: The gateway's process, and the orchestrator's.
    """

    client: AsyncClient
    session: aiohttp.ClientSession
    url: str
    model: str
    pids: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Heard:
    """One stream: its text, when its first token came, and what each later one took on average."""

    text: str
    first_seconds: float
    token_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Streams at once through one transport, and the CPU time that servers used for them."""

    heard: tuple[Heard, ...]
    gateway_seconds: float
    orchestrator_seconds: float


async def take_turn(endpoints: Endpoints, transport: str, *, streams: int, max_tokens: int) -> Turn:
    """Send that many requests at once.

    Raises:
        PacelineError: One of them failed.
        aiohttp.ClientError: The gateway cannot be reached.
    """
    pieces = _over_grpc if transport == "gRPC" else _over_http
    before = cpu_seconds(endpoints.pids)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    listen(pieces(endpoints, f"Request {index}:", max_tokens), max_tokens),
                    name=f"stream {index}",
                )
                for index in range(streams)
            ]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    gateway, orchestrator = (
        end - start for start, end in zip(before, cpu_seconds(endpoints.pids), strict=True)
    )
    return Turn(
        heard=tuple(task.result() for task in tasks),
        gateway_seconds=gateway,
        orchestrator_seconds=orchestrator,
    )


async def listen(
    pieces: AsyncIterator[str],
    token_count: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Heard:
    """Read a stream to its end, and time it.

    Args:
        pieces: Its text, as it comes.
        token_count: How many tokens it has.
        clock: Tells seconds.
    """
    started, first, text = clock(), 0.0, ""
    async for piece in pieces:
        first = first or clock()
        text += piece
    return Heard(text, first - started, (clock() - first) / max(1, token_count - 1))


async def _over_grpc(endpoints: Endpoints, prompt: str, max_tokens: int) -> AsyncIterator[str]:
    options: GenerateOptions = {**_OPTIONS, "max_tokens": max_tokens}
    stream = endpoints.client.generate(prompt, timeout=_TIMEOUT_SECONDS, **options)
    async for chunk in stream:
        yield chunk.text


async def _over_http(endpoints: Endpoints, prompt: str, max_tokens: int) -> AsyncIterator[str]:
    body = {
        "model": endpoints.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "paceline": _OPTIONS,
    }
    async with endpoints.session.post(f"{endpoints.url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise InternalError(f"HTTP {answer.status}: {(await answer.text())[:1000]}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                yield str(json.loads(line[6:])["choices"][0]["text"])


def row(streams: int, turns: Sequence[tuple[Turn, Turn]], *, max_tokens: int) -> dict[str, Any]:
    """Sum up what as many streams heard; each pair is gRPC's turn and HTTP's."""
    texts = [[it.text for it in turn.heard] for pair in turns for turn in pair]
    token_count = streams * len(turns) * max_tokens
    through_http = [pair[1] for pair in turns]
    return {
        "stream_count": streams,
        "identical": all(each == texts[0] for each in texts),
        "first": _compared(turns, lambda it: it.first_seconds),
        "token": _compared(turns, lambda it: it.token_seconds),
        "gateway_ms_per_token": _per_token(through_http, "gateway_seconds", token_count),
        "orchestrator_ms_per_token": _per_token(through_http, "orchestrator_seconds", token_count),
    }


def _compared(turns: Sequence[tuple[Turn, Turn]], what: Callable[[Heard], float]) -> dict[str, Any]:
    """Return each transport's median in ms, and the sorted ratios of the medians in each pair."""
    middles = [tuple(median(map(what, turn.heard)) for turn in pair) for pair in turns]
    found = {
        f"{transport}_ms": median(1e3 * pair[index] for pair in middles)
        for index, transport in enumerate(TRANSPORTS)
    }
    return {**found, "ratios": sorted(http / grpc for grpc, http in middles)}


def _per_token(turns: Sequence[Turn], name: str, token_count: int) -> float:
    return 1e3 * float(sum(getattr(turn, name) for turn in turns)) / token_count


def _both(what: str, heading: str) -> tuple[Column, Column]:
    """Return the columns of both times, and of their ratio: the median, and from least to most."""

    def ratio(row: dict[str, Any]) -> str:
        ratios = row[what]["ratios"]
        return f"{times(median(ratios))} ({ratios[0]:.2f} to {ratios[-1]:.2f})"

    return (
        Column(
            f"{heading} gRPC / HTTP",
            lambda row: f"{row[what]['gRPC_ms']:.1f} / {row[what]['HTTP_ms']:.1f}",
        ),
        Column("HTTP to gRPC", ratio),
    )


COLUMNS = (
    Column("streams", "stream_count"),
    *_both("first", "TTFT"),
    *_both("token", "TPOT"),
    Column("gateway CPU", "gateway_ms_per_token", "{:.2f}"),
    Column("orchestrator CPU", "orchestrator_ms_per_token", "{:.2f}"),
    SAME_OUTPUT,
)
"""Of the table of rows: times in ms, ratios over the pairs of turns."""
