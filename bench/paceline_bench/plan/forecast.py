"""What each strategy would take for somebody's own latencies, acceptance rate and targets.

The protocol runs on the virtual clock, dispatching as it does when it serves. Charged are forwards:
the first one of each server (the prompt's prefill) and the later ones, with what each further row
of them costs, and for each call what the latency says besides. The orchestrator takes no time, and
every server has hardware of its own. All strategies meet the same draws, so that luck cancels out
of their differences.

With all forwards as long as the later ones, the exact expectation over all draws is known (see
`expectations`; with a price for rows it is near). It chooses the lookahead, and it tells how lucky
the simulated draws are: that is taken out, so that a few generations are enough. Whether the prompt
goes to all targets at the start is simulated both ways, and the better one taken.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline_bench.gpus import gpu_count
from paceline_bench.plan.expectations import expectation_of
from paceline_bench.protocol_runs import Batch, Setup, draw_agreements, mean_and_error, totals
from paceline_bench.recurrences import run_lengths
from paceline_orchestrator.planning.equation import LOOKAHEADS
from paceline_protocol.draft_shape import CHAIN, Shape
from paceline_protocol.methods import METHODS, Method, Strategy, label_of

if TYPE_CHECKING:
    from paceline_bench.plan.jobs import ForecastJob

_LUCK_TOKENS = 256  # beyond, expectations take long, and luck evens out


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one strategy would take.

    Attributes:
        strategy: The method whose forecast this is.
        target_count: Targets at work.
        lookahead: The best one; 0 for plain decoding.
        times_ns: Of each generation, without its luck; those of equal place have equal draws.
        tokens_per_forward: Tokens for each target forward that was answered.
        shape: How wide drafts are.
        drafts_ahead: Whether SI's drafter goes on while the target verifies.
    """

    strategy: Strategy
    target_count: int
    lookahead: int
    times_ns: tuple[float, ...]
    tokens_per_forward: float
    shape: Shape = CHAIN
    drafts_ahead: bool = False

    @property
    def method(self) -> Method:
        """Its row in the table of methods."""
        return METHODS[self.strategy]

    @property
    def label(self) -> str:
        """What tables call it."""
        return label_of(self.strategy, drafts_ahead=self.drafts_ahead)

    @property
    def gpu_count(self) -> int:
        """Devices it needs: one for each server, or one for all of them where they take turns."""
        return gpu_count(self.label, self.target_count)

    @property
    def mean_ns(self) -> float:
        """The mean time of a generation."""
        return statistics.mean(self.times_ns)

    @property
    def error_ns(self) -> float:
        """The standard error of the mean."""
        return mean_and_error(self.times_ns)[1]

    def gain_over(self, rival: Forecast) -> tuple[float, float]:
        """Return by which part of the rival's time this is faster, and the standard error."""
        pairs = zip(rival.times_ns, self.times_ns, strict=True)
        mean, error = mean_and_error([theirs - ours for theirs, ours in pairs])
        return mean / rival.mean_ns, error / rival.mean_ns


def forecast(job: ForecastJob) -> Forecast:
    """Choose a lookahead and simulate: a second of work or a few."""
    method = METHODS[job.strategy]
    if not method.drafts:
        # What nobody guesses for takes the same time whatever is drawn.
        found = _simulate(job if method.self_drafts else replace(job, repeats=1), lookahead=1)
        times = found.times_ns if method.self_drafts else found.times_ns * job.repeats
        return Forecast(
            job.strategy,
            1,
            lookahead=0,
            times_ns=times,
            tokens_per_forward=found.tokens_per_forward,
        )
    if job.shape.width > 1:
        return _tree_forecast(job)
    lookahead = _best_lookahead(job)
    found = _simulate(job, lookahead=lookahead)
    pairs = zip(found.times_ns, _luck_ns(job, lookahead), strict=True)
    times = tuple(time - luck for time, luck in pairs)
    tokens, shape = found.tokens_per_forward, job.shape
    return Forecast(
        job.strategy,
        job.target_count,
        lookahead=lookahead,
        times_ns=times,
        tokens_per_forward=tokens,
        shape=shape,
        drafts_ahead=job.drafts_ahead,
    )


def _tree_forecast(job: ForecastJob) -> Forecast:
    """Simulate a tree beside its chain, whose luck is in its draws as well, in proportion."""
    chain_job = replace(job, shape=CHAIN)
    best = _best_lookahead(chain_job)
    found, lookahead = min(
        ((_simulate(job, lookahead=each), each) for each in sorted({1, (best + 1) // 2, best})),
        key=lambda timed: sum(timed[0].times_ns),
    )
    chain = _simulate(chain_job, lookahead=best)
    part = sum(found.times_ns) / sum(chain.times_ns)
    pairs = zip(found.times_ns, _luck_ns(chain_job, best), strict=True)
    own = tuple(time - part * luck for time, luck in pairs)
    tokens = found.tokens_per_forward
    return Forecast(
        job.strategy,
        job.target_count,
        lookahead=lookahead,
        times_ns=own,
        tokens_per_forward=tokens,
        shape=job.shape,
        drafts_ahead=job.drafts_ahead,
    )


@dataclass(frozen=True, slots=True)
class _Simulated:
    times_ns: tuple[float, ...]
    tokens_per_forward: float


def _simulate(job: ForecastJob, *, lookahead: int) -> _Simulated:
    target = job.servers.target
    setup = Setup(
        job.strategy,
        target,
        job.servers.drafter,
        lookahead=lookahead,
        target_count=job.target_count,
        keep_prefill=target.first > target.step,
        shape=job.shape,
        guesses=job.guesses,
        drafts_ahead=job.drafts_ahead,
    )
    both = [setup]
    if job.target_count > 1 and target.first > target.step:
        both.append(replace(setup, broadcast_prefill=True))
    seeds = range(job.repeats)
    found = [
        totals(
            Batch(
                each,
                job.servers.acceptance_rate,
                max_tokens=job.token_count,
                seeds=seeds,
                shares=job.shares,
            )
        )
        for each in both
    ]
    best = min(found, key=lambda own: sum(each.time for each in own))
    forwards = sum(each.target_forwards for each in best)
    times = tuple(each.time for each in best)
    return _Simulated(times, job.repeats * job.token_count / forwards)


def _best_lookahead(job: ForecastJob) -> int:
    expectation = expectation_of(job)
    if expectation is None:
        return min(
            LOOKAHEADS, key=lambda each: statistics.mean(_simulate(job, lookahead=each).times_ns)
        )
    candidates = expectation.lookaheads(job)
    if len(candidates) == 1:
        return candidates[0]
    shorter = replace(job, token_count=min(job.token_count, expectation.choice_tokens))
    return min(candidates, key=lambda each: expectation.mean_ns(shorter, each))


def _luck_ns(job: ForecastJob, lookahead: int) -> list[float]:
    """Return how much longer than expected each draw takes where all forwards are as the later.

    Where the prompt's forward is another one, and else the same, the draws have the same luck. So
    to subtract it leaves the mean as it is, and hardly an error: it is a control variate.
    """
    servers, tokens = job.servers, job.token_count
    expectation = expectation_of(job)
    if expectation is None or tokens > _LUCK_TOKENS or servers.drafter.step > servers.target.step:
        return [0.0] * job.repeats
    draws = [
        run_lengths(draw_agreements(servers.acceptance_rate, max_tokens=tokens, seed=seed))
        for seed in range(job.repeats)
    ]
    mean = expectation.mean_ns(job, lookahead)
    return [time - mean for time in expectation.times_ns(job, lookahead, draws)]
