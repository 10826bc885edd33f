"""Real models under load, beside what else continues as many texts at once on the same cores.

In each round all follow each other for each number of texts, each time another one first, so that
whatever else the machine does hits all alike. Ratios are those of a round; told is their median.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from paceline.errors import TryAgainError
from paceline_bench.load.measurement import percentiles
from paceline_bench.load.streams import Load, Served, offer
from paceline_bench.pair.contest import Group
from paceline_bench.processes import cpu_seconds, quiet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline import AsyncClient, Strategy
    from paceline_bench.load.streams import Prompt
    from paceline_bench.report import Row

_T = TypeVar("_T")
_ATTEMPTS, _PAUSE_SECONDS = 5, 1.0

Together: TypeAlias = Callable[[Sequence[tuple[int, ...]], int], list[Served]]
"""Continues prompts, all at once, by so many tokens."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who continues texts, greedily.

    Attributes:
        group: Who it is.
        name: Told within its group.
        serve: Does what a load asks for, but with a strategy of its own.
        ready: Makes it ready for a load, and ends that; neither is measured.
    """

    group: Group
    name: str
    serve: Callable[[Load], Awaitable[list[Served]]]
    ready: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, slots=True)
class Run:
    """What a peer made of a load in one round.

    Attributes:
        served: Every text.
        orchestrator_seconds: CPU time of the orchestrator.
        servers_seconds: CPU time of the model servers.
        own_seconds: CPU time of this process: of the client, or of the model if it is here.
    """

    served: list[Served]
    orchestrator_seconds: float
    servers_seconds: float
    own_seconds: float

    @property
    def token_count(self) -> int:
        """The tokens of all texts."""
        return sum(len(each.token_ids) for each in self.served)

    @property
    def tokens_per_second(self) -> float:
        """All tokens, over the time from the first request to the last token."""
        ended_at = max(each.ended_at for each in self.served)
        return self.token_count / (ended_at - min(each.sent_at for each in self.served))


@dataclass(slots=True)
class Entry:
    """A peer, a number of texts at once, and what came of it.

    Attributes:
        runs: One of each round.
        failures: Why runs ended early; each was done again.
    """

    peer: Peer
    stream_count: int
    runs: list[Run] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """The tokens per second of each round."""
        return [run.tokens_per_second for run in self.runs]


def cut_prompts(texts: Sequence[Sequence[int]], count: int, *, length: int) -> list[Prompt]:
    """Cut prompts of one length, evenly spaced, out of all texts behind one another."""
    joined = [token for text in texts for token in text]
    starts = (index * len(joined) // count for index in range(count))
    return [tuple(islice(cycle(joined), start, start + length)) for start in starts]


def service_peer(client: AsyncClient, strategy: Strategy) -> Peer:
    """Name the services with a strategy: a stream for each text."""

    async def serve(load: Load) -> list[Served]:
        return await offer([client], replace(load, strategy=strategy))

    return Peer(Group.SERVICES, strategy.abbreviation, serve)


def local_peer(
    group: Group,
    name: str,
    together: Together,
    *,
    ready: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Peer:
    """Name what continues texts in this process: as many at once as there would be streams."""

    async def serve(load: Load) -> list[Served]:
        prompts = [tuple(map(int, it)) for it in islice(cycle(load.prompts), load.request_count)]
        served = []
        for first in range(0, len(prompts), load.stream_count):
            chosen = prompts[first : first + load.stream_count]
            # On another thread: connections are kept alive meanwhile.
            served += await asyncio.to_thread(together, chosen, load.max_tokens)
        return served

    return Peer(group, name, serve=serve, ready=ready)


async def measure_peers(
    peers: Sequence[Peer],
    loads: Sequence[Load],
    *,
    rounds: int,
    orchestrator_pid: int,
    model_pids: Sequence[int],
    on_run: Callable[[str], None] = lambda _: None,
) -> list[Entry]:
    """Give every load to every peer, in turn.

    Args:
        peers: Who takes it.
        loads: What is asked for; each with another number of streams.
        rounds: How often.
        orchestrator_pid: The orchestrator's process.
        model_pids: The model servers'.
        on_run: Told of each run.

    Returns:
        For each load an entry for each peer.

    Raises:
        PacelineError: A request failed, for good or again and again.
    """
    pids = (orchestrator_pid, os.getpid(), *model_pids)
    entries = [[Entry(peer, load.stream_count) for peer in peers] for load in loads]
    for turn in range(rounds):
        for load, own in zip(loads, entries, strict=True):
            for entry in (*own[turn % len(own) :], *own[: turn % len(own)]):
                run = await insist(partial(_run, entry.peer, load, pids), entry.failures.append)
                entry.runs.append(run)
                who = f"{load.stream_count} x {entry.peer.group.value}, {entry.peer.name}"
                on_run(f"round {turn + 1}, {who}: {run.tokens_per_second:.0f} tokens/s")
    return [entry for own in entries for entry in own]


async def insist(attempt: Callable[[], Awaitable[_T]], on_failure: Callable[[str], None]) -> _T:
    """Make an attempt again if a request should be: one target that is starved is soon missed.

    Raises:
        PacelineError: A request failed for good, or some in each attempt.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return await attempt()
        except TryAgainError as error:
            on_failure(str(error))
            await asyncio.sleep(error.retry_after_seconds or _PAUSE_SECONDS)
    return await attempt()


async def _run(peer: Peer, load: Load, pids: Sequence[int]) -> Run:
    """Measure; the processes are the orchestrator's, this one, and the model servers'."""
    with peer.ready():
        await quiet(pids)  # the load before may still be worked on
        before = cpu_seconds(pids)
        served = await peer.serve(load)
    front, own, *models = (now - then for now, then in zip(cpu_seconds(pids), before, strict=True))
    return Run(served, front, servers_seconds=sum(models), own_seconds=own)


def peer_rows(entries: Sequence[Entry], expected: Mapping[Prompt, tuple[int, ...]]) -> list[Row]:
    """Describe what everybody made of every load.

    Args:
        entries: At each number of streams, one of the engine, and one or more of the library.
        expected: What plain decoding makes of each prompt.
    """
    return [_row(entry, entries, expected) for entry in entries]


def _row(entry: Entry, entries: Sequence[Entry], expected: Mapping[Prompt, tuple[int, ...]]) -> Row:
    group, served = entry.peer.group, [each for run in entry.runs for each in run.served]
    different = sum(each.token_ids != expected[each.prompt] for each in served)
    is_service, token_count = group is Group.SERVICES, sum(run.token_count for run in entry.runs)
    orchestrator_ms, servers_ms, own_ms = (
        1e3 * sum(getattr(run, f"{who}_seconds") for run in entry.runs) / token_count
        for who in ("orchestrator", "servers", "own")
    )
    beside = [it for it in entries if it.stream_count == entry.stream_count]
    library = [it for it in beside if it.peer.group is Group.LIBRARY]
    alone = [it for it in entries if it.peer is entry.peer and it.stream_count == 1]
    return {
        "group": group.value,
        "name": entry.peer.name,
        "stream_count": entry.stream_count,
        "text_count": len(served),
        "tokens_per_second": median(entry.rates),
        "rounds_tokens_per_second": entry.rates,
        "to_one_stream": _ratio(entry, alone),
        "to_library": None if group is Group.LIBRARY else _ratio(entry, library),
        "to_engine": (
            _ratio(entry, [it for it in beside if it.peer.group is Group.ENGINE])
            if is_service
            else None
        ),
        "ttft_ms": asdict(percentiles([1e3 * each.ttft_seconds for each in served])),
        "itl_ms": asdict(percentiles([1e3 * it for each in served for it in each.token_seconds])),
        "gap_ms": asdict(percentiles([1e3 * it for each in served for it in each.itl_seconds])),
        "orchestrator_ms_per_token": orchestrator_ms if is_service else None,
        "model_ms_per_token": servers_ms if is_service else own_ms,
        "client_ms_per_token": own_ms if is_service else None,
        "chosen": dict(Counter(each.strategy.abbreviation for each in served)),
        "failures": entry.failures,
        "different": different,
        # Other shapes add in another order: what the library makes of a near-tie is its own.
        "identical": not different or group is Group.LIBRARY,
    }


def _ratio(entry: Entry, others: Sequence[Entry]) -> float | None:
    """Return how many times as fast it is as the fastest of others; None if there are none."""
    if not others:
        return None
    other = max(others, key=lambda it: median(it.rates))
    return median(own / theirs for own, theirs in zip(entry.rates, other.rates, strict=True))
