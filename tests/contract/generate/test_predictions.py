"""What a client predicts of the answer is drafted from, and changes no token."""

from __future__ import annotations

import pytest

from paceline.errors import InvalidFieldError, UnsupportedError
from paceline.v1 import orchestrator_service_pb2 as pb
from support.fake_text import byte_tokenizer, continuation
from support.orchestrating import PROMPT, STRATEGIES, a_drafter, orchestrating, targets

COUNT = 60
ANSWER = continuation(PROMPT, COUNT)
TEXT = byte_tokenizer().decode(ANSWER[:-1]).encode().decode()


async def test_a_right_prediction_takes_few_forwards_from_the_first_token_on():
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        received = await system.generate(max_tokens=COUNT, predicted_text=TEXT, lookahead=8)
        assert received.token_ids == ANSWER
        took = received.finished.statistics
        assert took.predicted_token_count == COUNT - 1
        assert took.predicted_accepted_token_count > COUNT / 2
        assert took.target_forward_count <= COUNT / 8 + 3
        assert not took.drafter_forward_count


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_changed_a_wrong_and_a_huge_prediction_change_no_token(strategy):
    changed = TEXT[:20] + "!!" + TEXT[22:]
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        for predicted in (changed, "quite another text", TEXT * 400, TEXT[:1]):
            for drafter in (pb.DRAFTER_KIND_UNSPECIFIED, pb.DRAFTER_KIND_SERVER_AND_MAX_GRAM):
                received = await system.generate(
                    max_tokens=COUNT, predicted_text=predicted, strategy=strategy, drafter=drafter
                )
                assert received.token_ids == ANSWER
        resumed = await system.generate(
            max_tokens=COUNT,
            predicted_text=changed,
            resume_token_ids=ANSWER[:7],
            strategy=pb.STRATEGY_SPECULATIVE,
        )
        assert resumed.token_ids == ANSWER[7:]
        assert resumed.finished.statistics.predicted_accepted_token_count > 0


async def test_a_prediction_that_is_too_long_or_has_no_tokenizer_is_refused():
    async with orchestrating(drafters=[], targets=targets(1)) as system:
        with pytest.raises(InvalidFieldError, match="predicted_text"):
            await system.generate(predicted_text="x" * ((256 << 10) + 1))
    async with orchestrating(drafters=[], targets=targets(1, tokenizer=None)) as system:
        with pytest.raises(UnsupportedError, match="predicted_text"):
            await system.generate(predicted_text="x")
