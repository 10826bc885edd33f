"""AUTO follows the load while requests run: real processes, one target, and a crowd that comes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest

from paceline import Strategy
from support.system import System, simulated_model

TOKENS, CROWD = 60, 9
PROMPTS = [f"stream {index}:" for index in range(CROWD + 1)]


@pytest.fixture(scope="module")
def system():
    """A target whose rows are dear: alone speculation pays, and in a crowd plain decoding does."""
    target = simulated_model("target", seconds=0.04, simulated_row_seconds=0.006)
    drafter = simulated_model("drafter", seconds=0.002, simulated_acceptance_rate=0.6)
    with System(drafters=[drafter], targets=[target]).running() as system:
        yield system


def decode(system, prompt, **options):
    with system.client() as client:
        return client.generate(prompt, **options).collect()


def test_a_request_that_drafts_decodes_plainly_in_a_crowd_and_its_text_is_the_same(system):
    for _ in range(3):  # what a call takes, and how often drafts are right, is measured by then
        decode(system, "before", max_tokens=30, strategy=Strategy.SPECULATIVE)
    with system.client() as client, ThreadPoolExecutor(CROWD + 1) as threads:

        def everyone(prompts, **options):
            asked = [
                threads.submit(decode, system, it, max_tokens=TOKENS, **options) for it in prompts
            ]
            return [it.result() for it in asked]

        first = client.generate(PROMPTS[0], max_tokens=TOKENS)
        chunks = iter(first)
        begun = [*islice(chunks, 3)]
        crowd = threads.submit(everyone, PROMPTS[1:])
        token_ids = [it for chunk in (*begun, *chunks) for it in chunk.token_ids]
        others = crowd.result()
        # Plans follow what is measured, so on a very busy machine they can be others.
        # tests/unit/orchestrator/test_pacing.py has the change for sure, on a clock of its own.
        plain = Strategy.AUTOREGRESSIVE
        if first.started.strategy is not plain and others[-1].started.strategy is plain:
            assert first.finished.statistics.fallbacks["load_changed"] >= 1
        oracle = everyone(PROMPTS, strategy=plain)
    assert [tuple(token_ids), *(it.token_ids for it in others)] == [it.token_ids for it in oracle]
