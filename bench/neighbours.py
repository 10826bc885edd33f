"""What one client does to another: many streams of its own, a long prompt, very long ones, a crowd.

Run from the repository's root, with `streams`, `prompt`, `texts` or `crowd`; it prints Markdown.
What it said is in bench/LOG.md. Processes and gRPC are real. Who comes from another address is
another client.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import AsyncClient, Strategy
from paceline.errors import OverloadedError
from paceline_bench.load.measurement import percentiles
from paceline_local.models import NOTHING_KEPT
from paceline_local.system import LocalSystem, LocalSystemConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

MODEL = Path("models/python-target")
ROUNDS = 3
# Part 1: simulated models. All of one client's streams are more than it may have at once.
SIMULATED = ("--backend=simulated", "--session-limit=1024", "--queue-limit=1024")
TARGET, DRAFTER = (
    (*SIMULATED, "--simulated-tpot-seconds=0.04", "--simulated-row-seconds=0.0002"),
    (*SIMULATED, "--simulated-tpot-seconds=0.004", "--simulated-row-seconds=0.00002"),
)
REQUESTS, TOKENS = 40, 24
GREEDY_STREAMS, GREEDY_TOKENS = 128, 400
STRATEGIES = (Strategy.AUTOREGRESSIVE, Strategy.AUTO)
SETTLE_SECONDS = 5.0
# Part 2: the bundled target, its context made longer. What it then says is worth nothing.
CONTEXT, LONG_PROMPT = 16384, 10_000
STREAMS, STREAM_TOKENS = 8, 900
GAPS_ALONE = 400

# Part 3: prompts so long that to hand them on is work. Forwards cost next to nothing.
LONGEST_PROMPT, LONGEST_COUNT = 190_000, 8
ALONE_SECONDS = 4.0
OFFHAND = (
    "--backend=simulated",
    "--simulated-context-length=200000",
    "--token-budget=8000000",
    "--simulated-ttft-seconds=0.002",
    "--simulated-tpot-seconds=0.002",
    "--simulated-row-seconds=0.000004",
)

# Part 4: prompts that come at once, at simulated targets.
CROWD, CROWD_PROMPT, CROWD_TOKENS = 32, 200, 32
CROWD_ROW_SECONDS = (0.0, 0.00002, 0.0002)

Gaps = list[tuple[float, float]]
"""When each message came, and how long after the one before, in seconds."""


async def beside_streams() -> None:
    """Time a modest client's requests, alone and beside one that wants all there is."""
    config = LocalSystemConfig(
        targets=4,
        drafters=1,
        target_arguments=TARGET,
        drafter_arguments=DRAFTER,
        orchestrator_listen="[::]:0",
        orchestrator_arguments=("--insecure", "--request-limit=128"),
    )
    print("| strategy | modest client | requests | p50 ms | p99 ms |")
    print("| --- | --- | ---: | ---: | ---: |")
    async with LocalSystem(config) as system, AsyncExitStack() as clients:
        port = system.orchestrator_address.rpartition(":")[2]
        modest, greedy = [
            await clients.enter_async_context(AsyncClient(f"{host}:{port}"))
            for host in ("[::1]", "127.0.0.1")
        ]
        for strategy in STRATEGIES:
            alone: list[float] = []
            beside: list[float] = []
            for _ in range(ROUNDS):
                alone += await request_times(modest, strategy)
                async with wanting_all(greedy, strategy):
                    beside += await request_times(modest, strategy)
            for name, times in (("alone", alone), ("beside", beside)):
                found = percentiles([1e3 * each for each in times])
                print(
                    f"| {strategy.abbreviation} | {name} | {len(times)} | {found.p50:.0f} |"
                    f" {found.p99:.0f} |",
                    flush=True,
                )


async def request_times(client: AsyncClient, strategy: Strategy) -> list[float]:
    """Return how long each of some requests took, one after the other."""
    times = []
    for index in range(REQUESTS):
        sent_at = time.perf_counter()
        await client.generate(
            f"Request {index}:", strategy=strategy, max_tokens=TOKENS, ignore_eos=True
        ).collect()
        times.append(time.perf_counter() - sent_at)
    return times


@asynccontextmanager
async def wanting_all(client: AsyncClient, strategy: Strategy) -> AsyncIterator[None]:
    """Have a client send long requests all the while, again as soon as one is over or refused."""

    async def want(index: int) -> None:
        while True:
            try:
                await client.generate(
                    f"Greedy {index}:",
                    strategy=strategy,
                    max_tokens=GREEDY_TOKENS,
                    ignore_eos=True,
                ).collect()
            except OverloadedError as error:
                await asyncio.sleep(error.retry_after_seconds or 1.0)

    wants = [asyncio.create_task(want(index)) for index in range(GREEDY_STREAMS)]
    await asyncio.sleep(SETTLE_SECONDS)
    try:
        yield
    finally:
        for each in wants:
            each.cancel()
        await asyncio.gather(*wants, return_exceptions=True)
        await asyncio.sleep(SETTLE_SECONDS)


async def beside_prompt() -> None:
    """Time streams of plain decoding, alone and while a long prompt is computed for another."""
    with tempfile.TemporaryDirectory() as folder:
        config = LocalSystemConfig(
            targets=1,
            drafters=0,
            target_arguments=(
                f"--model={longer_model(Path(folder))}",
                "--threads=1",
                NOTHING_KEPT,
            ),
        )
        print("| streams | gaps | p50 ms | p99 ms | longest ms |")
        print("| --- | ---: | ---: | ---: | ---: |")
        async with (
            LocalSystem(config) as system,
            AsyncClient(system.orchestrator_address) as client,
        ):
            for _ in range(ROUNDS):
                await run_beside_prompt(client)


async def run_beside_prompt(client: AsyncClient) -> None:
    """Run streams, let a long prompt come, and tell of the gaps before and meanwhile."""
    gaps: Gaps = []
    has_enough = asyncio.Event()
    streams = [
        asyncio.create_task(
            watch(client, f"# Request {index}\ndef", gaps=gaps, has_enough=has_enough)
        )
        for index in range(STREAMS)
    ]
    await has_enough.wait()
    began = time.perf_counter()
    await client.generate(
        tuple(50 + place % 400 for place in range(LONG_PROMPT)),
        strategy=Strategy.AUTOREGRESSIVE,
        max_tokens=1,
        ignore_eos=True,
        timeout=600,
    ).collect()
    ended = time.perf_counter()
    still_running = sum(not each.done() for each in streams)
    await asyncio.gather(*streams)
    tell("alone", [gap for at, gap in gaps if at < began])
    tell(
        f"beside the prompt: {ended - began:.1f} s, {still_running} ran on after it",
        [gap for at, gap in gaps if began <= at <= ended],
    )


async def watch(
    client: AsyncClient,
    prompt: str,
    *,
    gaps: Gaps,
    has_enough: asyncio.Event,
    strategy: Strategy = Strategy.AUTOREGRESSIVE,
    tokens: int = STREAM_TOKENS,
) -> None:
    """Run a stream, and add its gaps; say when there are enough of all streams."""
    generation = client.generate(
        prompt, strategy=strategy, max_tokens=tokens, ignore_eos=True, timeout=600
    )
    arrivals = []
    async for _ in generation:
        arrivals.append(time.perf_counter())
        gaps += [(later, later - earlier) for earlier, later in pairwise(arrivals[-2:])]
        if len(gaps) > GAPS_ALONE:
            has_enough.set()


async def beside_texts() -> None:
    """Time a stream of SI, alone and while another process has very long prompts served."""
    config = LocalSystemConfig(
        targets=2,
        drafters=1,
        target_arguments=OFFHAND,
        drafter_arguments=OFFHAND,
        orchestrator_listen="[::]:0",
        orchestrator_arguments=("--insecure",),
    )
    print("| a stream | gaps | p50 ms | p99 ms | longest ms |")
    print("| --- | ---: | ---: | ---: | ---: |")
    async with LocalSystem(config) as system:
        port = system.orchestrator_address.rpartition(":")[2]
        async with AsyncClient(f"[::1]:{port}") as client:
            for _ in range(ROUNDS):
                alone, beside = await gaps_beside_texts(client, f"127.0.0.1:{port}")
                tell("alone", alone)
                tell(f"beside {LONGEST_COUNT} prompts of {LONGEST_PROMPT} tokens", beside)


async def gaps_beside_texts(client: AsyncClient, address: str) -> tuple[list[float], list[float]]:
    """Return a stream's gaps in seconds before long prompts come, and until they are served."""
    gaps: Gaps = []
    stream = asyncio.create_task(
        watch(
            client,
            "def",
            gaps=gaps,
            has_enough=asyncio.Event(),
            strategy=Strategy.SPECULATIVE,
            tokens=150_000,
        )
    )
    await asyncio.sleep(ALONE_SECONDS)
    alone = [gap for _, gap in gaps]
    command = (sys.executable, __file__, "send", address)
    sender = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert sender.stdout is not None
    await sender.stdout.readline()
    began = time.perf_counter()
    await sender.wait()
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    return alone, [gap for at, gap in gaps if at >= began]


async def send_texts(address: str) -> None:
    """Have very long prompts served, all at once; say when they are about to be sent."""
    prompts = [
        tuple(50 + (place * (index + 7)) % 400 for place in range(LONGEST_PROMPT))
        for index in range(LONGEST_COUNT)
    ]
    async with AsyncClient(address) as client:
        await client.generate("def", max_tokens=1).collect()
        print("ready", flush=True)
        await asyncio.gather(
            *(
                client.generate(
                    prompt, strategy=Strategy.SPECULATIVE, max_tokens=8, timeout=600
                ).collect()
                for prompt in prompts
            )
        )


async def in_a_crowd() -> None:
    """Time many prompts that come at once at one target, for some prices of a row."""
    print("| ms a row | prompts at once | first token p50 ms | last ms | whole p50 ms | last ms |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for row_seconds in CROWD_ROW_SECONDS:
        config = LocalSystemConfig(
            targets=1,
            drafters=0,
            target_arguments=(
                *SIMULATED,
                "--simulated-ttft-seconds=0.04",
                "--simulated-tpot-seconds=0.04",
                f"--simulated-row-seconds={row_seconds}",
            ),
        )
        async with (
            LocalSystem(config) as system,
            AsyncClient(system.orchestrator_address) as client,
        ):
            times = [each for n in range(ROUNDS) for each in await crowd_times(client, n)]
        medians = [
            f"{1e3 * percentiles(column).p50:.0f} | {1e3 * max(column):.0f}"
            for column in zip(*times, strict=True)
        ]
        print(f"| {1e3 * row_seconds:g} | {CROWD} | {' | '.join(medians)} |", flush=True)


async def crowd_times(client: AsyncClient, number: int) -> list[tuple[float, float]]:
    """Return when each one of a crowd had its first token, and its last, in seconds."""

    async def come(index: int) -> tuple[float, float]:
        prompt = tuple(50 + (place * (index + 7) + number) % 400 for place in range(CROWD_PROMPT))
        began = time.perf_counter()
        generation = client.generate(
            prompt, strategy=Strategy.AUTOREGRESSIVE, max_tokens=CROWD_TOKENS, ignore_eos=True
        )
        await anext(aiter(generation))
        first = time.perf_counter() - began
        await generation.collect()
        return first, time.perf_counter() - began

    return await asyncio.gather(*(come(index) for index in range(CROWD)))


def tell(name: str, gaps: Iterable[float]) -> None:
    """Print a line about gaps in seconds."""
    times = [1e3 * each for each in gaps]
    found = percentiles(times)
    tail = "-" if found.p99 is None else f"{found.p99:.1f}"
    longest = max(times, default=0.0)
    print(f"| {name} | {len(times)} | {found.p50:.1f} | {tail} | {longest:.1f} |", flush=True)


def longer_model(folder: Path) -> Path:
    """Return a copy of the bundled target that takes longer texts."""
    copy = shutil.copytree(MODEL, folder / MODEL.name)
    config = json.loads((copy / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (copy / "config.json").write_text(json.dumps(config))
    return copy


PARTS = {
    "streams": beside_streams,
    "prompt": beside_prompt,
    "texts": beside_texts,
    "crowd": in_a_crowd,
}

if __name__ == "__main__":
    part, *arguments = sys.argv[1:]
    asyncio.run(send_texts(*arguments) if part == "send" else PARTS[part]())
