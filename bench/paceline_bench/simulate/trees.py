"""What trees are worth, and drafting ahead: SI and DSI with and without, on the virtual clock.

What is charged: forwards, of whatever they work on the same, and if asked for each further row of
one; the prompt is a forward like any other, and nothing else takes time. All variants meet
the same draws, so that luck cancels out of their ratios. Times are in parts of a target forward.
"""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline_bench.protocol_runs import Batch, Setup, Timed, time_batch
from paceline_bench.recurrences import (
    expected_ahead_time,
    expected_distributed_times,
    expected_speculative_forwards,
    scheduled_stretches,
)
from paceline_bench.simulated_servers import SimulatedServers
from paceline_orchestrator.planning.equation import LOOKAHEADS, smallest_lookahead
from paceline_protocol.draft_shape import CHAIN, Shape
from paceline_protocol.laboratory.simulation import ServerLatency
from paceline_protocol.laboratory.tree_shapes import speculative_speed
from paceline_protocol.methods import METHODS, Strategy, label_of
from paceline_protocol.ranks import hit_rates

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline_protocol.laboratory.guesses import OwnGuesses

_TARGET = 10_000  # a target forward, so that parts of it are integers
_SI_LOOKAHEADS = range(1, 21)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeJob:
    """What is to be compared on the same servers.

    Attributes:
        name: What people call it.
        servers: Steady latencies, acceptance rate, and the targets of DSI.
        shapes: Of the trees.
        shares: How likely each runner-up is right where the first token is wrong; see ranks.py.
        token_count: Tokens of a generation.
        repeats: Generations.
        guesses: What a target guesses by itself; None: none does.
    """

    name: str
    servers: SimulatedServers
    shapes: tuple[Shape, ...]
    shares: tuple[float, ...]
    token_count: int
    repeats: int
    guesses: OwnGuesses | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What trees gave one method on the same servers.

    Attributes:
        drafter: The drafter's latency over the target's.
        strategy: The method's label; with "ahead" if its drafter never rests.
        target_count: Targets it had.
        gpu_count: Devices in use.
        width: See Shape; 1 is the method without trees.
        branches: Likewise.
        lookahead: The best one; 0 where nobody drafts ahead.
        tokens_per_forward: Tokens for each target forward that was answered.
        time: Of a generation, in target forwards: the mean.
        over_plain: How many times as fast as plain decoding.
        over_si: As SI without trees that rests while it verifies, at its best lookahead.
        over_si_error: The standard error of that.
        over_chain: As the same method without trees.
        over_chain_error: The standard error of that.
        per_gpu: Tokens for each target forward's time, over the devices in use.
    """

    name: str
    drafter: float
    acceptance_rate: float
    strategy: str
    target_count: int
    gpu_count: int
    width: int
    branches: int
    lookahead: int
    tokens_per_forward: float
    time: float
    over_plain: float
    over_si: float
    over_si_error: float
    over_chain: float
    over_chain_error: float
    per_gpu: float


def steady(
    drafter: float,
    acceptance_rate: float,
    *,
    target_count: int,
    target_row: float = 0,
    drafter_row: float = 0,
) -> SimulatedServers:
    """Make servers whose first forwards take no longer than others.

    Args:
        drafter: The drafter's latency over the target's.
        target_count: Targets of DSI.
        target_row: What each further row adds to a target's forward, in parts of it.
        drafter_row: The same of the drafter's.
    """
    step = max(1, round(drafter * _TARGET))
    return SimulatedServers(
        target=ServerLatency(_TARGET, _TARGET, row=round(target_row * _TARGET)),
        drafter=ServerLatency(step, step, row=round(drafter_row * step)),
        acceptance_rate=acceptance_rate,
        target_count=target_count,
    )


def grid_jobs(job: TreeJob, *, drafters: Sequence[float], rates: Sequence[float]) -> list[TreeJob]:
    """Lay out a grid of drafter latencies and acceptance rates; else all is as in the job."""
    row = job.servers.target.row / _TARGET, job.servers.drafter.row / job.servers.drafter.step
    return [
        replace(
            job,
            name=f"drafter {drafter:g}, acceptance {rate:g}",
            servers=steady(
                drafter,
                rate,
                target_count=job.servers.target_count,
                target_row=float(row[0]),
                drafter_row=float(row[1]),
            ),
        )
        for drafter in drafters
        for rate in rates
    ]


def compare_trees(job: TreeJob) -> list[Gain]:
    """Simulate SI and DSI, each as a chain and with every shape, and own guesses: seconds."""
    variants = (
        (Strategy.SPECULATIVE, False),
        (Strategy.SPECULATIVE, True),
        (Strategy.DISTRIBUTED, False),
    )
    chains = {
        (strategy, ahead): _timed(job, strategy, drafts_ahead=ahead) for strategy, ahead in variants
    }
    si = chains[Strategy.SPECULATIVE, False]
    return [
        _gain(job, timed, si=si, chain=chain)
        for (strategy, ahead), chain in chains.items()
        for timed in (
            chain,
            *(_timed(job, strategy, drafts_ahead=ahead, shape=shape) for shape in job.shapes),
        )
    ] + _self_gains(job, si=si)


def _self_gains(job: TreeJob, *, si: Timed) -> list[Gain]:
    if job.guesses is None:
        return []
    target, drafter = job.servers.target, job.servers.drafter
    setup = Setup(Strategy.SELF_SPECULATIVE, target, drafter, guesses=job.guesses)
    own = _simulated(job, setup)
    return [replace(_gain(job, own, si=si, chain=own), lookahead=0)]


def write_gains(path: Path, gains: Sequence[Gain]) -> None:
    """Write a CSV file with a line for each."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Gain)])
        writer.writeheader()
        writer.writerows(asdict(each) for each in gains)


def _timed(job: TreeJob, strategy: Strategy, *, drafts_ahead: bool, shape: Shape = CHAIN) -> Timed:
    """Simulate a method with each lookahead that may be the best, and return the best."""
    candidates = _LOOKAHEADS[strategy, drafts_ahead](job, shape)
    overlaps = METHODS[strategy].overlaps
    setups = [
        Setup(
            strategy,
            job.servers.target,
            job.servers.drafter,
            lookahead=lookahead,
            target_count=job.servers.target_count if overlaps else 1,
            shape=shape,
            drafts_ahead=drafts_ahead,
        )
        for lookahead in sorted(candidates)
    ]
    return min((_simulated(job, setup) for setup in setups), key=lambda timed: timed.mean)


def _simulated(job: TreeJob, setup: Setup) -> Timed:
    batch = Batch(
        setup,
        job.servers.acceptance_rate,
        max_tokens=job.token_count,
        seeds=range(job.repeats),
        shares=job.shares,
    )
    return time_batch(batch)


def _speculative_lookaheads(job: TreeJob, shape: Shape) -> set[int]:
    """Return the best of a chain by the exact expectation, and of a tree by the formula.

    The formula knows neither of the end of a text nor of the price of rows.
    """
    best = {min(_SI_LOOKAHEADS, key=lambda lookahead: _expected_si(job, lookahead))}
    if shape.width > 1:
        ratio = float(job.servers.drafter.step / job.servers.target.step)
        rates = hit_rates(job.servers.acceptance_rate, shares=job.shares, width=shape.width)
        best.add(speculative_speed(ratio, rates, branch_count=shape.branches)[1])
    return best


def _expected_si(job: TreeJob, lookahead: int) -> float:
    (drafts,), (rounds,) = expected_speculative_forwards(
        np.array([job.servers.acceptance_rate]), lookahead=lookahead, max_tokens=job.token_count
    )
    round_time = job.servers.target.step + lookahead * job.servers.target.row
    return float(drafts * float(job.servers.drafter.step) + rounds * float(round_time))


def _ahead_lookaheads(job: TreeJob, shape: Shape) -> set[int]:
    """Return the best of a chain by the exact expectation; of a tree those of `SI`, too."""
    best = {min(_SI_LOOKAHEADS, key=lambda lookahead: _expected_ahead(job, lookahead))}
    return best | _speculative_lookaheads(job, shape) if shape.width > 1 else best


def _expected_ahead(job: TreeJob, lookahead: int) -> float:
    target, drafter = job.servers.target, job.servers.drafter
    if drafter.step > target.step:
        return _expected_si(job, lookahead)
    return expected_ahead_time(
        job.servers.acceptance_rate,
        lookahead=lookahead,
        max_tokens=job.token_count,
        target_step=float(target.step + lookahead * target.row),
        drafter_step=float(drafter.step),
    )


def _distributed_lookaheads(job: TreeJob, shape: Shape) -> set[int]:
    """Return 1, and the best of a chain by the exact expectation with free rows."""
    del shape
    servers = job.servers
    feasible = smallest_lookahead(
        int(servers.target.step), int(servers.drafter.step), target_count=servers.target_count
    )
    shorter = [each for each in LOOKAHEADS if each < feasible]
    return {1, min([*shorter, feasible], key=lambda lookahead: _expected_dsi(job, lookahead))}


def _expected_dsi(job: TreeJob, lookahead: int) -> float:
    setup = Setup(
        Strategy.DISTRIBUTED,
        job.servers.target,
        job.servers.drafter,
        lookahead=lookahead,
        target_count=job.servers.target_count,
    )
    table = scheduled_stretches(setup, max_tokens=job.token_count)
    return float(expected_distributed_times(np.array([job.servers.acceptance_rate]), table)[0])


_LOOKAHEADS = {
    (Strategy.SPECULATIVE, False): _speculative_lookaheads,
    (Strategy.SPECULATIVE, True): _ahead_lookaheads,
    (Strategy.DISTRIBUTED, False): _distributed_lookaheads,
}


def _gain(job: TreeJob, timed: Timed, *, si: Timed, chain: Timed) -> Gain:
    setup, step = timed.setup, float(job.servers.target.step)
    over_si, over_si_error = timed.over(si)
    over_chain, over_chain_error = timed.over(chain)
    over_plain = job.token_count * step / timed.mean
    return Gain(
        name=job.name,
        drafter=float(job.servers.drafter.step) / step,
        acceptance_rate=job.servers.acceptance_rate,
        strategy=label_of(setup.strategy, drafts_ahead=setup.drafts_ahead),
        target_count=setup.target_count,
        gpu_count=setup.gpu_count,
        width=setup.shape.width,
        branches=setup.shape.branches,
        lookahead=setup.lookahead,
        tokens_per_forward=job.repeats * job.token_count / timed.target_forwards,
        time=timed.mean / step,
        over_plain=over_plain,
        over_si=over_si,
        over_si_error=over_si_error,
        over_chain=over_chain,
        over_chain_error=over_chain_error,
        per_gpu=over_plain / setup.gpu_count,
    )
