"""AUTO with a target whose own guesses are of no use: it decodes plainly before that costs much."""

from __future__ import annotations

from paceline.v1 import orchestrator_service_pb2 as pb
from support.fake_text import continuation
from support.orchestrating import PROMPT
from support.virtual_servers import targets
from support.virtual_system import virtual_system
from support.virtual_time import virtually

TOKENS = 250
SELF, PLAIN = pb.STRATEGY_SELF_SPECULATIVE, pb.STRATEGY_AUTOREGRESSIVE
# Seven rows, as a verdict on six guesses has, take a twelfth longer than one.
ROW_SECONDS = 0.0004


def a_target(rate):
    """A target of which so many in ten of the first guesses are right."""
    return targets(
        1, self_draft_depth=3, row_seconds=ROW_SECONDS, agrees=lambda place: place % 10 < rate
    )


def seconds_after(stream, count):
    """Return how long the tokens took that came after so many."""
    times = [at for at, token_ids in stream.arrivals for _ in token_ids]
    return times[-1] - times[count]


async def generated(system, **request):
    request.setdefault("max_tokens", TOKENS)
    stream = await system.generate(**request)
    assert stream.token_ids == continuation(PROMPT, request["max_tokens"])
    return stream


@virtually
async def test_after_fifty_tokens_auto_is_as_fast_as_plain_decoding():
    async with virtual_system(*a_target(0)) as system:
        auto = await generated(system)
        assert auto.started.strategy == SELF
    async with virtual_system(*a_target(0)) as system:
        plain = await generated(system, strategy=PLAIN)
    assert seconds_after(auto, 50) < 1.05 * seconds_after(plain, 50)


@virtually
async def test_guesses_that_pay_are_judged_to_the_end():
    async with virtual_system(*a_target(8)) as system:
        auto = await generated(system)
    took = auto.finished.statistics
    assert auto.started.strategy == SELF
    assert not took.fallbacks
    assert took.target_forward_count < TOKENS / 1.5


@virtually
async def test_the_next_requests_know_it_and_later_ones_try_again():
    async with virtual_system(*a_target(0)) as system:
        begun = [(await generated(system, max_tokens=40)).started.strategy for _ in range(50)]
    assert begun[0] == SELF
    tries = [n for n, strategy in enumerate(begun) if strategy == SELF]
    assert sum(n >= 20 for n in tries) < 15
    assert tries[-1] > 25


@virtually
async def test_who_asks_for_guesses_gets_them_to_the_end():
    async with virtual_system(*a_target(0)) as system:
        own = await generated(system, strategy=SELF)
    assert own.finished.statistics.target_forward_count == TOKENS
    assert not own.finished.statistics.fallbacks


@virtually
async def test_what_plain_decoding_adds_is_no_verdict_on_guesses():
    """Else guesses would be learnt as worth less with every plain token."""
    async with virtual_system(*a_target(0)) as system:
        before = system.planning.experience.guess_evidence()
        await generated(system)
        after = system.planning.experience.guess_evidence()
    assert after.guess_count > 5, "of six each, and what was assumed"
    assert after.accepted < before.accepted
