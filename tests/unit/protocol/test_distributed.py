"""DSI step by step: what each event makes it do."""

from __future__ import annotations

from typing import TypeVar

import pytest

from paceline_protocol.distributed import DistributedDecoding
from paceline_protocol.messages import (
    AbandonVerify,
    CapacityChanged,
    Command,
    DraftEnded,
    DraftFailed,
    EmitTokens,
    Finish,
    FinishReason,
    PromoteVerify,
    StartDraft,
    StartVerify,
    StopDraft,
    VerifyFailed,
)
from paceline_protocol.proposal import Proposal
from paceline_protocol.task import DecodingTask, DispatchPolicy, VerificationRule
from support.chains import drafted, verified

PROMPT = (1, 2)
C = TypeVar("C", bound=Command)


def start(
    *, targets: int = 2, drafters: int = 1, max_tokens: int = 20, **task: object
) -> tuple[DistributedDecoding, list[Command]]:
    method = DistributedDecoding(
        DecodingTask(PROMPT, max_tokens, **task),  # type: ignore[arg-type]
        CapacityChanged(tuple(range(targets)), tuple(range(drafters))),
    )
    return method, method.start()


def only(commands: list[Command], kind: type[C]) -> C:
    (found,) = every(commands, kind)
    return found


def every(commands: list[Command], kind: type[C]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def verify(verify_id, target, prefix, block=(), depth=0, distributions=()):
    return StartVerify(
        verify_id, target, prefix, Proposal(block, distributions=distributions), depth
    )


def test_at_the_start_a_forward_on_the_prompt_and_the_draft_begin_together():
    _, commands = start()
    assert commands == [
        StartDraft(1, 0, PROMPT, max_tokens=19),
        verify(1, 0, PROMPT),
    ]


def test_a_block_goes_out_as_soon_as_lookahead_tokens_are_there():
    method, _ = start(lookahead=2)
    assert method.handle(drafted(1, (10,))) == []
    assert method.handle(drafted(1, (11,))) == [verify(2, 1, PROMPT, (10, 11), depth=1)]


def test_a_freed_target_takes_all_that_waits():
    method, _ = start(lookahead=1)
    method.handle(drafted(1, (10,)))
    assert method.handle(drafted(1, (11, 12, 13))) == []
    commands = method.handle(verified(1, 0, 10))
    assert only(commands, StartVerify) == verify(3, 0, (*PROMPT, 10), (11, 12, 13), depth=1)


def test_with_blocks_a_freed_target_takes_exactly_lookahead_tokens():
    method, _ = start(lookahead=2, dispatch=DispatchPolicy.BLOCKS)
    method.handle(drafted(1, (10, 11, 12, 13, 14)))
    commands = method.handle(verified(1, 0, 10))
    assert only(commands, StartVerify) == verify(3, 0, (*PROMPT, 10, 11), (12, 13), depth=1)


def test_a_rejection_stops_the_draft_and_restarts_both_models_at_the_correction():
    method, _ = start()
    method.handle(drafted(1, (10,)))
    assert method.handle(verified(1, 0, 99)) == [
        EmitTokens((99,), (False,)),
        StopDraft(1),
        AbandonVerify(2),
        StartDraft(2, 0, (*PROMPT, 99), max_tokens=18),
        # The target that was given up on the wrong token holds as much as the other.
        verify(3, 0, (*PROMPT, 99)),
    ]


def test_a_verdict_on_the_sync_position_accepts_the_draft_token_there():
    method, _ = start()
    method.handle(drafted(1, (10,)))
    commands = method.handle(verified(1, 0, 10))
    assert commands == [EmitTokens((10,), (True,)), PromoteVerify(2, 0)]


def test_verdicts_are_applied_in_order_whatever_their_order():
    method, _ = start(targets=3)
    method.handle(drafted(1, (10,)))
    method.handle(drafted(1, (11,)))
    early = method.handle(verified(3, 1, 12))
    assert every(early, EmitTokens) == []
    commands = method.handle(verified(1, 0, 10))
    assert only(commands, EmitTokens) == EmitTokens((10, 11, 12), (True, True, False))
    assert only(commands, AbandonVerify) == AbandonVerify(2)  # all it could say is known


def test_a_correction_that_is_known_early_restarts_the_drafter_before_it_is_committed():
    method, _ = start(targets=3)
    method.handle(drafted(1, (10,)))
    method.handle(drafted(1, (11,)))
    commands = method.handle(verified(3, 0, 50))
    assert commands == [StopDraft(1), StartDraft(2, 0, (*PROMPT, 10, 50), max_tokens=17)]


def test_the_frontier_never_waits_for_the_drafter():
    method, _ = start(lookahead=5)
    for position in range(3):
        commands = method.handle(verified(position + 1, 0, position))
        committed = (*PROMPT, *range(position + 1))
        assert only(commands, StartVerify) == verify(position + 2, 0, committed)


def test_a_drafter_that_works_through_the_prompt_is_left_alone_until_its_first_token():
    method, _ = start(lookahead=5)
    for position in range(3):
        commands = method.handle(verified(position + 1, 0, position))
        assert every(commands, StopDraft) == every(commands, StartDraft) == []
    assert method.handle(drafted(1, (10,))) == [
        StopDraft(1),
        StartDraft(2, 0, (*PROMPT, 0, 1, 2), max_tokens=16),
    ]
    commands = method.handle(verified(4, 0, 3))
    assert only(commands, StopDraft) == StopDraft(2)
    assert only(commands, StartDraft).prefix == (*PROMPT, 0, 1, 2, 3)


def test_a_replaced_drafter_has_to_work_through_the_prompt_too():
    method, _ = start(lookahead=5)
    method.handle(drafted(1, (0,)))
    method.handle(CapacityChanged((0, 1), ()))
    method.handle(CapacityChanged((0, 1), (0,)))
    commands = method.handle(verified(1, 0, 9))
    assert only(commands, StopDraft)  # what it drafts on is wrong
    assert only(commands, StartDraft)
    verify_id = only(commands, StartVerify).verify_id
    assert every(method.handle(verified(verify_id, 0, 8)), StopDraft) == []


def test_the_frontier_takes_a_short_block_when_it_needs_one():
    method, _ = start(lookahead=5, targets=1)
    method.handle(drafted(1, (10, 11)))
    commands = method.handle(verified(1, 0, 10))
    assert only(commands, StartVerify) == verify(2, 0, (*PROMPT, 10), (11,))


def test_with_blocks_the_frontier_takes_none_rather_than_a_short_one():
    method, _ = start(lookahead=5, targets=1, dispatch=DispatchPolicy.BLOCKS)
    method.handle(drafted(1, (10, 11)))
    commands = method.handle(verified(1, 0, 10))
    assert only(commands, StartVerify) == verify(2, 0, (*PROMPT, 10))


def test_the_end_of_a_draft_flushes_what_waits():
    method, _ = start(lookahead=5, max_tokens=4)
    commands = method.handle(drafted(1, (10, 11, 12)))
    assert commands == [verify(2, 1, PROMPT, (10, 11, 12), depth=1)]


def test_a_failed_frontier_verification_is_repeated_at_once_before_deeper_work():
    method, _ = start(lookahead=1)
    method.handle(drafted(1, (10,)))  # verification 2 has it, and decides the frontier too
    assert every(method.handle(VerifyFailed(1)), PromoteVerify) == [PromoteVerify(2, 0)]
    commands = method.handle(VerifyFailed(2))
    assert only(commands, StartVerify).prefix == PROMPT


def test_the_deepest_verification_makes_room_when_the_frontier_needs_a_target():
    method, _ = start(targets=3, lookahead=1, rule=VerificationRule.REJECTION)
    method.handle(drafted(1, (10, 11), ("d", "e")))
    method.handle(drafted(1, (12,), ("f",)))
    commands = method.handle(CapacityChanged(targets=(1, 2), drafters=(0,)))
    assert commands == [
        AbandonVerify(1),
        AbandonVerify(3),
        verify(4, 2, PROMPT),
    ]


def test_the_window_is_renewed_from_the_drafts_tip():
    method, commands = start(draft_window=2, lookahead=9)
    assert only(commands, StartDraft).max_tokens == 2
    commands = method.handle(drafted(1, (10, 11)))
    assert commands == [StartDraft(2, 0, (*PROMPT, 10, 11), max_tokens=2)]
    assert method.handle(DraftEnded(1)) == []


def test_drafting_ends_one_token_before_the_end_and_at_an_eos():
    method, commands = start(max_tokens=3, eos_ids=frozenset({7}))
    assert only(commands, StartDraft).max_tokens == 2
    commands = method.handle(drafted(1, (7,)))
    assert only(commands, StopDraft) == StopDraft(1)
    assert every(commands, StartDraft) == []
    commands = method.handle(verified(1, 0, 7))
    assert commands == [EmitTokens((7,), (True,)), AbandonVerify(2), Finish(FinishReason.EOS)]


def test_a_prompt_that_ends_with_eos_is_no_end():
    method = DistributedDecoding(
        DecodingTask((7,), 5, eos_ids=frozenset({7})), CapacityChanged((0,), (0,))
    )
    assert only(method.start(), StartDraft).prefix == (7,)


def test_a_failed_drafter_is_asked_again_after_the_next_commit():
    method, _ = start()
    assert every(method.handle(DraftFailed(1)), StartDraft) == []
    commands = method.handle(verified(1, 0, 10))
    assert only(commands, StartDraft) == StartDraft(2, 0, (*PROMPT, 10), max_tokens=18)


def test_what_runs_on_lost_servers_is_withdrawn_and_done_elsewhere():
    method, _ = start()
    commands = method.handle(CapacityChanged(targets=(1,), drafters=()))
    assert commands == [StopDraft(1), AbandonVerify(1), verify(2, 1, PROMPT)]


def test_without_a_target_it_waits_for_one():
    method, _ = start(targets=0)
    method.handle(drafted(1, (10, 11)))
    commands = method.handle(CapacityChanged(targets=(4,), drafters=(0,)))
    assert only(commands, StartVerify) == verify(1, 4, PROMPT, (10, 11))


def test_late_and_doubled_answers_change_nothing():
    method, _ = start()
    method.handle(drafted(1, (10,)))
    method.handle(verified(1, 0, 99))
    for late in (
        verified(1, 0, 99),
        verified(2, 1, 5),
        VerifyFailed(2),
        drafted(1, (11,)),
        DraftEnded(1),
        DraftFailed(77),
    ):
        assert method.handle(late) == []


# --- targets and their sessions ---------------------------------------------------------------


def test_the_target_that_holds_most_of_the_text_gets_the_work():
    method, _ = start(targets=3, lookahead=3)
    method.handle(drafted(1, (10, 11, 12)))  # verification 2 on target 1
    commands = method.handle(verified(2, 3, 13))
    assert only(commands, StartVerify) == verify(3, 1, (*PROMPT, 10, 11, 12, 13))


def test_a_broadcast_prompt_goes_to_all_targets_and_its_copies_run_on_as_warm_up():
    method, commands = start(targets=3, broadcast_prefill=True)
    assert every(commands, StartVerify) == [verify(i + 1, i, PROMPT) for i in range(3)]
    commands = method.handle(verified(2, 0, 10))
    assert every(commands, AbandonVerify) == []
    assert only(commands, StartVerify) == verify(4, 1, (*PROMPT, 10))
    assert method.handle(verified(1, 0, 10)) == []
    assert every(method.stop(), AbandonVerify) == [AbandonVerify(3), AbandonVerify(4)]


def test_a_warm_up_makes_room_only_when_there_is_nothing_else():
    method, _ = start(targets=2, broadcast_prefill=True)
    method.handle(verified(1, 0, 10))  # target 0 goes on, target 1 warms up
    commands = method.handle(CapacityChanged(targets=(1,), drafters=(0,)))
    assert commands == [AbandonVerify(3), AbandonVerify(2), verify(4, 1, (*PROMPT, 10))]


# --- several drafters -------------------------------------------------------------------------


def test_equal_tokens_of_two_drafters_are_verified_once():
    method, _ = start(drafters=2, targets=4)
    assert len(every(method.handle(drafted(1, (10,))), StartVerify)) == 1
    assert method.handle(drafted(2, (10,))) == []
    assert method.statistics.drafted == 2
    assert method.statistics.discarded == 1


def test_the_smallest_drafter_has_the_main_path_and_the_others_what_would_idle():
    method, _ = start(drafters=2, targets=3, lookahead=2)
    method.handle(drafted(1, (10,)))
    commands = method.handle(drafted(2, (20, 21, 22)))
    assert only(commands, StartVerify) == verify(2, 1, (*PROMPT, 20), (21, 22), depth=1)
    commands = method.handle(drafted(1, (11,)))
    assert only(commands, StartVerify) == verify(3, 2, PROMPT, (10, 11), depth=1)
    commands = method.handle(drafted(1, (12, 13)))
    assert commands == [
        AbandonVerify(2),
        verify(4, 1, (*PROMPT, 10, 11), (12, 13), depth=2),
    ]


def test_a_branch_that_the_target_confirms_becomes_the_main_path():
    method, _ = start(drafters=2, targets=3, lookahead=2)
    method.handle(drafted(1, (10,)))
    method.handle(drafted(2, (20, 21, 22)))
    commands = method.handle(verified(1, 0, 20))
    assert only(commands, EmitTokens) == EmitTokens((20,), (True,))
    assert only(commands, StopDraft) == StopDraft(1)
    assert only(commands, StartDraft) == StartDraft(3, 0, (*PROMPT, 20), max_tokens=18)
    assert every(commands, StartVerify) == []  # the branch's verification decides the frontier


# --- rejection sampling -----------------------------------------------------------------------


def rejecting(**more: object) -> DistributedDecoding:
    return start(rule=VerificationRule.REJECTION, targets=3, **more)[0]  # type: ignore[arg-type]


def test_a_block_sent_during_a_plain_forward_assumes_the_token_which_that_decides():
    method = rejecting()
    assert method.handle(drafted(1, (10,), ("p",))) == []
    commands = method.handle(drafted(1, (11,), ("q",)))
    assert only(commands, StartVerify) == verify(
        2, 1, (*PROMPT, 10), (11,), depth=1, distributions=("q",)
    )


def test_the_next_token_is_ignored_where_a_later_block_owns_the_position():
    method = rejecting()
    method.handle(drafted(1, (10,), ("p",)))
    method.handle(drafted(1, (11,), ("q",)))
    method.handle(drafted(1, (12,), ("r",)))  # verification 3 owns what follows 11
    method.handle(verified(1, 0, 10))
    commands = method.handle(verified(2, 1, 99))
    assert only(commands, EmitTokens) == EmitTokens((11,), (True,))
    commands = method.handle(verified(3, 0, 55))
    assert only(commands, EmitTokens) == EmitTokens((55,), (False,))


def test_the_next_token_counts_where_no_block_owns_the_position():
    method = rejecting()
    method.handle(drafted(1, (10, 11), ("p", "q")))
    method.handle(verified(1, 0, 10))
    commands = method.handle(verified(2, 1, 99))
    assert only(commands, EmitTokens) == EmitTokens((11, 99), (True, False))


def test_a_failed_block_keeps_its_positions():
    method = rejecting()
    method.handle(drafted(1, (10, 11), ("p", "q")))
    method.handle(verified(1, 0, 10))
    commands = method.handle(VerifyFailed(2))
    again = only(commands, StartVerify)
    assert (again.prefix, again.proposal) == ((*PROMPT, 10), Proposal((11,), distributions=("q",)))


def test_a_failed_plain_forward_stays_plain():
    method = rejecting()
    method.handle(drafted(1, (10,), ("p",)))
    again = only(method.handle(VerifyFailed(1)), StartVerify)
    assert (again.prefix, again.proposal) == (PROMPT, Proposal())


# --- what is counted --------------------------------------------------------------------------


def test_the_statistics_tell_accepted_rejected_and_discarded_tokens_apart():
    method, _ = start(lookahead=4, targets=2)
    method.handle(drafted(1, (10, 11, 12, 13)))
    method.handle(verified(2, 2, 99))
    counts = method.statistics
    assert (counts.drafted, counts.accepted) == (4, 2)
    assert (counts.rejected, counts.discarded) == (1, 1)
    assert counts.accepted_runs == [2]
    assert counts.acceptance_rate == pytest.approx(2 / 3)


def test_log_probabilities_come_with_the_tokens():
    method, _ = start(lookahead=2)
    method.handle(drafted(1, (10, 11)))
    commands = method.handle(verified(2, 1, 99, logprobs=(-0.5, -2.0)))
    assert only(commands, EmitTokens) == EmitTokens((10, 99), (True, False), (-0.5, -2.0))


def test_what_runs_at_a_target_that_leaves_is_finished_and_it_gets_nothing_new():
    method, _ = start(targets=2, lookahead=1)
    method.handle(drafted(1, (10,)))
    assert method.handle(CapacityChanged((0,), (0,), leaving=(1,))) == []
    commands = method.handle(drafted(1, (11, 12)))
    assert not every(commands, StartVerify), "target 0 is busy, target 1 leaves"
    commands = method.handle(verified(2, 1, 11))
    assert only(commands, EmitTokens).token_ids == (10, 11)
    assert only(commands, StartVerify).target == 0


def test_what_runs_at_a_target_that_leaves_is_never_preempted_for_its_place():
    method, _ = start(targets=2, lookahead=1)
    method.handle(drafted(1, (10,)))
    method.handle(CapacityChanged((0,), (0,), leaving=(1,)))
    commands = method.handle(verified(1, 0, 99))
    assert AbandonVerify(2) in commands, "a rejection makes it worthless all the same"
    assert only(commands, StartVerify).target == 0


def test_with_more_targets_blocks_get_shorter():
    method, _ = start(targets=2, lookahead=4)
    assert method.handle(drafted(1, (10,))) == []
    commands = method.handle(CapacityChanged((0, 1, 2), (0,), lookahead=1))
    assert only(commands, StartVerify).proposal == Proposal((10,))
