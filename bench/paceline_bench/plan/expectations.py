"""What is known exactly of a method's time, with all forwards as long as the later ones."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paceline_bench.protocol_runs import Setup
from paceline_bench.recurrences import (
    ahead_time,
    distributed_time,
    expected_ahead_time,
    expected_distributed_times,
    expected_speculative_forwards,
    speculative_time,
    stretches,
)
from paceline_contract.limits import MOST_LOOKAHEAD
from paceline_orchestrator.planning.equation import LOOKAHEADS, smallest_lookahead
from paceline_protocol.methods import Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_bench.plan.jobs import ForecastJob
    from paceline_bench.recurrences import Stretches
    from paceline_bench.simulated_servers import SimulatedServers


def expectation_of(job: ForecastJob) -> Expectation | None:
    """Return what is known of a job's method; None where every lookahead has to be simulated."""
    return _EXPECTATIONS.get((job.strategy, job.drafts_ahead))


class Expectation(Protocol):
    """What is known of one method.

    Attributes:
        choice_tokens: For how many tokens at most its lookahead is chosen: beyond, it takes long.
    """

    choice_tokens: int

    def lookaheads(self, job: ForecastJob) -> Sequence[int]:
        """Return what to choose from."""

    def mean_ns(self, job: ForecastJob, lookahead: int) -> float:
        """Return the mean over all draws."""

    def times_ns(
        self, job: ForecastJob, lookahead: int, draws: Sequence[list[int]]
    ) -> Sequence[float]:
        """Return what each draw takes, by its run lengths."""


class _Speculative:
    choice_tokens = sys.maxsize

    def lookaheads(self, job: ForecastJob) -> Sequence[int]:
        return range(1, min(job.token_count, MOST_LOOKAHEAD) + 1)

    def mean_ns(self, job: ForecastJob, lookahead: int) -> float:
        drafts, rounds = expected_speculative_forwards(
            np.array([job.servers.acceptance_rate]), lookahead=lookahead, max_tokens=job.token_count
        )
        drafting_ns = float(drafts[0]) * float(job.servers.drafter.step)
        return drafting_ns + float(rounds[0]) * _round_ns(job.servers, lookahead)

    def times_ns(
        self, job: ForecastJob, lookahead: int, draws: Sequence[list[int]]
    ) -> Sequence[float]:
        return [
            speculative_time(
                runs,
                lookahead=lookahead,
                target_step=_round_ns(job.servers, lookahead),
                drafter_step=int(job.servers.drafter.step),
            )
            for runs in draws
        ]


class _Ahead(_Speculative):
    """SI that drafts ahead; a drafter slower than the target never gets there."""

    def mean_ns(self, job: ForecastJob, lookahead: int) -> float:
        if job.servers.drafter.step > job.servers.target.step:
            return super().mean_ns(job, lookahead)
        return expected_ahead_time(
            job.servers.acceptance_rate,
            lookahead=lookahead,
            max_tokens=job.token_count,
            target_step=_round_ns(job.servers, lookahead),
            drafter_step=float(job.servers.drafter.step),
        )

    def times_ns(
        self, job: ForecastJob, lookahead: int, draws: Sequence[list[int]]
    ) -> Sequence[float]:
        return [
            ahead_time(
                runs,
                lookahead=lookahead,
                target_step=_round_ns(job.servers, lookahead),
                drafter_step=int(job.servers.drafter.step),
            )
            for runs in draws
        ]


class _Distributed:
    choice_tokens = 64

    def lookaheads(self, job: ForecastJob) -> Sequence[int]:
        """Return those up to the first lookahead with which no verification waits.

        A drafter slower than the target leaves no choice: there is never more than one to verify.
        """
        drafter_ns = int(job.servers.drafter.step)
        if drafter_ns > job.servers.target.step:
            return [1]
        feasible = smallest_lookahead(
            job.servers.verification_ns, drafter_ns, target_count=job.target_count
        )
        return [each for each in LOOKAHEADS if each < feasible] + [min(feasible, MOST_LOOKAHEAD)]

    def mean_ns(self, job: ForecastJob, lookahead: int) -> float:
        rate = np.array([job.servers.acceptance_rate])
        return float(expected_distributed_times(rate, self._stretches(job, lookahead))[0])

    def times_ns(
        self, job: ForecastJob, lookahead: int, draws: Sequence[list[int]]
    ) -> Sequence[float]:
        table = self._stretches(job, lookahead)
        return [distributed_time(runs, table) for runs in draws]

    def _stretches(self, job: ForecastJob, lookahead: int) -> Stretches:
        setup = Setup(
            job.strategy,
            replace(job.servers.target, first=job.servers.target.step),
            replace(job.servers.drafter, first=job.servers.drafter.step),
            lookahead=lookahead,
            target_count=job.target_count,
        )
        return stretches(setup, max_tokens=job.token_count)


_EXPECTATIONS: dict[tuple[Strategy, bool], Expectation] = {
    (Strategy.SPECULATIVE, False): _Speculative(),
    (Strategy.SPECULATIVE, True): _Ahead(),
    (Strategy.DISTRIBUTED, False): _Distributed(),
}


def _round_ns(servers: SimulatedServers, lookahead: int) -> int:
    """Return what a round of SI takes besides its drafting: the last one, at worst, less."""
    return int(servers.drafter.call + lookahead * servers.target.row) + servers.verification_ns
