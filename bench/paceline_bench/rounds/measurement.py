"""Time rounds and streams, by RPCs and by messages, in turn on one set of model servers.

In blocks SI never drafts and verifies at the same time, so the time of a request is that of its
forwards and what comes between them. Model servers note when calls arrive and end, on the one
monotonic clock of the machine; from that the ways between them follow:

    drafter   ├─ Draft ─┤                          ├─ Draft ─┤
                        └─ to_verify ─┐    ┌─ to_draft ─┘
    target                            ├─ Verify ─┤
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

from paceline import AsyncClient
from paceline_bench.processes import metered, quiet
from paceline_bench.table2.online import make_prompt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline_local.system import LocalSystem

LOOKAHEAD = 5
TOKENS = 60
_PAGE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Forwards:
    """How long forwards take: they sleep for so long."""

    target_ms: float
    drafter_ms: float

    def __str__(self) -> str:
        return f"{self.target_ms:g} and {self.drafter_ms:g} ms"


CASES = (Forwards(0, 0), Forwards(0.5, 0), Forwards(7, 0.5), Forwards(33, 3))


@dataclass(slots=True)
class Rounds:
    """What requests of one kind took, by one way of sending calls; a value for each request.

    Attributes:
        way: "RPCs" or "messages".
        plain_token_ms: Plain decoding: a token, beyond its forward.
        round_ms: SI in blocks: a round, beyond its forwards.
        gain: SI's default dispatch: the time of plain decoding over its own.
        to_verify_ms: From the end of a Draft to the arrival of the next Verify: the median.
        to_draft_ms: From the end of a Verify to the arrival of the next Draft: the median.
        is_identical: Whether every text was the same.
    """

    case: Forwards
    way: str
    plain_token_ms: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    gain: list[float] = field(default_factory=list)
    to_verify_ms: list[float] = field(default_factory=list)
    to_draft_ms: list[float] = field(default_factory=list)
    is_identical: bool = True


@dataclass(frozen=True, slots=True)
class Streams:
    """What many requests at once took, in ms of CPU for each token.

    Attributes:
        strategy: What they were decoded with.
        cpu_ms: By process: the orchestrator, the targets, the drafters.
        tokens_per_second: All streams together.
    """

    way: str
    strategy: str
    stream_count: int
    cpu_ms: Mapping[str, float]
    tokens_per_second: float


async def time_rounds(
    case: Forwards,
    servers: LocalSystem,
    orchestrators: Mapping[str, LocalSystem],
    *,
    repeats: int,
) -> list[Rounds]:
    """Time requests one at a time: plain decoding, SI in blocks, SI as it is by default."""
    found = {way: Rounds(case, way) for way in orchestrators}
    addresses = [it.metrics_address for it in (*servers.targets, *servers.drafters)]
    for index in range(-1, repeats):  # the first one is a warm-up
        prompt = make_prompt(f"rounds {index}")
        texts: set[tuple[int, ...]] = set()
        for way, system in orchestrators.items():
            await quiet([system.orchestrator.pid])
            async with AsyncClient(system.orchestrator_address) as client:
                plain_ns, plain = await _timed(client, prompt, strategy="autoregressive")
                began_ns = time.monotonic_ns()
                blocks_ns, blocks = await _timed(
                    client, prompt, strategy="speculative", dispatch="blocks", lookahead=LOOKAHEAD
                )
                records = await asyncio.to_thread(_records, addresses, began_ns)
                ahead_ns, ahead = await _timed(
                    client, prompt, strategy="speculative", lookahead=LOOKAHEAD
                )
            texts |= {plain.token_ids, blocks.token_ids, ahead.token_ids}
            if index < 0:
                continue
            result, spent = found[way], blocks.finished.statistics
            forward_ns = plain.finished.statistics.forward_ns
            result.plain_token_ms.append((plain_ns - forward_ns) / TOKENS / 1e6)
            beyond_ns = blocks_ns - spent.forward_ns
            result.round_ms.append(beyond_ns / spent.target_forward_count / 1e6)
            result.gain.append(plain_ns / ahead_ns)
            to_verify, to_draft = ways_between(records)
            result.to_verify_ms += to_verify
            result.to_draft_ms += to_draft
            result.is_identical &= len(texts) == 1
    return list(found.values())


async def time_streams(
    way: str, system: LocalSystem, servers: LocalSystem, *, strategy: str, stream_count: int
) -> Streams:
    """Have many requests decoded at once, and meter the processes."""
    processes = {
        "orchestrator": [system.orchestrator.pid],
        "targets": [it.pid for it in servers.targets],
        "drafters": [it.pid for it in servers.drafters],
    }
    pids = [pid for group in processes.values() for pid in group]
    async with AsyncClient(system.orchestrator_address) as client:
        options = {"lookahead": LOOKAHEAD} if strategy == "speculative" else {}

        async def one(index: int) -> int:
            _, completion = await _timed(
                client, make_prompt(f"stream {index}"), strategy=strategy, **options
            )
            return len(completion.token_ids)

        await one(-1)
        async with metered(pids) as usage, asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(stream_count)]
    tokens = sum(task.result() for task in tasks)
    seconds = iter(usage.cpu_seconds)
    cpu_ms = {name: sum(next(seconds) for _ in group) for name, group in processes.items()}
    return Streams(
        way=way,
        strategy=strategy,
        stream_count=stream_count,
        cpu_ms={name: 1e3 * used / tokens for name, used in cpu_ms.items()},
        tokens_per_second=tokens / usage.wall_seconds,
    )


def ways_between(records: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Return the ms from each Draft's end to the next Verify's arrival, and the reverse."""
    calls = sorted(records, key=lambda it: it["start_ns"])
    found: dict[str, list[float]] = {"Verify": [], "Draft": []}
    for before, after in pairwise(calls):
        if before["method"] != after["method"]:
            found[after["method"]].append((after["start_ns"] - before["end_ns"]) / 1e6)
    return found["Verify"], found["Draft"]


async def _timed(client: AsyncClient, prompt: Sequence[int], **options: Any) -> tuple[int, Any]:
    started_ns = time.perf_counter_ns()
    completion = await client.generate(
        prompt, max_tokens=TOKENS, ignore_eos=True, **options
    ).collect()
    return time.perf_counter_ns() - started_ns, completion


def _records(addresses: Sequence[str], since_ns: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for address in addresses:
        with urlopen(f"http://{address}/debug/calls", timeout=_PAGE_SECONDS) as page:
            found += [call for call in json.load(page) if call["start_ns"] >= since_ns]
    return found
