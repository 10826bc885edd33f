"""Which jobs share a forward, on a clock that only forwards move."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest

from paceline_engine.scheduling.batching import Batching, most_rows
from paceline_engine.scheduling.fair_queue import Turns
from paceline_engine.scheduling.jobs import Batch, Job, Outlet
from paceline_engine.scheduling.latencies import LatencyMeter
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item, Judge
from unit.engine.conftest import chain

MILLISECOND = 1_000_000
# A forward of n rows, ms: with 20 rows it takes twice as long as with one.
FIXED_MS, ROW_MS = 1.9, 0.1


def forward_ns(rows: int) -> int:
    return round((FIXED_MS + ROW_MS * rows) * MILLISECOND)


class Missing:
    """A text of which so many tokens are to be computed."""

    def __init__(self, rows: int, stage: int) -> None:
        self.rows, self._stage = rows, stage
        self.has_ended = False

    def missing_length(self, _prefix: array[int]) -> int:
        return self.rows

    def stage(self, _prefix: array[int], *, draft_count: int) -> int:
        return self._stage


def job(
    rows: int = 1,
    *,
    depth: int = 0,
    share: str = "",
    block: int = 0,
    arrival: int = 0,
    stage: int = 0,
) -> Job:
    task = Judge(chain([0] * block)) if block else Draft()
    item = Item(
        Missing(rows, stage),
        SessionSpec(1, share=share),
        prefix=array("I", [0]),
        task=task,
        depth=depth,
    )
    return Job(item, Outlet(), share, arrival=arrival)


def measured() -> LatencyMeter:
    meter = LatencyMeter()
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for _ in range(16):
            meter.record(rows, forward_ns(rows))
    return meter


def batching(meter: LatencyMeter | None = None) -> Batching:
    return Batching(meter or measured(), Turns())


def chosen(
    jobs: list[Job], *, of: Batching | None = None, now_ms: float = 1000, layers: int = 0
) -> Batch:
    return (of or batching()).choose(
        jobs, now_ns=round(now_ms * MILLISECOND), shares_forwards=True, layer_count=layers
    )


def test_all_that_is_equally_urgent_shares_a_forward():
    jobs = [job(arrival=n) for n in range(64)]
    batch = chosen(jobs)
    assert batch.jobs == jobs
    assert batch.row_limit is None


def test_where_forwards_cannot_be_shared_each_job_has_its_own():
    jobs = [job(arrival=1), job(arrival=0)]
    batch = batching().choose(jobs, now_ns=0, shares_forwards=False)
    assert batch.jobs == [jobs[1]]


def test_a_forward_is_one_models_of_a_stack():
    jobs = [job(arrival=n, stage=stage) for n, stage in enumerate([1, 0, 1, 0])]
    assert chosen(jobs).jobs == [jobs[0], jobs[2]]
    assert chosen(jobs[1:]).jobs == [jobs[1], jobs[3]]


def test_a_forward_has_no_more_rows_than_make_it_worth_more():
    # 0.9 of the most rows a second, 10 a millisecond, come with 9 * 1.9 / 0.1 rows.
    jobs = [job(10, arrival=n) for n in range(40)]
    assert len(chosen(jobs).jobs) == 17


def test_one_job_may_have_more_rows_than_a_forward_should():
    meter = LatencyMeter()
    for rows in (1, 16):
        meter.record(rows, MILLISECOND * rows)
    assert meter.most_rows() == 16
    assert len(chosen([job(40), job(1, arrival=1)], of=batching(meter)).jobs) == 1


def test_less_urgent_work_rides_along_where_it_hardly_slows_down_the_urgent():
    urgent, rider, heavy = job(20), job(1, depth=1), job(8, depth=1, arrival=1)
    assert chosen([urgent, rider, heavy]).jobs == [urgent, rider]


def test_less_urgent_work_is_left_behind_once():
    waiting = job(8, depth=3)
    batches = batching()
    first = chosen([job(2), waiting], of=batches)
    assert waiting not in first.jobs
    assert waiting in chosen([job(2), waiting], of=batches).jobs


def test_what_is_less_urgent_runs_at_once_where_nothing_is_urgent():
    deep = [job(8, depth=5), job(8, depth=5, arrival=1)]
    assert chosen(deep).jobs == deep


@pytest.mark.parametrize(("layers", "rows"), [(0, 1000), (1, 1000), (3, 3000), (30, 5000)])
def test_a_prompt_alone_is_computed_in_longer_parts_where_they_can_give_way(layers, rows):
    """A layer of it takes at most 100 ms: so long a job that arrives may have to wait."""
    batch = chosen([job(9000)], layers=layers)
    assert batch.row_limit == rows
    assert batch.expected_ns == (rows * 100_000 if layers > 1 else None)


def test_a_prompt_that_fits_whole_gives_way_too():
    batch = chosen([job(4000)], layers=30)
    assert (batch.row_limit, batch.expected_ns) == (None, 400 * MILLISECOND)
    assert chosen([job(900)], layers=30).expected_ns is None, "it ends soon anyway"


def test_a_prompt_before_another_is_computed_in_short_parts():
    """Giving way to each of them in turn would lose most of the work."""
    batch = chosen([job(9000), job(9000, arrival=1)], layers=30)
    assert (batch.row_limit, batch.expected_ns) == (1000, None)


def test_a_prompt_whose_streams_come_back_soon_gets_no_long_part():
    batches, stream = batching(), job()
    chosen([stream], of=batches, now_ms=1000)
    batch = chosen([job(9000)], of=batches, now_ms=1200, layers=30)
    assert batch.row_limit < 20
    assert batch.expected_ns is None


def test_beside_others_a_part_of_a_prompt_makes_their_forward_less_than_twice_as_long():
    prompt, others = job(5000), [job(arrival=n + 1) for n in range(3)]
    batch = chosen([prompt, *others])
    assert batch.jobs == [*others, prompt], "the last one is cut"
    assert forward_ns(batch.row_limit) <= 1.81 * forward_ns(3)
    assert batch.row_limit - 3 >= 16


def test_beside_others_the_rest_of_a_prompt_is_computed_in_parts_too():
    """A forward with all of the last 64 rows would take four times as long as the others'."""
    batches, prompt, other = batching(), job(100), job(arrival=1)
    taken = []
    while prompt.work.cache.rows:
        batch = chosen([prompt, other], of=batches)
        assert prompt in batch.jobs
        rows = prompt.work.cache.rows if batch.row_limit is None else batch.row_limit - 1
        assert forward_ns(rows + 1) <= 1.81 * forward_ns(1)
        taken.append(rows)
        prompt.work.cache.rows -= rows
    assert sum(taken) == 100


def test_the_rest_of_a_prompt_is_whole_once_it_is_alone():
    batches, prompt = batching(), job(100)
    chosen([prompt, job(arrival=1)], of=batches)
    prompt.work.cache.rows = 60
    assert chosen([prompt], of=batches, now_ms=2000).row_limit is None


def test_streams_that_were_here_a_moment_ago_are_not_locked_out_by_a_prompt():
    batches = batching()
    stream = job()
    chosen([stream], of=batches, now_ms=1000)
    assert chosen([job(5000)], of=batches, now_ms=1200).row_limit < 20
    assert chosen([job(5000)], of=batches, now_ms=1301).row_limit == 1000


def test_streams_that_have_ended_are_not_waited_for():
    batches, stream, other = batching(), job(), job()
    chosen([stream, other], of=batches, now_ms=1000)
    stream.work.cache.has_ended = True
    assert chosen([job(5000)], of=batches, now_ms=1001).row_limit < 20
    other.work.cache.has_ended = True
    assert chosen([job(5000)], of=batches, now_ms=1002).row_limit == 1000


def test_parts_get_shorter_where_a_longer_text_makes_rows_slower():
    batches, prompt, stream = batching(), job(5000), job(arrival=1)
    first = chosen([prompt, stream], of=batches)
    rows = first.row_limit - 1
    batches.learn(first, [1, rows], forward_ns=forward_ns(1) + rows * MILLISECOND)
    second = chosen([prompt, stream], of=batches)
    assert (second.row_limit - 1) * MILLISECOND <= 0.81 * forward_ns(1) or second.row_limit == 9


def test_where_any_part_costs_much_parts_are_not_the_shortest():
    """Its rows take 0.01 ms and a part 20 ms more: 40 rows disturb hardly more than 8."""
    meter = measured()
    meter.record_prefills((64, MILLISECOND), (164, 2 * MILLISECOND))
    batches, prompt, stream = batching(meter), job(5000), job(arrival=1)
    for _ in range(5):
        part = chosen([prompt, stream], of=batches)
        rows = part.row_limit - 1
        batches.learn(part, [1, rows], forward_ns=forward_ns(1) + 20 * MILLISECOND + rows * 10_000)
    assert rows == 20, "an eighth of 1.6 ms"


def test_a_long_block_is_no_prompt():
    """Only a prefix can be computed in parts: a block that were cut would never be judged."""
    long = job(1, block=100)
    assert chosen([long, job(arrival=1)]).row_limit is None


def test_of_two_prompts_the_first_is_finished_first():
    early, late = job(5000, arrival=1), job(300, arrival=2)
    assert chosen([late, early]).jobs == [early]


def roomy() -> Batching:
    """Rows cost so little that a forward may have a thousand."""
    meter = LatencyMeter()
    for rows in (1, 16, 64):
        meter.record(rows, 20 * MILLISECOND + rows * MILLISECOND // 50)
    return batching(meter)


def test_prompts_that_fit_share_a_forward():
    prompts = [job(300, arrival=n) for n in range(4)]
    batch = chosen(prompts, of=roomy())
    assert batch.jobs == prompts[:3], "1200 rows are more than make a forward worth more"
    assert batch.row_limit is None


def test_further_prompts_make_a_forward_less_than_twice_as_long_for_others():
    prompts = [job(100, arrival=n) for n in range(9)]
    batch = chosen([job(arrival=9), *prompts], of=roomy())
    assert len(batch.jobs) == 1 + 8, "0.8 times 20.02 ms, at 0.02 ms a row"
    assert batch.row_limit is None


def test_a_prompt_that_is_less_urgent_does_not_make_the_first_one_wait():
    prompts = [job(300), job(300, depth=1, arrival=1)]
    assert chosen(prompts, of=roomy()).jobs == prompts[:1]


def test_where_rows_cost_much_each_prompt_has_its_own_forward():
    prompts = [job(100, arrival=n) for n in range(3)]
    assert chosen(prompts).jobs == prompts[:1]


def test_before_anything_is_measured_nothing_is_held_back():
    jobs = [job(5000), *(job(depth=n % 3, arrival=n + 1) for n in range(20))]
    batch = chosen(jobs, of=batching(LatencyMeter()))
    assert len(batch.jobs) == 21


def test_shares_take_turns_within_a_forward():
    greedy = [job(10, share="greedy", arrival=n) for n in range(30)]
    modest = [job(10, share="modest", arrival=100 + n) for n in range(3)]
    batch = chosen(greedy + modest)
    assert set(modest) <= set(batch.jobs)
    assert len(batch.jobs) == 17


@dataclass
class World:
    """Jobs that come, go and are computed; forwards take what they cost."""

    chance: random.Random
    batches: Batching = field(default_factory=batching)
    now_ns: int = 0
    waiting: list[Job] = field(default_factory=list)
    since: dict[int, int] = field(default_factory=dict)
    arrivals: int = 0
    rows: int = 0
    ended: list[Job] = field(default_factory=list)

    def come(self) -> None:
        rows = self.chance.choice([1, 1, 1, 2, 5, 9, 300, 2000])
        new = job(
            rows,
            depth=self.chance.choice([0, 0, 0, 1, 2, 5]),
            share=self.chance.choice("abc"),
            arrival=self.arrivals,
        )
        self.arrivals += 1
        self.since[id(new)] = 0
        self.waiting.append(new)

    def forward(self) -> Batch:
        batch = self.batches.choose(self.waiting, now_ns=self.now_ns, shares_forwards=True)
        left, counts = batch.row_limit, []
        for each in batch.jobs:
            counts.append(
                each.work.row_count() if left is None else min(left, each.work.row_count())
            )
            left = None if left is None else left - counts[-1]
        took_ns = forward_ns(sum(counts))
        self.rows = sum(rows for rows in counts if rows <= 64)
        self.now_ns += took_ns
        self.batches.learn(batch, counts, forward_ns=took_ns)
        for each, rows in zip(batch.jobs, counts, strict=True):
            each.work.cache.rows -= rows
            if not each.work.cache.rows:
                self.waiting.remove(each)
                self.ended.append(each)
        for each in self.waiting:
            self.since[id(each)] = 0 if each in batch.jobs else self.since[id(each)] + 1
        return batch


@pytest.mark.parametrize("seed", range(10))
def test_nobody_starves_and_nobody_is_served_twice(seed):
    world = World(random.Random(seed))
    for _ in range(400):
        while world.chance.random() < 0.7:
            world.come()
        if not world.waiting:
            continue
        before = list(world.waiting)
        batch = world.forward()
        assert len({id(each) for each in batch.jobs}) == len(batch.jobs)
        assert all(each in before for each in batch.jobs)
        room = world.batches._meter.most_rows() - world.rows
        for each in world.waiting:
            is_short = each.work.row_count() <= 64
            if is_short and world.since[id(each)] > 1:
                assert each.work.row_count() > room, "it was left out twice although it fits"
    arrived = world.arrivals
    while world.waiting:
        world.forward()
    assert len(world.ended) == arrived == len({id(each) for each in world.ended})


# --- how many rows a forward can have -----------------------------------------------------------


def most(meter: LatencyMeter, length: int, *, block: int = 0, cuts: bool = True) -> int:
    return most_rows(meter, length=length, block_length=block, cuts_prompts=cuts)


def slow() -> LatencyMeter:
    """Rows cost so much that a prompt's parts have few of them."""
    meter = LatencyMeter()
    for rows in (1, 16, 64):
        meter.record(rows, 100 * MILLISECOND + rows * 20 * MILLISECOND)
    return meter


def test_a_prompt_that_is_cut_adds_a_part_of_it_to_a_forward():
    assert most(measured(), 131_072) == most(measured(), 8192) == 171 + 5000
    assert most(measured(), 10) == 171 + 10
    assert most(measured(), 8192, block=64) == 171 + 5064


def test_a_prompt_that_is_not_cut_is_all_in_one_forward():
    assert most(measured(), 131_072, cuts=False) == 171 + 131_072
    unmeasured = LatencyMeter()
    assert chosen([job(131_072)], of=batching(unmeasured)).row_limit is None
    assert most(unmeasured, 131_072) >= 131_072


@pytest.mark.parametrize(
    "meter", [measured, slow, lambda: roomy()._meter], ids=["measured", "slow", "roomy"]
)
@pytest.mark.parametrize("seed", range(20))
def test_no_forward_has_more_rows_than_are_said(meter, seed):
    chance, meter = random.Random(seed), meter()
    batches = batching(meter)
    for _ in range(20):
        jobs = [
            job(chance.choice([1, 1, 40, 300, 9000]), block=chance.choice([0, 5]), arrival=n)
            for n in range(chance.randint(1, 60))
        ]
        batch = chosen(jobs, of=batches, layers=chance.choice([0, 3, 30]))
        rows = sum(each.work.row_count() for each in batch.jobs)
        longest = max(each.work.row_count() for each in batch.jobs)
        # A short call whose rows alone are more than pay is computed all the same.
        assert min(rows, batch.row_limit or rows) <= most(meter, longest, block=5) + 64
