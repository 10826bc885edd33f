from __future__ import annotations

from array import array

import pytest

from paceline_engine.scheduling.accounting import Waste
from paceline_engine.scheduling.jobs import Batch, Job, Outlet
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item


def job(*, withdrawn_ns: int | None = None, is_anticipated: bool = False) -> Job:
    work = Item(
        None, SessionSpec(1), prefix=array("I"), task=Draft(1), is_anticipated=is_anticipated
    )
    return Job(work, Outlet(), "", withdrawn_ns=withdrawn_ns)


def batch(*jobs: Job) -> Batch:
    """Return a forward that begins at 1000 ns."""
    return Batch(list(jobs), started_ns=1000)


async def test_a_forward_is_freed_late_from_the_last_withdrawal_on():
    waste = Waste()
    waste.add(
        batch(job(withdrawn_ns=1100), job(withdrawn_ns=1300)), row_counts=[1, 1], ended_ns=1700
    )
    assert waste == Waste(forward_count=1, forward_ns=700, freeing_ns=400)


async def test_a_forward_that_was_withdrawn_before_it_began_is_freed_late_from_its_start_on():
    waste = Waste()
    waste.add(batch(job(withdrawn_ns=400)), row_counts=[1], ended_ns=1700)
    assert waste == Waste(forward_count=1, forward_ns=700, freeing_ns=700)


async def test_several_forwards_add_up():
    waste = Waste()
    for ended_ns in (1700, 1900):
        waste.add(batch(job(withdrawn_ns=1500)), row_counts=[1], ended_ns=ended_ns)
    assert waste == Waste(forward_count=2, forward_ns=1600, freeing_ns=600)


async def test_a_withdrawn_job_wastes_the_part_of_a_forward_that_its_rows_took():
    waste = Waste()
    waste.add(batch(job(withdrawn_ns=1100), job()), row_counts=[3, 1], ended_ns=1800)
    assert waste == Waste(forward_ns=600)


@pytest.mark.parametrize(("row_counts", "wasted_ns"), [([0, 0], 800), ([1, 3], 0)])
async def test_an_interrupted_forward_is_waste_only_if_it_gave_nothing(row_counts, wasted_ns):
    waste, given_way = Waste(), batch(job(), job())
    given_way.interrupt.set()
    waste.add(given_way, row_counts=row_counts, ended_ns=1800)
    assert waste == Waste(forward_ns=wasted_ns)


async def test_what_was_computed_ahead_is_waste_once_nobody_will_ask_for_it():
    waste, ahead = Waste(), job(is_anticipated=True)
    for _ in range(2):
        waste.add(batch(ahead, job()), row_counts=[1, 3], ended_ns=1800)
    assert waste == Waste()
    for _ in range(2):
        waste.add_unclaimed(ahead)
    assert waste == Waste(forward_ns=400)
