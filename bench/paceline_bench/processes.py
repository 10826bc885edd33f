"""What processes of this machine use while something is measured: CPU time, and memory."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.request import urlopen

import psutil
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_LOOK_SECONDS = 0.2
# Processes that take less of one core, all together, only wait.
_QUIET_LOAD = 0.1
_MEMORY_SECONDS = 0.5
_SCRAPE_SECONDS = 5.0


@dataclass(slots=True)
class Usage:
    """What was used from the beginning of a block to its end.

    Attributes:
        wall_seconds: How long it took.
        own_seconds: CPU time of this process.
        cpu_seconds: CPU time of each process that was watched.
        base_bytes: The memory that each of them had to itself (USS) at the beginning.
        peak_bytes: The most that was seen of it.
        machine_load: Share of all cores that was busy, with whatever else ran, in [0, 1].
    """

    wall_seconds: float = 0.0
    own_seconds: float = 0.0
    cpu_seconds: list[float] = field(default_factory=list)
    base_bytes: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    machine_load: float = 0.0

    @property
    def own_load(self) -> float:
        """Share of one core that this process used."""
        return self.own_seconds / self.wall_seconds

    @property
    def highest_load(self) -> float:
        """Share of one core that the busiest watched process used."""
        return max(self.cpu_seconds) / self.wall_seconds


@asynccontextmanager
async def metered(pids: Sequence[int]) -> AsyncIterator[Usage]:
    """Watch processes during the block; what it yields is filled in at the block's end."""
    processes = [psutil.Process(pid) for pid in pids]
    own_bytes = _own_bytes(processes)
    usage = Usage(base_bytes=own_bytes, peak_bytes=own_bytes)
    machine = _machine_seconds()
    before = [_cpu_seconds(process) for process in processes]
    own, started = time.process_time(), time.perf_counter()
    sampling = asyncio.create_task(_sample(processes, usage), name="sample memory")
    try:
        yield usage
    finally:
        sampling.cancel()
        usage.wall_seconds = time.perf_counter() - started
        usage.own_seconds = time.process_time() - own
        after = map(_cpu_seconds, processes)
        usage.cpu_seconds = [end - start for start, end in zip(before, after, strict=True)]
        busy, total = (end - start for start, end in zip(machine, _machine_seconds(), strict=True))
        # Sums of what is rounded: they can be a little less than nothing, or more than all.
        usage.machine_load = min(1.0, max(0.0, busy / total)) if total else 0.0


async def quiet(pids: Sequence[int], *, within_seconds: float = 15.0) -> bool:
    """Wait until processes have done what they still had to do; False if time was up before."""
    processes = [psutil.Process(pid) for pid in pids]
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        started, before = time.perf_counter(), sum(map(_cpu_seconds, processes))
        await asyncio.sleep(_LOOK_SECONDS)
        spent = sum(map(_cpu_seconds, processes)) - before
        if spent < _QUIET_LOAD * (time.perf_counter() - started):
            return True
    return False


def cpu_seconds(pids: Sequence[int]) -> list[float]:
    """Return the CPU time that each process has used so far."""
    return [_cpu_seconds(psutil.Process(pid)) for pid in pids]


def counters(metrics_address: str) -> dict[str, float]:
    """Read a server's metrics, summed up over their labels."""
    with urlopen(f"http://{metrics_address}/metrics", timeout=_SCRAPE_SECONDS) as page:
        text = page.read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


async def _sample(processes: Sequence[psutil.Process], usage: Usage) -> None:
    while True:
        await asyncio.sleep(_MEMORY_SECONDS)
        # In a thread: it takes some ms, in which whoever measures latencies here must not stand.
        sizes = await asyncio.to_thread(_own_bytes, processes)
        usage.peak_bytes = [max(pair) for pair in zip(usage.peak_bytes, sizes, strict=True)]


def _own_bytes(processes: Sequence[psutil.Process]) -> list[int]:
    """Return what each has to itself: what it shares with others says nothing of its load."""
    return [process.memory_full_info().uss for process in processes]


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _machine_seconds() -> tuple[float, float]:
    """Return the busy and the total CPU time of all cores since the machine's start."""
    times = psutil.cpu_times()
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - times.idle - getattr(times, "iowait", 0.0), total
