"""The first request of a system whose drafter is never right: AUTO decodes it plainly from soon on.

tests/unit/orchestrator/test_own_verdicts.py has what that costs, in simulated time.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from paceline import Strategy
from support.system import System, simulated_model

TARGET_SECONDS, TOKENS = 0.024, 80


@pytest.fixture(scope="module")
def systems():
    """New systems by their number of targets, begun together."""
    with ExitStack() as stack:
        yield {count: stack.enter_context(a_system(count).running()) for count in (1, 3)}


def a_system(target_count):
    drafter = simulated_model("drafter", seconds=TARGET_SECONDS / 3, simulated_acceptance_rate=0)
    targets = [simulated_model("target", it, seconds=TARGET_SECONDS) for it in range(target_count)]
    return System(drafters=[drafter], targets=targets)


def decode(system, **options):
    with system.client() as client:
        return client.generate("A text:", max_tokens=TOKENS, **options).collect()


@pytest.fixture(scope="module")
def text(systems):
    return decode(systems[3], strategy=Strategy.AUTOREGRESSIVE).token_ids


@pytest.mark.parametrize("target_count", [3, 1])
def test_a_useless_drafter_is_left_within_the_first_request(systems, target_count, request):
    first = decode(systems[target_count])
    statistics = first.finished.statistics
    # A machine so busy that a draft takes as long as a token is one on which AUTO never begins.
    if first.started.strategy is not Strategy.AUTOREGRESSIVE:
        assert statistics.fallbacks["load_changed"]
        assert 0 < statistics.rejected_token_count < TOKENS / 2
        assert statistics.target_forward_count >= TOKENS
    assert first.token_ids == request.getfixturevalue("text")
