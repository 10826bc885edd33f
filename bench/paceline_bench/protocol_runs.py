"""The protocol on the virtual clock, with the servers that a figure or a plan assumes."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_bench.gpus import gpu_count
from paceline_engine.terms.rank_paths import likeliest_tree
from paceline_protocol.draft_shape import CHAIN, Shape
from paceline_protocol.laboratory.guesses import OwnGuesses
from paceline_protocol.laboratory.oracles import AgreementOracle, FeatureHeadOracle
from paceline_protocol.laboratory.simulation import ServerLatency, simulate
from paceline_protocol.messages import CapacityChanged
from paceline_protocol.methods import Strategy, create_method, label_of
from paceline_protocol.ranks import MOST_WIDTH, hit_rates
from paceline_protocol.task import DecodingTask, DispatchPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_protocol.laboratory.simulation import SimulationResult

_PROMPT_LENGTH = 1


@dataclass(frozen=True, slots=True)
class Setup:
    """Servers, and how they are used.

    Attributes:
        target: Latency of each target.
        drafter: Latency of the drafter; plain decoding has none.
        lookahead: Draft tokens in a verification.
        target_count: Targets there are.
        dispatch: When draft tokens go to a target.
        broadcast_prefill: Whether the prompt goes to all targets at the start.
        keep_prefill: Whether a target finishes its first verification, whatever becomes of it.
        shape: How wide drafts are.
        guesses: What a target guesses by itself, or None.
        drafts_ahead: Whether SI's drafter goes on while the target verifies.
        head_rates: Of a drafter that reads the target's hidden states, instead of an acceptance
            rate: see FeatureHeadOracle; none: it reads tokens only.
    """

    strategy: Strategy
    target: ServerLatency
    drafter: ServerLatency
    lookahead: int = 1
    target_count: int = 1
    dispatch: DispatchPolicy = DispatchPolicy.WORK_CONSERVING
    broadcast_prefill: bool = False
    keep_prefill: bool = False
    shape: Shape = CHAIN
    guesses: OwnGuesses | None = None
    drafts_ahead: bool = False
    head_rates: tuple[float, ...] = ()

    @property
    def gpu_count(self) -> int:
        """Devices in use: one for each server, or one for all of them where they take turns."""
        return gpu_count(label_of(self.strategy, drafts_ahead=self.drafts_ahead), self.target_count)


def own_guesses(
    rates: Sequence[float], *, node_count: int, shares: tuple[float, ...]
) -> OwnGuesses | None:
    """Return guesses of these hit rates in the likeliest tree of a size; None without rates.

    Args:
        rates: See OwnGuesses.
        node_count: Guesses in a tree.
        shares: How likely each runner-up is right where the best guess is wrong; see ranks.py.
    """
    if not rates:
        return None
    by_rank = [hit_rates(rate, shares=shares, width=MOST_WIDTH) for rate in rates]
    return OwnGuesses(tuple(rates), likeliest_tree(by_rank, node_count=node_count))


def run_protocol(
    setup: Setup,
    *,
    acceptance_rate: float,
    max_tokens: int,
    seed: int = 0,
    shares: tuple[float, ...] | None = None,
) -> SimulationResult:
    """Generate max_tokens tokens; equal seeds meet equal agreements, whatever the setup."""
    length = _PROMPT_LENGTH + max_tokens
    oracle = (
        FeatureHeadOracle(setup.head_rates, seed=seed, length=length)
        if setup.head_rates
        else AgreementOracle(
            acceptance_rate, seed=seed, length=length, shares=shares, guesses=setup.guesses
        )
    )
    task = DecodingTask(
        oracle.prompt(_PROMPT_LENGTH),
        max_tokens,
        lookahead=setup.lookahead,
        dispatch=setup.dispatch,
        broadcast_prefill=setup.broadcast_prefill,
        keep_prefill=setup.keep_prefill,
        width=setup.shape.width,
        branches=setup.shape.branches,
        drafts_ahead=setup.drafts_ahead,
    )
    capacity = CapacityChanged(targets=tuple(range(setup.target_count)), drafters=(0,))
    return simulate(
        create_method(setup.strategy, task, capacity=capacity),
        oracle,
        targets=[setup.target] * setup.target_count,
        drafters=[setup.drafter],
    )


def draw_agreements(acceptance_rate: float, *, max_tokens: int, seed: int) -> list[bool]:
    """Tell at which positions after the prompt `run_protocol` finds the drafter right."""
    length = _PROMPT_LENGTH + max_tokens
    oracle = AgreementOracle(acceptance_rate, seed=seed, length=length)
    return [oracle.agrees(0, position) for position in range(_PROMPT_LENGTH, length)]


@dataclass(frozen=True, slots=True)
class Batch:
    """Generations to simulate.

    Attributes:
        setup: With what.
        acceptance_rate: Probability that the target accepts a draft token.
        max_tokens: Tokens of each.
        seeds: One for each.
        shares: How likely each runner-up is right where the first token is wrong; see ranks.py.
    """

    setup: Setup
    acceptance_rate: float
    max_tokens: int
    seeds: range
    shares: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Total:
    """What a generation took: the time, in the latencies' unit, and forwards of targets."""

    time: float
    target_forwards: int


def totals(batch: Batch) -> list[Total]:
    """Simulate each generation."""
    results = [
        run_protocol(
            batch.setup,
            acceptance_rate=batch.acceptance_rate,
            max_tokens=batch.max_tokens,
            seed=seed,
            shares=batch.shares,
        )
        for seed in batch.seeds
    ]
    return [Total(float(each.total_time), each.target_forwards) for each in results]


@dataclass(frozen=True, slots=True)
class Timed:
    """The times of simulated generations.

    Attributes:
        setup: What was simulated.
        times: The time of each generation, in the latencies' unit.
        target_forwards: Answered forwards of targets, in all.
    """

    setup: Setup
    times: tuple[float, ...]
    target_forwards: int

    @property
    def mean(self) -> float:
        """The mean time of a generation."""
        return statistics.mean(self.times)

    def over(self, rival: Timed) -> tuple[float, float]:
        """Return how many times as fast as a rival, and the standard error."""
        ratio = rival.mean / self.mean
        pairs = zip(rival.times, self.times, strict=True)
        _, error = mean_and_error([(theirs - ratio * ours) / self.mean for theirs, ours in pairs])
        return ratio, error


def time_batch(batch: Batch) -> Timed:
    """Simulate each generation, and keep its time."""
    found = totals(batch)
    forwards = sum(each.target_forwards for each in found)
    return Timed(batch.setup, tuple(each.time for each in found), forwards)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, which is 0 for a single value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.mean(values), error
