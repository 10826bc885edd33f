"""What a load was given: all its streams together, and each one, with every output compared."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from paceline_bench.least_squares import fitted_slope
from paceline_bench.load.streams import offer
from paceline_bench.load.throttle import throttled
from paceline_bench.processes import counters, metered, quiet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline import AsyncClient
    from paceline_bench.load.streams import Load, Prompt, Served
    from paceline_bench.report import Row

_MIB = 1 << 20
# From here on a core has no room left for bursts, so that work waits for it.
_SATURATED = 0.85
# The 99th percentile of fewer measurements is the largest of them, and says little.
_TAIL_COUNT = 100
# So many of its own standard errors is a slope beyond doubt.
_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class LoadedSystem:
    """What is loaded, and where its processes can be watched.

    Attributes:
        clients: One for each orchestrator; streams are spread over them in turn.
        orchestrator_pids: The orchestrators' processes.
        target_metrics: The targets' metrics addresses.
        orchestrator_share: The share of the time in which each orchestrator may run, in (0, 1]; 1
            is no limit.
    """

    clients: tuple[AsyncClient, ...]
    orchestrator_pids: tuple[int, ...]
    target_metrics: tuple[str, ...]
    orchestrator_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The middle and the tail of measurements; of fewer than 100 there is no tail."""

    p50: float
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """What a load was given; times in ms.

    Attributes:
        strategy: As it was asked for; the papers' name.
        chosen: How many requests were decoded with which strategy.
        stream_count: Streams at the same time.
        orchestrator_count: Orchestrators that they were spread over.
        tokens_per_second: Of all streams together, while all of them ran.
        speed_up: That over plain decoding's, under the same load; None where an output of either
            differed.
        ttft_ms: Time to first token.
        itl_ms: Inter-token latency: between two messages of a stream, which can have more tokens.
        tpot_ms: Time per output token: of a request, for each token after its first message.
        fairness: Jain's index of the requests' tokens per second: 1 is all alike, 1 / N is one of N
            has it all.
        forwards_per_token: Target forwards that were begun, over tokens.
        given_up: Share of them that was interrupted because it had become worthless.
        orchestrator_ms_per_token: CPU time.
        memory_before_mib: What the orchestrators had to themselves (USS) right before.
        memory_peak_mib: The most that was seen of it.
        orchestrator_load: CPU time of the busiest orchestrator over the time in which it could run;
            threads that need no interpreter can take it beyond 1.
        generator_load: Share of a core that this process used.
        machine_load: Share of all cores that was busy.
        began_quietly: False if an orchestrator still computed behind the load before.
        identical: Whether every output was plain decoding's.
    """

    strategy: str
    chosen: dict[str, int]
    stream_count: int
    orchestrator_count: int
    tokens_per_second: float
    speed_up: float | None
    ttft_ms: Percentiles
    itl_ms: Percentiles
    tpot_ms: Percentiles
    fairness: float
    forwards_per_token: float
    given_up: float
    orchestrator_ms_per_token: float
    memory_before_mib: float
    memory_peak_mib: float
    orchestrator_load: float
    generator_load: float
    machine_load: float
    began_quietly: bool
    identical: bool

    @property
    def limit(self) -> str:
        """What was short of CPU, so that the row tells more of that than of the strategy."""
        loads = {
            "machine": self.machine_load,
            "orchestrator": self.orchestrator_load,
            "load generator": self.generator_load,
        }
        return ", ".join(name for name, load in loads.items() if load > _SATURATED)

    def record(self) -> Row:
        """Describe it for JSON."""
        return {**asdict(self), "limit": self.limit}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMemory:
    """What one more stream takes in the orchestrators: a line through the loads of one strategy.

    Attributes:
        strategy: The papers' name.
        orchestrator_count: Orchestrators that streams were spread over.
        mib: The slope of the most that they had to themselves (USS), by least squares over the
            numbers of streams. What an allocator keeps from earlier loads is in it, so it is an
            upper bound. None if it is below twice its standard error, which is too little to be
            measured.
    """

    strategy: str
    orchestrator_count: int
    mib: float | None


async def measure(
    system: LoadedSystem,
    load: Load,
    *,
    expected: Mapping[Prompt, tuple[int, ...]],
    plain: LoadRow | None = None,
) -> LoadRow:
    """Put a load on a system.

    Args:
        system: What is loaded.
        load: What is asked for.
        expected: What plain decoding makes of each prompt.
        plain: Plain decoding under the same load; None if this is plain decoding.

    Raises:
        PacelineError: A request failed.
    """
    began_quietly = await quiet(system.orchestrator_pids)
    before = _forwards(system)
    async with AsyncExitStack() as stack:
        if system.orchestrator_share < 1:
            limit = throttled(system.orchestrator_pids, share=system.orchestrator_share)
            await stack.enter_async_context(limit)
        usage = await stack.enter_async_context(metered(system.orchestrator_pids))
        served = await offer(system.clients, load)
    forwards, given_up = (
        after - earlier for after, earlier in zip(_forwards(system), before, strict=True)
    )
    tokens_per_second = served_tokens_per_second(served)
    identical = all(each.token_ids == expected[each.prompt] for each in served)
    is_comparable = identical and (plain is None or plain.identical)
    plain_speed = tokens_per_second if plain is None else plain.tokens_per_second
    token_count = sum(len(each.token_ids) for each in served)
    return LoadRow(
        strategy=load.strategy.abbreviation,
        chosen=dict(Counter(each.strategy.abbreviation for each in served)),
        stream_count=load.stream_count,
        orchestrator_count=len(system.clients),
        tokens_per_second=tokens_per_second,
        speed_up=tokens_per_second / plain_speed if is_comparable else None,
        ttft_ms=percentiles([1e3 * each.ttft_seconds for each in served]),
        itl_ms=percentiles([1e3 * gap for each in served for gap in each.itl_seconds]),
        tpot_ms=percentiles([1e3 * each.tpot_seconds for each in served]),
        fairness=fairness(
            [len(each.token_ids) / (each.ended_at - each.sent_at) for each in served]
        ),
        forwards_per_token=forwards / token_count,
        given_up=given_up / forwards,
        orchestrator_ms_per_token=1e3 * sum(usage.cpu_seconds) / token_count,
        memory_before_mib=sum(usage.base_bytes) / _MIB,
        memory_peak_mib=sum(usage.peak_bytes) / _MIB,
        orchestrator_load=usage.highest_load / system.orchestrator_share,
        generator_load=usage.own_load,
        machine_load=usage.machine_load,
        began_quietly=began_quietly,
        identical=identical,
    )


def stream_memories(rows: Iterable[LoadRow]) -> list[StreamMemory]:
    """Return what a stream takes, for each strategy that was loaded with three or more numbers."""

    def kind(row: LoadRow) -> tuple[int, str]:
        return row.orchestrator_count, row.strategy

    memories = []
    for (orchestrator_count, strategy), own in groupby(sorted(rows, key=kind), kind):
        points = [(float(row.stream_count), row.memory_peak_mib) for row in own]
        if len({x for x, _ in points}) > 2:
            slope, error = fitted_slope(points)
            mib = slope if slope > _ERRORS * error else None
            memories.append(
                StreamMemory(strategy=strategy, orchestrator_count=orchestrator_count, mib=mib)
            )
    return memories


def served_tokens_per_second(served: Sequence[Served]) -> float:
    """Return the tokens per second of all streams together, while all of them had work."""
    begun_at = min(each.sent_at for each in served)
    last_ends: dict[int, float] = {}
    for each in served:
        last_ends[each.stream] = max(each.ended_at, last_ends.get(each.stream, each.ended_at))
    all_until = min(last_ends.values())
    count = sum(n for each in served for at, n in each.arrivals if at <= all_until)
    return count / (all_until - begun_at)


def fairness(rates: Sequence[float]) -> float:
    """Return Jain's index: (sum of x)^2 / (N * sum of x^2)."""
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return the nearest-rank percentiles; of no values at all, 0."""
    ordered = sorted(values) or [0.0]
    p50, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.50, 0.99))
    return Percentiles(p50, p99 if len(ordered) >= _TAIL_COUNT else None)


def _forwards(system: LoadedSystem) -> tuple[float, float]:
    """Return how many forwards the targets have begun so far, and how many of them given up."""
    pages = [counters(address) for address in system.target_metrics]
    given_up = sum(page["paceline_forwards_interrupted_total"] for page in pages)
    return given_up + sum(page["paceline_forwards_total"] for page in pages), given_up
