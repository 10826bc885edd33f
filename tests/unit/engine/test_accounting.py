from __future__ import annotations

from array import array

import pytest

from paceline_engine.scheduling.accounting import Waste
from paceline_engine.scheduling.jobs import Batch, Job, Outlet
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import ANTICIPATED, Draft, Item


def job(*, withdrawn_ns: int | None = None, depth: int = 0) -> Job:
    work = Item(None, SessionSpec(1), array("I"), Draft(1), depth, None)
    return Job(work, Outlet(), "", withdrawn_ns=withdrawn_ns)


def batch(*jobs: Job) -> Batch:
    """Return a forward that begins at 1000 ns."""
    return Batch(list(jobs), started_ns=1000)


async def test_a_forward_is_freed_late_from_the_last_withdrawal_on():
    waste = Waste()
    waste.add(batch(job(withdrawn_ns=1100), job(withdrawn_ns=1300)), [1, 1], 1700)
    assert waste == Waste(forward_count=1, forward_ns=700, freeing_ns=400)


async def test_a_forward_that_was_withdrawn_before_it_began_is_freed_late_from_its_start_on():
    waste = Waste()
    waste.add(batch(job(withdrawn_ns=400)), [1], 1700)
    assert waste == Waste(forward_count=1, forward_ns=700, freeing_ns=700)


async def test_several_forwards_add_up():
    waste = Waste()
    for ended_ns in (1700, 1900):
        waste.add(batch(job(withdrawn_ns=1500)), [1], ended_ns)
    assert waste == Waste(forward_count=2, forward_ns=1600, freeing_ns=600)


async def test_a_withdrawn_job_wastes_the_part_of_a_forward_that_its_rows_took():
    waste = Waste()
    waste.add(batch(job(withdrawn_ns=1100), job()), [3, 1], 1800)
    assert waste == Waste(forward_ns=600)


@pytest.mark.parametrize(("row_counts", "wasted_ns"), [([0, 0], 800), ([1, 3], 0)])
async def test_an_interrupted_forward_is_waste_only_if_it_gave_nothing(row_counts, wasted_ns):
    waste, given_way = Waste(), batch(job(), job())
    given_way.interrupt.set()
    waste.add(given_way, row_counts, 1800)
    assert waste == Waste(forward_ns=wasted_ns)


async def test_what_was_computed_ahead_is_waste_once_nobody_will_ask_for_it():
    waste, ahead = Waste(), job(depth=ANTICIPATED)
    for _ in range(2):
        waste.add(batch(ahead, job()), [1, 3], 1800)
    assert waste == Waste()
    for _ in range(2):
        waste.add_unclaimed(ahead)
    assert waste == Waste(forward_ns=400)
