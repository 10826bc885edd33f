"""Several texts at once in this process: each as if it were alone, and timed by its tokens."""

from __future__ import annotations

import pytest

from paceline_bench.load.together import LibraryBatches, decode_together
from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from support.oracle import Oracle, Sampling

PROMPTS = [(5, 6, 7, 8, 9), (9, 8, 7, 6, 5), (11, 12, 13, 14, 15)]
COUNT = 12


@pytest.fixture(scope="module")
def texts(tiny_pair):
    oracle = Oracle(tiny_pair.target)
    return [tuple(oracle.decode(list(prompt), Sampling(), COUNT)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def library(tiny_pair):
    return LibraryBatches(str(tiny_pair.target), most_texts=3, longest=5 + COUNT)


@pytest.fixture(params=["engine", "padded", "continuous"])
def together(request, engine, library):
    if request.param == "engine":
        yield lambda prompts, count: decode_together(engine.target, prompts, count)
    elif request.param == "padded":
        yield library.padded
    else:
        with library.batching():
            yield library.continuous


def test_each_text_is_plain_decodings(together, texts):
    served = together(PROMPTS, COUNT)
    assert [each.prompt for each in served] == PROMPTS
    assert [each.token_ids for each in served] == texts


def test_each_token_has_come_at_a_time(together):
    for each in together(PROMPTS, COUNT):
        times = [at for at, _ in each.arrivals]
        assert [count for _, count in each.arrivals] == [1] * COUNT
        assert each.sent_at < times[0]
        assert times == sorted(times)


def test_a_library_that_has_batched_decodes_as_before(library, texts):
    for _ in range(2):
        with library.batching():
            assert library.continuous(PROMPTS[:1], COUNT)[0].token_ids == texts[0]
        assert library.padded(PROMPTS[:1], COUNT)[0].token_ids == texts[0]


class RunsTogether(SimulatedBackend):
    """Notes how many items each step has."""

    def __init__(self):
        super().__init__(SimulatedModel(ttft_seconds=0, tpot_seconds=0))
        self.widths = []

    def run(self, items, interrupt):
        self.widths.append(len(items))
        return super().run(items, interrupt)


def test_all_texts_go_through_the_engine_in_one_call_for_each_token():
    backend = RunsTogether()
    decode_together(backend, PROMPTS, COUNT)
    assert backend.widths == [3] * COUNT
