"""What a soak asks for, what it makes of what it has seen, and how it tells of it."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from dataclasses import replace
from itertools import islice
from mmap import ACCESS_READ, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import pytest

from paceline import Strategy
from paceline_bench.soak.rounds import (
    Reading,
    Soak,
    Watched,
    _read,
    growth,
    references,
    requests,
    soak,
)
from paceline_bench.soak.tables import LOG_MARK, Soaked, add_to_log, log_line, record, soak_table
from support.virtual_time import virtually

PLAN = Soak(
    request_count=5,
    warm_up_count=2,
    round_size=2,
    stream_count=2,
    max_tokens=3,
    leaving_share=0.25,
    seed=1,
)
READING = Reading(
    request_count=0,
    own_bytes=40 << 20,
    resident_bytes=60 << 20,
    descriptor_count=19,
    thread_count=14,
    task_count=22,
    session_count=None,
)


def readings(bytes_per_request, *, start=READING):
    return [
        replace(start, request_count=count, own_bytes=start.own_bytes + bytes_per_request * count)
        for count in range(0, 5000, 1000)
    ]


def soaked(bytes_per_request, **changes):
    found = Soaked(
        plan=PLAN,
        readings={"orchestrator": readings(bytes_per_request), "client": readings(7)},
        wrong_count=0,
        limit=100.0,
    )
    return replace(found, **changes)


class Chunk:
    def __init__(self, token_ids):
        self.token_ids = token_ids


class Generation:
    """Two chunks; the last token is wrong if the prompt is in `wrong`."""

    def __init__(self, client, prompt, options):
        self._client = client
        last = 99 if prompt in client.wrong and options["strategy"] != "autoregressive" else 3
        self._chunks = [Chunk((1, 2)), Chunk((last,))]
        self.token_ids = (1, 2, last)

    async def __aenter__(self):
        self._client.running += 1
        self._client.most = max(self._client.most, self._client.running)
        return self

    async def __aexit__(self, *_):
        self._client.running -= 1

    async def __aiter__(self):
        for chunk in self._chunks:
            await asyncio.sleep(self._client.delay_seconds)
            self._client.chunk_count += 1
            yield chunk

    async def collect(self):
        return self


class Client:
    def __init__(self, wrong=()):
        self.wrong = wrong
        self.asked = []
        self.running = self.most = self.chunk_count = 0
        self.delay_seconds = 0.0

    def generate(self, prompt, **options):
        self.asked.append((prompt, options))
        return Generation(self, prompt, options)


async def run(client, plan=PLAN):
    me = Watched("client", os.getpid())
    expected = await references(client, plan)
    client.asked.clear()
    client.chunk_count = 0
    return [each async for each in soak(client, plan, watched=[me], expected=expected)]


def test_the_requests_follow_from_the_seed_alone():
    first, second = (list(islice(requests(PLAN), 100)) for _ in range(2))
    assert first == second
    assert first != list(islice(requests(replace(PLAN, seed=2)), 100))


def test_requests_are_of_every_kind():
    some = list(islice(requests(PLAN), 400))
    counts = Counter(it.strategy for it in some).values()
    assert max(counts) - min(counts) <= 1
    assert len({it.sampling for it in some}) == 32
    # Binomial: 5 standard deviations to each side, a false alarm in 2 million seeds; one is tried.
    assert 57 <= sum(it.leaves for it in some) <= 143
    assert not any(it.leaves for it in islice(requests(replace(PLAN, leaving_share=0)), 400))


async def test_a_soak_is_read_after_its_warm_up_and_after_each_round():
    client = Client()
    looks = await run(client)
    assert [(it[0].request_count, wrong) for it, wrong in looks] == [(0, 0), (2, 0), (4, 0), (5, 0)]
    assert len(client.asked) == 7
    assert all(look[0].own_bytes > 0 and look[0].descriptor_count > 0 for look, _ in looks)
    assert {options["strategy"] for _, options in client.asked} == set(Strategy) - {
        Strategy.UNKNOWN,
        Strategy.SELF_SPECULATIVE,  # needs a target that drafts for itself
    }
    assert client.running == 0


def test_requests_can_be_of_some_strategies_only():
    some = list(islice(requests(replace(PLAN, strategies=(Strategy.DISTRIBUTED,))), 50))
    assert {it.strategy for it in some} == {Strategy.DISTRIBUTED}


async def test_wrong_outputs_are_counted():
    everything = {each.prompt for each in islice(requests(PLAN), 1000)}
    (*_, (_, wrong_count)) = await run(Client(everything), replace(PLAN, leaving_share=0))
    # Of the 7 requests, plain decoding's two are what the others are compared with.
    assert wrong_count == 5


async def test_who_leaves_goes_after_the_first_tokens_and_those_are_compared():
    client = Client({each.prompt for each in islice(requests(PLAN), 1000)})
    (*_, (_, wrong_count)) = await run(client, replace(PLAN, leaving_share=1))
    assert client.chunk_count == 7
    assert wrong_count == 0


def test_half_of_those_who_leave_wait_for_their_first_tokens_and_half_only_for_a_while():
    some = [it.waits_seconds for it in islice(requests(PLAN), 400)]
    waits = [it for it in some if it is not None]
    # Binomial: 5 standard deviations to each side, a false alarm in 2 million seeds; one is tried.
    assert 150 <= len(waits) <= 250
    assert len(set(waits)) == len(waits)
    assert 0 <= min(waits) < max(waits) <= 0.05


@virtually
async def test_who_waits_only_for_a_while_leaves_without_a_token_and_is_not_wrong():
    client = Client()
    client.delay_seconds = 1.0
    (*_, (_, wrong_count)) = await run(client, replace(PLAN, leaving_share=1))
    assert client.chunk_count < 7
    assert wrong_count == 0


def test_memory_that_is_allocated_counts_and_a_mapped_file_does_not(tmp_path):
    size = 8 << 20
    big = tmp_path / "big"
    big.write_bytes(bytes(size))

    def own_bytes():
        return _read(Watched("client", os.getpid()), request_count=0).own_bytes

    before = own_bytes()
    with big.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        assert own_bytes() - before < size / 2
    # Straight from the system: an allocator may have as much left over from before.
    with mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS) as allocated:
        allocated.write(bytes(size))
        assert own_bytes() - before > size / 2


def test_growth_is_the_slope_of_what_a_process_had_allocated():
    grown = growth(readings(120))
    assert grown.bytes_per_request == pytest.approx(120)
    assert grown.error == pytest.approx(0, abs=1e-6)
    assert growth(readings(120), resident=True).bytes_per_request == pytest.approx(0)


@pytest.mark.parametrize(
    ("bytes_per_request", "wrong_count", "held"),
    [(100, 0, True), (-30, 0, True), (101, 0, False), (0, 1, False)],
)
def test_a_soak_holds_within_its_limit_with_every_output_right(
    bytes_per_request, wrong_count, held
):
    assert soaked(bytes_per_request, wrong_count=wrong_count).held is held


def test_each_server_has_to_stay_within_the_limit_and_the_client_need_not():
    servers = {"orchestrator": readings(10), "target-0": readings(10), "drafter-0": readings(10)}
    found = soaked(10, readings={**servers, "client": readings(500)})
    assert found.held
    for name in servers:
        grown = replace(found, readings={**found.readings, name: readings(101)})
        assert not grown.held
        assert log_line(grown).endswith(f"goal for each server 100: MISSED by {name}")


def test_the_table_tells_what_has_changed():
    found = soaked(10)
    last = replace(found.readings["orchestrator"][-1], thread_count=16)
    found.readings["orchestrator"][-1] = last
    line = soak_table(found).splitlines()[2]
    assert line == "| orchestrator | 40.0 to 40.0 | +10 ± 0 | +0 ± 0 | 19 | 14 to 16 | 22 | none |"


def test_the_line_for_the_log_has_the_slopes_and_the_verdict(tmp_path):
    line = log_line(soaked(250, wrong_count=2))
    assert "5 requests (non-SI, SI, DSI, AUTO) after 2, 3 tokens each, 25% left early" in line
    assert "bytes a request: orchestrator +250 ± 0, client +7 ± 0" in line
    assert line.endswith("goal for each server 100: MISSED by orchestrator, 2 outputs WRONG")
    assert log_line(soaked(10)).endswith("goal for each server 100: met")
    log = tmp_path / "LOG.md"
    log.write_text(f"# Log\n\n- an older one\n{LOG_MARK}\n\n## More\n")
    add_to_log(line, log)
    assert log.read_text() == f"# Log\n\n- an older one\n{line}\n{LOG_MARK}\n\n## More\n"


def test_a_log_without_a_list_of_soaks_is_left_alone(tmp_path):
    log = tmp_path / "LOG.md"
    log.write_text("# Log\n")
    with pytest.raises(ValueError, match="has no line"):
        add_to_log("- a line", log)
    assert log.read_text() == "# Log\n"


def test_what_is_kept_has_every_reading():
    rows = json.loads(json.dumps(record(soaked(10))))
    assert [row["process"] for row in rows] == ["orchestrator", "client"]
    assert rows[0]["own_bytes_per_request"] == pytest.approx(10)
    assert [it["requests"] for it in rows[0]["readings"]] == [0, 1000, 2000, 3000, 4000]
