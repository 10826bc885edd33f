"""The counts that a client is charged by, at their ends."""

from __future__ import annotations

import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from support.fake_text import EOS, byte_tokenizer, continuation, next_token
from support.orchestrating import PROMPT, STRATEGIES, a_drafter, orchestrating, targets

LENGTH = len(PROMPT)


def reusing(*counts):
    """Have a target say with its answers how much it had computed before; with later ones 9."""
    left = list(counts)

    def distort(answer):
        answer.timing.reused_token_count = left.pop(0) if left else 9

    return distort


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reused", [0, 1, LENGTH - 1])
async def test_what_was_cached_of_a_prompt_is_what_the_first_answer_says(strategy, reused):
    models = targets(1)
    async with orchestrating(drafters=[a_drafter()], targets=models) as system:
        models[0].distort = reusing(reused)
        received = await system.generate(strategy=strategy, lookahead=2)
        assert received.finished.cached_prompt_token_count == reused
        assert received.finished.prompt_token_count == LENGTH


@pytest.mark.parametrize(
    ("reused", "cached"), [(LENGTH - 1, LENGTH - 1), (LENGTH, LENGTH), (LENGTH + 4, LENGTH)]
)
async def test_tokens_that_a_resumed_request_brought_back_are_no_part_of_its_prompt(reused, cached):
    whole, models = continuation(PROMPT, 24), targets(1)
    async with orchestrating(targets=models) as system:
        models[0].distort = reusing(reused)
        received = await system.generate(resume_token_ids=whole[:5])
        told = received.finished
        assert (told.prompt_token_count, told.completion_token_count) == (LENGTH, 24)
        assert told.cached_prompt_token_count == cached


async def test_a_request_that_needs_no_target_had_nothing_cached():
    async with orchestrating(targets=targets(1)) as system:
        told = (await system.generate(resume_token_ids=continuation(PROMPT, 24))).finished
        assert (told.prompt_token_count, told.cached_prompt_token_count) == (LENGTH, 0)


@pytest.mark.parametrize("resumed", [0, 4, 11, 14])
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_completion_counts_to_its_end_with_what_was_resumed(strategy, resumed):
    """A stop string counts whole, and the token that ends the text; what was drafted behind not.

    The tenth character has four tokens; of these 15 the last two are the stop string's.
    """
    whole = continuation(PROMPT, 15)
    text = byte_tokenizer().decode(whole)
    assert len(text) == 12

    def ending(text):
        return EOS if len(text) == LENGTH + 15 else next_token(text)

    models = targets(2, token_after=ending)
    async with orchestrating(drafters=[a_drafter(token_after=ending)], targets=models) as system:

        async def counted(**asked):
            received = await system.generate(
                strategy=strategy, lookahead=5, resume_token_ids=whole[:resumed], **asked
            )
            told = received.finished
            assert told.prompt_token_count == LENGTH
            assert told.completion_token_count == resumed + len(received.token_ids)
            return told.finish_reason, told.completion_token_count

        stopped = await counted(stop_strings=[text[-2:]])
        assert stopped == (pb.FINISH_REASON_STOP_STRING, 15)
        assert await counted() == (pb.FINISH_REASON_EOS, 16)
        assert await counted(max_tokens=16) == (pb.FINISH_REASON_EOS, 16)
        assert await counted(max_tokens=15) == (pb.FINISH_REASON_LENGTH, 15)
