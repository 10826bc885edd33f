"""The text itself as a drafter: alone, while there is no other, and beyond one."""

from __future__ import annotations

import pytest

from paceline_contract.max_gram import MaxGram
from paceline_protocol.messages import (
    AbandonVerify,
    CapacityChanged,
    DraftEnded,
    DraftFailed,
    EmitTokens,
    StartDraft,
    StartVerify,
)
from paceline_protocol.methods import Strategy, create_method
from paceline_protocol.task import DecodingTask
from support.chains import drafted, verified

SPECULATIVE = [Strategy.SPECULATIVE, Strategy.DISTRIBUTED]
REPEATING = (5, 6, 7, 8) * 40


class Driving:
    """Runs a method, answers the text's drafts at once, and verdicts when told to."""

    def __init__(self, strategy, *, truth=REPEATING, prompt=8, targets=1, drafters=0, lookahead=4):
        self.truth = truth
        self.text = drafters
        self.capacity = CapacityChanged(
            tuple(range(targets)), tuple(range(drafters + 1)), text=self.text
        )
        task = DecodingTask(truth[:prompt], max_tokens=24, lookahead=lookahead)
        self.method = create_method(strategy, task, capacity=self.capacity)
        self.asked, self.output = [], []
        self.verifications, self.drafts = {}, {}
        self.abandoned = 0
        self.do(self.method.start())

    def do(self, commands):
        waiting = list(commands)
        while waiting:
            match waiting.pop(0):
                case StartDraft() as draft if draft.drafter == self.text:
                    self.asked.append(draft)
                    waiting += self.answer(draft)
                case StartDraft() as draft:
                    self.drafts[draft.draft_id] = draft
                case StartVerify() as verify:
                    self.verifications[verify.verify_id] = verify
                case AbandonVerify(verify_id=verify_id):
                    self.abandoned += 1
                    del self.verifications[verify_id]
                case EmitTokens(token_ids=token_ids):
                    self.output += token_ids

    def answer(self, draft):
        max_gram = MaxGram()
        max_gram.extend(draft.prefix)
        if tokens := max_gram.propose(draft.max_tokens):
            return self.method.handle(drafted(draft.draft_id, tokens))
        return self.method.handle(DraftEnded(draft.draft_id))

    def verdict(self):
        """Answer the verification that was asked for first."""
        verify = self.verifications.pop(min(self.verifications))
        start, accepted = len(verify.prefix), 0
        for token in verify.proposal.token_ids:
            if token != self.truth[start + accepted]:
                break
            accepted += 1
        self.do(
            self.method.handle(verified(verify.verify_id, accepted, self.truth[start + accepted]))
        )

    def run(self):
        count = 0
        while self.verifications:
            self.verdict()
            count += 1
        assert tuple(self.output) == self.truth[8 : 8 + 24]
        return count


@pytest.mark.parametrize("strategy", SPECULATIVE)
def test_a_text_that_repeats_needs_a_verdict_for_each_block_only(strategy):
    # 24 tokens, 4 and the next one for each verdict.
    assert Driving(strategy).run() == 5


def test_with_dsi_each_target_that_would_idle_gets_a_block_of_its_own():
    driving = Driving(Strategy.DISTRIBUTED, targets=3)
    blocks = [verify.proposal.token_ids for verify in driving.verifications.values()]
    assert blocks == [(5, 6, 7, 8)] * 3
    assert [len(verify.prefix) for verify in driving.verifications.values()] == [8, 12, 16]


@pytest.mark.parametrize("strategy", SPECULATIVE)
def test_where_the_text_says_nothing_it_is_asked_once_for_each_end(strategy):
    driving = Driving(strategy, truth=tuple(range(40)), targets=2)
    assert driving.run() == 24, "plain decoding"
    ends = [len(draft.prefix) for draft in driving.asked]
    assert len(ends) == len(set(ends))


def test_si_does_not_ask_again_where_a_draft_ended_within_a_block():
    """A drafter may find less than was asked for: what there is is verified."""
    driving = Driving(Strategy.SPECULATIVE, drafters=1)
    (draft,) = driving.drafts.values()
    driving.do(driving.method.handle(drafted(draft.draft_id, [5])))
    driving.do(driving.method.handle(DraftEnded(draft.draft_id)))
    again = driving.drafts[max(driving.drafts)]
    driving.do(driving.method.handle(DraftEnded(again.draft_id)))
    assert max(driving.drafts) == again.draft_id
    assert [verify.proposal.token_ids for verify in driving.verifications.values()] == [(5,)]


def test_the_first_forward_after_a_correction_takes_along_what_the_text_says():
    driving = Driving(Strategy.DISTRIBUTED, drafters=1)
    (verify,) = driving.verifications.values()
    assert verify.proposal.token_ids == (5, 6, 7, 8)


def test_what_the_text_says_beyond_a_model_goes_to_targets_that_would_idle_and_gives_way():
    driving = Driving(Strategy.DISTRIBUTED, targets=3, drafters=1, lookahead=2)
    (draft,) = driving.drafts.values()
    assert [len(verify.prefix) for verify in driving.verifications.values()] == [8, 10, 12]
    # The model disagrees at once: its block takes the place of what the text said.
    driving.do(driving.method.handle(drafted(draft.draft_id, [9])))
    assert not driving.abandoned, "one token is no block yet"
    driving.do(driving.method.handle(drafted(draft.draft_id, [9])))
    assert driving.abandoned == 1
    newest = driving.verifications[max(driving.verifications)]
    assert newest.prefix[8:] + newest.proposal.token_ids == (9, 9)


@pytest.mark.parametrize("strategy", SPECULATIVE)
def test_the_text_fills_in_when_the_drafter_is_lost(strategy):
    driving = Driving(strategy, drafters=1)
    (draft,) = driving.drafts.values()
    driving.do(driving.method.handle(DraftFailed(draft.draft_id)))
    driving.do(driving.method.handle(CapacityChanged((0,), (1,), text=1)))
    # What runs when the drafter is lost may be an empty block; all the others are of the text.
    assert driving.run() <= 6


def test_a_target_that_the_text_was_given_is_there_when_the_model_has_a_block():
    driving = Driving(Strategy.DISTRIBUTED, truth=tuple(range(40)), targets=2, drafters=1)
    (draft,) = driving.drafts.values()
    driving.do(driving.method.handle(drafted(draft.draft_id, [3])))
    beyond = driving.verifications[max(driving.verifications)]
    assert (beyond.prefix[8:], beyond.proposal.token_ids) == ((3, 4), (5, 6, 7))
    for _ in range(3):
        assert not driving.abandoned
        driving.do(driving.method.handle(drafted(draft.draft_id, [9])))
    assert driving.abandoned == 1
    assert driving.verifications[max(driving.verifications)].proposal.token_ids == (3, 9, 9, 9)
