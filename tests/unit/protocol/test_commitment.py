"""What is final, and where a text ends."""

from __future__ import annotations

from paceline_protocol.commitment import Commitment
from paceline_protocol.draft_statistics import DraftStatistics
from paceline_protocol.messages import EmitTokens, FinishReason
from paceline_protocol.task import DecodingTask


def commitment(max_tokens=5):
    return Commitment(DecodingTask((1, 2), max_tokens, eos_ids=frozenset({9})))


def test_tokens_become_final_with_their_origin():
    text = commitment()
    assert text.commit([3, 4], accepted=[True, False]) == EmitTokens((3, 4), (True, False))
    assert text.prefix == (1, 2, 3, 4)
    assert text.remaining == 3
    assert text.finish_reason is None


def test_an_eos_inside_a_block_ends_the_text_there():
    text = commitment()
    emission = text.commit([3, 9, 4], accepted=[True, True, False], logprobs=[-1.0, -2.0, -3.0])
    assert emission == EmitTokens((3, 9), (True, True), (-1.0, -2.0))
    assert text.finish_reason is FinishReason.EOS
    assert text.statistics.accepted == 2


def test_the_limit_inside_a_block_ends_the_text_there():
    text = commitment(max_tokens=2)
    assert text.commit([3, 4, 5], accepted=[True] * 3).token_ids == (3, 4)
    assert text.finish_reason is FinishReason.LENGTH


def test_an_eos_at_the_limit_counts_as_an_eos():
    text = commitment(max_tokens=1)
    text.commit([9], accepted=[False])
    assert text.finish_reason is FinishReason.EOS


def test_the_acceptance_rate_leaves_unjudged_tokens_out():
    assert DraftStatistics().acceptance_rate == 0
    assert DraftStatistics(drafted=9, accepted=3, rejected=1, discarded=5).acceptance_rate == 0.75


def test_accepted_tokens_and_the_targets_own_are_counted():
    text = commitment(max_tokens=9)
    text.commit([3, 4, 5], accepted=[True, True, False])
    text.commit([6, 7, 8], accepted=[False, True, True])
    assert (text.statistics.accepted, text.statistics.own) == (4, 2)


def test_a_prompt_goes_on_whatever_its_last_token():
    commitment = Commitment(DecodingTask((1, 9), 5, eos_ids=frozenset({9})))
    assert not commitment.ends_after(9, length=2)
    assert commitment.ends_after(9, length=3)
