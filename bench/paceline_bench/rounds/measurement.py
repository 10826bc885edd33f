"""Time rounds and streams, by RPCs and by messages, in turn on one set of model servers.

In blocks SI never drafts and verifies at the same time, so the time of a request is that of its
forwards and what comes between them. Model servers note when calls arrive and end, on the one
monotonic clock of the machine; from that the hops between them follow:

    drafter   ├─ Draft ─┤                          ├─ Draft ─┤
                        └─ to_verify ─┐    ┌─ to_draft ─┘
    target                            ├─ Verify ─┤
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from paceline import AsyncClient
from paceline_bench.processes import metered, quiet
from paceline_bench.table2.echo import time_echoes
from paceline_bench.table2.online import fetch_call_records, make_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline_local.system import LocalSystem

_T = TypeVar("_T")

LOOKAHEAD = 5
TOKENS = 60


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
    """What requests of one kind took with one transport of calls; a value for each request.

    Attributes:
        transport: "RPCs" or "messages".
        plain_token_ms: Plain decoding: a token, beyond its forward.
        round_ms: SI in blocks: a round, beyond its forwards.
        bare_ms: A bare message on an open stream between two processes, there and back, beyond the
            pause between: the pauses are those of the forwards. A round in blocks cannot take less
            than its calls, and so not less than two of these, one for each server.
        gain: SI's default dispatch: the time of plain decoding over its own.
        to_verify_ms: From the end of a Draft to the arrival of the next Verify.
        to_draft_ms: From the end of a Verify to the arrival of the next Draft.
        is_identical: Whether every text was the one of the prompt's first request.
    """

    case: Forwards
    transport: str
    plain_token_ms: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    bare_ms: list[float] = field(default_factory=list)
    gain: list[float] = field(default_factory=list)
    to_verify_ms: list[float] = field(default_factory=list)
    to_draft_ms: list[float] = field(default_factory=list)
    is_identical: bool = True


@dataclass(slots=True)
class Streams:
    """What many requests at once took, in ms of CPU for each token; a value for each repeat.

    Attributes:
        strategy: What they were decoded with.
        cpu_ms: By process: the orchestrator, the targets, the drafters.
        tokens_per_second: All streams together.
        is_identical: Whether every text was the one of the prompt's first request.
    """

    transport: str
    strategy: str
    stream_count: int
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    tokens_per_second: list[float] = field(default_factory=list)
    is_identical: bool = True


class Texts:
    """The first text after each prompt, with which all later ones are compared."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, ...]] = {}

    def agree(self, prompt: str, *texts: tuple[int, ...]) -> bool:
        """Whether these texts are the first one after the prompt with this name."""
        return all(self._first.setdefault(prompt, text) == text for text in texts)


async def time_rounds(
    case: Forwards,
    servers: LocalSystem,
    orchestrators: Mapping[str, LocalSystem],
    *,
    repeats: int,
) -> list[Rounds]:
    """Time requests one at a time: plain decoding, SI in blocks, SI as it is by default."""
    found = {transport: Rounds(case, transport) for transport in orchestrators}
    texts, bare_ms = Texts(), await _time_bare_messages(case)
    addresses = [it.metrics_address for it in (*servers.targets, *servers.drafters)]
    for index in range(-1, repeats):  # the first one is a warm-up
        name = f"rounds {index}"
        prompt = make_prompt(name)
        for transport, system in in_turn(orchestrators, index):
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
            result, spent = found[transport], blocks.finished.statistics
            result.is_identical &= texts.agree(
                name, plain.token_ids, blocks.token_ids, ahead.token_ids
            )
            if index < 0:
                continue
            forward_ns = plain.finished.statistics.forward_ns
            result.plain_token_ms.append((plain_ns - forward_ns) / TOKENS / 1e6)
            beyond_ns = blocks_ns - spent.forward_ns
            result.round_ms.append(beyond_ns / spent.target_forward_count / 1e6)
            result.gain.append(plain_ns / ahead_ns)
            to_verify, to_draft = hops_between(records)
            result.to_verify_ms += to_verify
            result.to_draft_ms += to_draft
    bare_ms += await _time_bare_messages(case)  # its cost drifts with the machine
    for result in found.values():
        result.bare_ms = bare_ms
    return list(found.values())


async def time_streams(
    servers: LocalSystem,
    orchestrators: Mapping[str, LocalSystem],
    *,
    strategies: Sequence[str],
    stream_count: int,
    repeats: int,
    on_repeat: Callable[[str], None],
) -> list[Streams]:
    """Have many requests decoded at once, in turn by each transport, and meter the processes."""
    found = [Streams(it, name, stream_count) for name in strategies for it in orchestrators]
    texts = Texts()
    for index in range(repeats):
        for strategy in strategies:
            for transport, system in in_turn(orchestrators, index):
                (result,) = [
                    it for it in found if (it.transport, it.strategy) == (transport, strategy)
                ]
                await _add_streams(result, system, servers, texts=texts)
        on_repeat(f"repeat {index + 1} of {repeats}")
    return found


async def _add_streams(
    result: Streams, system: LocalSystem, servers: LocalSystem, *, texts: Texts
) -> None:
    processes = {
        "orchestrator": [system.orchestrator.pid],
        "targets": [it.pid for it in servers.targets],
        "drafters": [it.pid for it in servers.drafters],
    }
    pids = [pid for group in processes.values() for pid in group]
    names = [f"stream {index}" for index in range(result.stream_count)]
    options = {"lookahead": LOOKAHEAD} if result.strategy == "speculative" else {}
    async with AsyncClient(system.orchestrator_address) as client:

        async def one(name: str) -> tuple[int, ...]:
            prompt = make_prompt(name)
            _, completion = await _timed(client, prompt, strategy=result.strategy, **options)
            token_ids: tuple[int, ...] = completion.token_ids
            return token_ids

        await one("warm-up")
        async with metered(pids) as usage, asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(name), name=name) for name in names]
    found = [task.result() for task in tasks]
    tokens = sum(map(len, found))
    seconds = iter(usage.cpu_seconds)
    for process, members in processes.items():
        used_ms = 1e3 * sum(next(seconds) for _ in members)
        result.cpu_ms.setdefault(process, []).append(used_ms / tokens)
    result.tokens_per_second.append(tokens / usage.wall_seconds)
    for name, text in zip(names, found, strict=True):
        result.is_identical &= texts.agree(name, text)


def in_turn(orchestrators: Mapping[str, _T], index: int) -> list[tuple[str, _T]]:
    """Return them with the other one first in each repeat, so that no order favours one."""
    items = list(orchestrators.items())
    return items[::-1] if index % 2 else items


def hops_between(records: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Return the ms from each Draft's end to the next Verify's arrival, and the reverse."""
    calls = sorted(records, key=lambda it: it["start_ns"])
    found: dict[str, list[float]] = {"Verify": [], "Draft": []}
    for before, after in pairwise(calls):
        if before["method"] != after["method"]:
            found[after["method"]].append((after["start_ns"] - before["end_ns"]) / 1e6)
    return found["Verify"], found["Draft"]


async def _time_bare_messages(case: Forwards) -> list[float]:
    pauses_ms = (LOOKAHEAD * case.drafter_ms, case.target_ms)
    messages = await time_echoes([round(it * 1e6) for it in pauses_ms], on_a_stream=True)
    return [it.overhead_ns / 1e6 for it in messages]


async def _timed(client: AsyncClient, prompt: Sequence[int], **options: Any) -> tuple[int, Any]:
    started_ns = time.perf_counter_ns()
    completion = await client.generate(
        prompt, max_tokens=TOKENS, ignore_eos=True, **options
    ).collect()
    return time.perf_counter_ns() - started_ns, completion


def _records(addresses: Sequence[str], since_ns: int) -> list[dict[str, Any]]:
    pages = [fetch_call_records(address, since_ns=since_ns) for address in addresses]
    return [call for page in pages for call in page]
