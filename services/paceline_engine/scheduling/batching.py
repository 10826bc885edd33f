"""Chooses which waiting jobs go into the next forward."""

from __future__ import annotations

import heapq
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from paceline_engine.scheduling.jobs import Batch
from paceline_engine.terms.items import Item

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_engine.scheduling.fair_queue import Turns
    from paceline_engine.scheduling.jobs import Job, Rank
    from paceline_engine.scheduling.latencies import LatencyMeter
    from paceline_engine.terms.model_cache import ModelCache

# A prefix with more missing rows is a prefill, and is cut if other jobs would wait for it. Up to so
# many are computed whole: beside a stream on a CPU that takes two to four times as long as the
# stream's own row, once. In parts its first token would come later, and later still where many
# short prompts come at once (bench/LOG.md).
_LONG_ROWS = 64
# By how much less urgent jobs may slow the most urgent ones down.
_SLOWDOWN = 1.05
# With a part of a prefill a forward takes at most so many times as long as without.
_PREFILL_SLOWDOWN = 1.8
# While no other jobs wait, a part of a prefill may take so long: a job that arrives waits for it.
ALONE_NS = 100_000_000
# A part that can be given up between layers may take so many times as long, as it gives way to a
# job that arrives. On a CPU a product of few rows is slow, so short parts double the time of a
# prompt (bench/LOG.md). More would lose more work, and gain nothing.
_GIVING_WAY_PARTS = 5
_LEAST_PART_ROWS = 8
# At a long sequence each part costs much, because a row reads all tokens before it. Shorter parts
# would delay the prompt and hardly disturb others less. So a part has at least as many rows as take
# this part of the allowed time at a short sequence.
_LEAST_PART_OF_TIME = 1 / 8
# Sequences that were in a forward so recently are expected back, as after a verification.
_AWAY_NS = 300_000_000


def most_rows(meter: LatencyMeter, *, length: int, block_length: int, cuts_prompts: bool) -> int:
    """Return the most rows of a forward that computes one sequence and short ones beside it.

    Args:
        meter: Knows what rows cost.
        length: The sequence's length in tokens.
        block_length: How many of these tokens are a proposal, which is not cut.
        cuts_prompts: Whether the model computes a long prompt in parts.
    """
    short_rows, ns_per_row = meter.most_rows(), meter.ns_per_row
    if not cuts_prompts or not ns_per_row:
        return short_rows + length
    part_ns = max(_GIVING_WAY_PARTS * ALONE_NS, (_PREFILL_SLOWDOWN - 1) * meter.cost_ns(short_rows))
    part_rows = max(_LEAST_PART_ROWS, int(part_ns / ns_per_row))
    return short_rows + min(length, part_rows + block_length)


class Batching:
    """Fills forwards.

    Jobs are ordered by urgency, then by fair turns, then by arrival. In this order a forward gets

    - all jobs as urgent as the first, up to the rows that give 90 % of the most rows per second
      (`LatencyMeter.most_rows`);
    - less urgent jobs that hardly slow the forward down, or that an earlier forward passed over;
    - a part of one prefill, also of its last rows, short enough that the forward takes less than
      twice as long; if no other jobs are here, a longer part or all of it, which gives way to a job
      that arrives (`ModelWorker`) unless it ends soon;
    - further prefills of the same urgency, if the first one is whole and the next one fits whole.

    Args:
        meter: Knows what rows cost.
        turns: The shares' turns.

    Invariants:
        A job waits for at most one forward, unless the next one is full of jobs before it in the
        order. Each forward has a part of the first waiting prefill
        (tests/unit/engine/test_batching.py).
    """

    def __init__(self, meter: LatencyMeter, turns: Turns) -> None:
        self._meter = meter
        self._turns = turns
        self._away_until_ns: WeakKeyDictionary[ModelCache, int] = WeakKeyDictionary()

    def choose(
        self, jobs: Sequence[Job], *, now_ns: int, shares_forwards: bool, layer_count: int = 0
    ) -> Batch:
        """Choose a batch from one job or more; the list of jobs is not changed.

        Args:
            now_ns: The time on the clock that measures forwards.
            shares_forwards: Whether the model computes several sequences in one forward.
            layer_count: The layers between which a forward can be given up; 0: it cannot.
        """
        is_alone = len(jobs) == 1
        order = list(self._in_order(jobs))
        first = order[0]
        if not isinstance(first.work, Item):
            return Batch([first])
        if not shares_forwards:
            order = [first]
        stage = first.work.stage
        order = [job for job in order if isinstance(job.work, Item) and job.work.stage == stage]
        batch, row_count, prefills = self._fill(order)
        for job in batch.jobs:
            self._away_until_ns[cast("Item", job.work).cache] = now_ns + _AWAY_NS
        if prefills:
            parts = max(1, min(_GIVING_WAY_PARTS, layer_count)) if is_alone else 1
            self._add_prefills(batch, row_count, prefills, now_ns=now_ns, parts=parts)
        return batch

    def _fill(self, order: Sequence[Job]) -> tuple[Batch, int, list[tuple[Job, int]]]:
        """Return a batch of short jobs, its rows, and the prefills with their rows."""
        batch, total, prefills = Batch([]), 0, []
        most_rows = self._meter.most_rows()
        urgent_ns = 0.0
        for job in order:
            assert isinstance(job.work, Item)
            rows = job.work.row_count()
            # The rest of a prompt is computed in parts as short as the ones before it.
            long_rows = _LEAST_PART_ROWS if job.was_cut else _LONG_ROWS
            if rows - len(job.work.block) > long_rows:
                prefills.append((job, rows))
                continue
            fits = not batch.jobs or total + rows <= most_rows
            if job.urgency == order[0].urgency:
                urgent_ns = self._meter.cost_ns(total + rows)
            elif fits and not job.was_passed_over:
                fits = self._meter.cost_ns(total + rows) <= _SLOWDOWN * urgent_ns
            if fits:
                batch.jobs.append(job)
                total += rows
            else:
                job.was_passed_over = True
        return batch, total, prefills

    def _add_prefills(
        self,
        batch: Batch,
        row_count: int,
        prefills: Sequence[tuple[Job, int]],
        *,
        now_ns: int,
        parts: int,
    ) -> None:
        first, rows = prefills[0]
        batch.jobs.append(first)
        room = self._part_rows(first, row_count, now_ns=now_ns, parts=parts)
        expected_ns = round(min(rows, room) * self._ns_per_row(first))
        if parts > 1 and expected_ns > ALONE_NS:
            batch.expected_ns = expected_ns
        if rows > room:
            batch.row_limit = row_count + room
            first.was_cut = True
            return
        # With more rows a prefill gains nothing over a forward of its own.
        room = min(room, self._meter.most_rows() - row_count)
        for job, more in prefills[1:]:
            rows += more
            if rows > room or job.urgency != first.urgency:
                return
            batch.jobs.append(job)

    def _ns_per_row(self, prefill: Job) -> float:
        return max(prefill.ns_per_row or 0.0, self._meter.ns_per_row)

    def _part_rows(self, prefill: Job, row_count: int, *, now_ns: int, parts: int) -> int:
        """Return how many rows of a prefill go into a forward that has other rows already."""
        allowed_ns: float = parts * ALONE_NS
        if row_count or self._expects_others(now_ns):
            allowed_ns = (_PREFILL_SLOWDOWN - 1) * self._meter.cost_ns(max(1, row_count))
        usual_ns, ns_per_row = self._meter.ns_per_row, self._ns_per_row(prefill)
        if not ns_per_row:
            return sys.maxsize
        least_rows = int(_LEAST_PART_OF_TIME * allowed_ns / usual_ns) if usual_ns else 0
        return max(_LEAST_PART_ROWS, least_rows, int(allowed_ns / ns_per_row))

    def _expects_others(self, now_ns: int) -> bool:
        """Whether a sequence that was in a forward recently may come back."""
        away = self._away_until_ns.items()
        return any(now_ns < until_ns and not text.has_ended for text, until_ns in away)

    def learn(self, batch: Batch, row_counts: Sequence[int], *, forward_ns: int) -> None:
        """Record the time of a forward with so many rows of each job."""
        self._meter.record(sum(row_counts), forward_ns)
        if batch.row_limit is not None and row_counts[-1] > _LEAST_PART_ROWS:
            others_ns = self._meter.cost_ns(sum(row_counts[:-1]))
            part_ns = max(0.0, forward_ns - others_ns)
            batch.jobs[-1].ns_per_row = part_ns / row_counts[-1]

    def _in_order(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Yield jobs in the order of service: shares take turns within a forward, too."""
        waiting: defaultdict[tuple[tuple[Rank, int], str], list[Job]] = defaultdict(list)
        for job in sorted(jobs, key=lambda job: -job.arrival):
            waiting[job.urgency, job.share].append(job)
        heads = [
            (urgency, self._turns.of(share), share_jobs[-1].arrival, share)
            for (urgency, share), share_jobs in waiting.items()
        ]
        heapq.heapify(heads)
        row_ns = max(1, round(self._meter.cost_ns(1)))
        while heads:
            urgency, clock, _, share = heads[0]
            share_jobs = waiting[urgency, share]
            yield share_jobs.pop()
            if share_jobs:
                heapq.heapreplace(heads, (urgency, clock + row_ns, share_jobs[-1].arrival, share))
            else:
                heapq.heappop(heads)
