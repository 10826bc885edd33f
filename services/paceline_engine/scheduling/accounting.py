"""A host's limits and its statistics."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_engine.scheduling.jobs import Batch, Job
    from paceline_engine.terms.items import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """A host's limits.

    Attributes:
        session_limit: Sessions that can be open at once.
        token_budget: Tokens that all of them together can reserve.
        fits_memory: Whether to lower the budget to the free memory, once the model is warm.
        queue_limit: Calls that can wait for the model.
        keep_seconds: How long an ended session's sequence is kept for sessions that begin alike.
        reap_seconds: The time between two searches for sessions whose lease is over.
        warm_up_rounds: How often each forward size is measured before serving. 0: not at all.
    """

    session_limit: int = 64
    token_budget: int = 1 << 17
    fits_memory: bool = False
    queue_limit: int = 256
    keep_seconds: float = 0.0
    reap_seconds: float = 1.0
    warm_up_rounds: int = 3


@dataclass(slots=True)
class HostStatistics:
    """Counts since the start, and the first six as they are now.

    Attributes:
        model_forwards: For each model of a stack its name, and how many forwards it ran.
        guesses_proposed: Tokens that the model itself proposed with verdicts.
        guesses_judged: Tokens of proposals in calls that asked for the model's own guesses.
        guesses_pruned: Judged guesses that were not computed to the end.
        guesses_accepted: Judged guesses that were accepted.
    """

    sessions_open: int = 0
    tokens_reserved: int = 0
    tokens_kept: int = 0
    calls_live: int = 0
    queue_length: int = 0
    forwards_running: int = 0

    sessions_opened: int = 0
    sessions_released: int = 0
    sessions_expired: int = 0
    tokens_reused: int = 0
    forwards: int = 0
    items: int = 0
    rows: int = 0
    prefill_parts: int = 0
    forwards_interrupted: int = 0
    forwards_wasted: int = 0
    wasted_ns: int = 0
    freeing_ns: int = 0
    layers_run: int = 0
    verify_calls: int = 0
    decode_calls: int = 0
    draft_calls: int = 0
    calls_refused: int = 0
    calls_adopted: int = 0
    calls_anticipated: int = 0
    calls_superseded: int = 0
    calls_cancelled: int = 0
    draft_tokens: int = 0
    forced_tokens: int = 0
    judged_tokens: int = 0
    accepted_tokens: int = 0
    guesses_proposed: int = 0
    guesses_judged: int = 0
    guesses_pruned: int = 0
    guesses_accepted: int = 0
    model_forwards: tuple[tuple[str, int], ...] = ()

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Count a call that is refused in here."""
        try:
            yield
        except PacelineError:
            self.calls_refused += 1
            raise

    def count_forward(self, outcomes: Sequence[Outcome]) -> None:
        """Count a forward that ran to its end, and what it gave."""
        self.forwards += 1
        self.items += len(outcomes)
        self.rows += sum(outcome.row_count for outcome in outcomes)
        self.prefill_parts += sum(not outcome.is_whole for outcome in outcomes)

    def count_guesses(self, outcome: Outcome, *, judged_count: int) -> None:
        """Count a judgement of so many tokens that came with a proposal of the model's own."""
        judgement = outcome.judgement
        assert judgement is not None, "a judgement is counted"
        self.guesses_proposed += len(judgement.proposal)
        self.guesses_judged += judged_count
        self.guesses_pruned += outcome.dropped_count
        self.guesses_accepted += len(judgement.accepted_path)


@dataclass(slots=True)
class Waste:
    """The time of forwards, or parts of forwards, that no caller waited for at their end.

    Attributes:
        forward_count: Forwards whose jobs were all withdrawn while the forward ran.
        forward_ns: The time of these forwards, and of anticipated forwards that gave way to a call.
            For other forwards the withdrawn rows' part of the time.
        freeing_ns: How long forwards went on after their last job was withdrawn.
    """

    forward_count: int = 0
    forward_ns: int = 0
    freeing_ns: int = 0

    def add(self, batch: Batch, *, row_counts: Sequence[int], ended_ns: int) -> None:
        """Add a forward that has ended, with its number of rows of each job."""
        forward_ns = ended_ns - batch.started_ns
        if batch.is_unwanted:
            self.forward_ns += forward_ns
            withdrawn_ns = max(job.withdrawn_ns or 0 for job in batch.jobs)
            self.forward_count += 1
            self.freeing_ns += ended_ns - max(batch.started_ns, withdrawn_ns)
        elif batch.interrupt.is_set() and not any(row_counts):
            self.forward_ns += forward_ns  # it starts again
        else:
            for job, rows in zip(batch.jobs, row_counts, strict=True):
                self._add_part(job, forward_ns * rows // max(1, sum(row_counts)))

    def add_unclaimed(self, job: Job) -> None:
        """Add the time of an anticipated job that no call will ask for."""
        self.forward_ns += job.unclaimed_ns
        job.unclaimed_ns = 0

    def _add_part(self, job: Job, part_ns: int) -> None:
        if job.withdrawn_ns is not None:
            self.forward_ns += part_ns
        elif job.is_anticipated:
            job.unclaimed_ns += part_ns
