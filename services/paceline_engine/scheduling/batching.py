"""Which of the jobs that wait go into the next forward."""

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

# A longer rest of a prefix is a prefill, and is cut where others would wait for it.
_LONG_ROWS = 64
# How much less urgent work may slow down the most urgent.
_SLOWDOWN = 1.05
# With a part of a prefill a forward takes at most so many times as long as without.
_PREFILL_SLOWDOWN = 1.8
# While nobody else is there, a part of a prefill may take so long: who comes waits for it.
_ALONE_NS = 100_000_000
_LEAST_PART_ROWS = 8
# Where any part costs much, because a row reads all before it, shorter ones make the prompt last,
# and hardly disturb less: none has fewer rows than take such a part of that time at a short text.
_LEAST_PART_OF_TIME = 1 / 8
# Streams seen this recently are about to come back, as to a drafter after a verification.
_AWAY_NS = 300_000_000


def most_rows(meter: LatencyMeter, *, length: int, block_length: int, cuts_prompts: bool) -> int:
    """Return how many rows a forward has at most that computes a text, and others beside it.

    Args:
        meter: Knows what rows cost.
        length: Of the text, in tokens.
        block_length: How many of these are a proposal, which is not cut.
        cuts_prompts: Whether the model computes a long prompt in parts.
    """
    short_rows, ns_per_row = meter.most_rows(), meter.ns_per_row
    if not cuts_prompts or not ns_per_row:
        return short_rows + length
    part_ns = max(_ALONE_NS, (_PREFILL_SLOWDOWN - 1) * meter.cost_ns(short_rows))
    part_rows = max(_LEAST_PART_ROWS, int(part_ns / ns_per_row))
    return short_rows + min(length, part_rows + block_length)


class Batching:
    """Fills forwards.

    In the order of depth, then of fair turns, then of arrival, a forward gets

    - what is as urgent as the first: all of it, up to the rows with which the model gives most of
      the rows that it can give in a second;
    - what is less urgent, if that hardly slows it down, or if a forward has gone without it before;
    - of a prefill a part, so long that the forward takes less than twice as long; while no others
      are here a longer one, up to all of it;
    - if that was all of it, equally urgent further ones, as long as all of the next fits, too.

    Invariants:
        A job that waits is in the next forward but one, unless that is full of jobs before it in
        the order; a prefill is in each forward, or another one before it is
        (tests/unit/engine/test_batching.py).
    """

    def __init__(self, meter: LatencyMeter, turns: Turns) -> None:
        """Build it.

        Args:
            meter: Knows what rows cost.
            turns: Of the shares.
        """
        self._meter = meter
        self._turns = turns
        self._away_until_ns: WeakKeyDictionary[ModelCache, int] = WeakKeyDictionary()

    def choose(self, jobs: Sequence[Job], *, now_ns: int, shares_forwards: bool) -> Batch:
        """Choose from one job or more; they are left where they are.

        Args:
            now_ns: On the clock that measures forwards.
            shares_forwards: Whether the model computes several texts in one forward.
        """
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
            self._add_prefills(batch, row_count, prefills, now_ns=now_ns)
        return batch

    def _fill(self, order: Sequence[Job]) -> tuple[Batch, int, list[tuple[Job, int]]]:
        """Return what is short, and goes in whole; its rows; and prefills, with theirs."""
        batch, total, prefills = Batch([]), 0, []
        most_rows = self._meter.most_rows()
        urgent_ns = 0.0
        for job in order:
            assert isinstance(job.work, Item)
            rows = job.work.row_count()
            if rows - len(job.work.block) > _LONG_ROWS:
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
        self, batch: Batch, row_count: int, prefills: Sequence[tuple[Job, int]], *, now_ns: int
    ) -> None:
        first, rows = prefills[0]
        batch.jobs.append(first)
        room = self._part_rows(first, row_count, now_ns=now_ns)
        if rows > room:
            batch.row_limit = row_count + room
            return
        # Beyond these rows it would take as long in a forward of its own.
        room = min(room, self._meter.most_rows() - row_count)
        for job, more in prefills[1:]:
            rows += more
            if rows > room or job.urgency != first.urgency:
                return
            batch.jobs.append(job)

    def _part_rows(self, prefill: Job, row_count: int, *, now_ns: int) -> int:
        """Return how many rows of a prefill go into a forward that has some already."""
        allowed_ns: float = _ALONE_NS
        if row_count or self._expects_others(now_ns):
            allowed_ns = (_PREFILL_SLOWDOWN - 1) * self._meter.cost_ns(max(1, row_count))
        usual_ns = self._meter.ns_per_row
        ns_per_row = max(prefill.ns_per_row or 0.0, usual_ns)
        if not ns_per_row:
            return sys.maxsize
        least_rows = int(_LEAST_PART_OF_TIME * allowed_ns / usual_ns) if usual_ns else 0
        return max(_LEAST_PART_ROWS, least_rows, int(allowed_ns / ns_per_row))

    def _expects_others(self, now_ns: int) -> bool:
        """Whether a stream that was here shortly ago goes on."""
        away = self._away_until_ns.items()
        return any(now_ns < until_ns and not text.has_ended for text, until_ns in away)

    def learn(self, batch: Batch, row_counts: Sequence[int], *, forward_ns: int) -> None:
        """Take in what a forward took that had so many rows of each job."""
        self._meter.record(sum(row_counts), forward_ns)
        if batch.row_limit is not None and row_counts[-1] > _LEAST_PART_ROWS:
            others_ns = self._meter.cost_ns(sum(row_counts[:-1]))
            part_ns = max(0.0, forward_ns - others_ns)
            batch.jobs[-1].ns_per_row = part_ns / row_counts[-1]

    def _in_order(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Yield jobs as they are served: in a forward, too, shares take turns."""
        waiting: defaultdict[tuple[tuple[Rank, int], str], list[Job]] = defaultdict(list)
        for job in sorted(jobs, key=lambda job: -job.arrival):
            waiting[job.urgency, job.share].append(job)
        heads = [
            (urgency, self._turns.of(share), own[-1].arrival, share)
            for (urgency, share), own in waiting.items()
        ]
        heapq.heapify(heads)
        row_ns = max(1, round(self._meter.cost_ns(1)))
        while heads:
            urgency, clock, _, share = heads[0]
            own = waiting[urgency, share]
            yield own.pop()
            if own:
                heapq.heapreplace(heads, (urgency, clock + row_ns, own[-1].arrival, share))
            else:
                heapq.heappop(heads)
