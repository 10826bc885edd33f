"""SI step by step."""

from __future__ import annotations

from paceline_protocol.messages import (
    AbandonVerify,
    CapacityChanged,
    Command,
    DraftEnded,
    DraftFailed,
    EmitTokens,
    Finish,
    FinishReason,
    StartDraft,
    StartVerify,
    StopDraft,
    VerifyFailed,
)
from paceline_protocol.proposal import Proposal
from paceline_protocol.speculative import SpeculativeDecoding
from paceline_protocol.task import DecodingTask
from support.chains import drafted, verified

PROMPT = (1, 2)


def drafting(draft_id, prefix, *, max_tokens):
    """Return the command for a draft, all of it in one message: nothing is done with a part."""
    return StartDraft(draft_id, 0, prefix, max_tokens=max_tokens, chunk_tokens=max_tokens)


def start(
    *, drafters: tuple[int, ...] = (0,), max_tokens: int = 20, **task: object
) -> tuple[SpeculativeDecoding, list[Command]]:
    method = SpeculativeDecoding(
        DecodingTask(PROMPT, max_tokens, **task),  # type: ignore[arg-type]
        CapacityChanged(targets=(0, 1), drafters=drafters),
    )
    return method, method.start()


def verify(verify_id, prefix, block=(), *, target=0, distributions=()):
    return StartVerify(
        verify_id, target, prefix, Proposal(block, distributions=distributions), depth=0
    )


def test_a_round_drafts_lookahead_tokens_then_verifies_them_in_one_forward():
    method, commands = start(lookahead=3)
    assert commands == [drafting(1, PROMPT, max_tokens=3)]
    assert method.handle(drafted(1, (10, 11))) == []
    assert method.handle(drafted(1, (12,))) == [verify(1, PROMPT, (10, 11, 12))]
    assert method.handle(DraftEnded(1)) == []


def test_a_rejection_yields_the_accepted_tokens_and_the_correction():
    method, _ = start(lookahead=3)
    method.handle(drafted(1, (10, 11, 12)))
    assert method.handle(verified(1, 1, 99)) == [
        EmitTokens((10, 99), (True, False)),
        drafting(2, (*PROMPT, 10, 99), max_tokens=3),
    ]
    counts = method.statistics
    assert (counts.drafted, counts.accepted, counts.rejected, counts.discarded) == (3, 1, 1, 1)


def test_a_block_accepted_whole_yields_one_token_more():
    method, _ = start(lookahead=2)
    method.handle(drafted(1, (10, 11)))
    commands = method.handle(verified(1, 2, 12, logprobs=(-1.0, -2.0, -3.0)))
    assert commands[0] == EmitTokens((10, 11, 12), (True, True, False), (-1.0, -2.0, -3.0))


def test_no_token_is_drafted_that_could_not_become_output():
    method, commands = start(lookahead=5, max_tokens=2)
    assert commands == [drafting(1, PROMPT, max_tokens=1)]
    assert method.handle(drafted(1, (10,))) == [verify(1, PROMPT, (10,))]
    commands = method.handle(verified(1, 0, 11))
    assert commands[1:] == [verify(2, (*PROMPT, 11))]
    commands = method.handle(verified(2, 0, 12))
    assert commands == [EmitTokens((12,), (False,)), Finish(FinishReason.LENGTH)]


def test_a_drafted_eos_is_verified_at_once():
    method, _ = start(lookahead=5, eos_ids=frozenset({7}))
    commands = method.handle(drafted(1, (10, 7, 11)))
    assert commands == [StopDraft(1), verify(1, PROMPT, (10, 7))]
    commands = method.handle(verified(1, 2, 12))
    assert commands == [EmitTokens((10, 7), (True, True)), Finish(FinishReason.EOS)]


def test_if_the_drafter_fails_what_there_is_gets_verified():
    method, _ = start(lookahead=3)
    method.handle(drafted(1, (10,)))
    assert method.handle(DraftFailed(1)) == [verify(1, PROMPT, (10,))]
    commands = method.handle(verified(1, 1, 11))
    assert commands[1:] == [drafting(2, (*PROMPT, 10, 11), max_tokens=3)]
    assert method.handle(DraftEnded(2)) == [verify(2, (*PROMPT, 10, 11))]


def test_a_lookahead_beyond_the_window_is_drafted_in_parts():
    method, commands = start(lookahead=3, draft_window=2)
    assert commands == [drafting(1, PROMPT, max_tokens=2)]
    commands = method.handle(drafted(1, (10, 11)))
    assert commands == [drafting(2, (*PROMPT, 10, 11), max_tokens=1)]


def test_without_a_drafter_it_decodes_plainly():
    method, commands = start(drafters=(), max_tokens=2)
    assert commands == [verify(1, PROMPT)]
    assert method.handle(verified(1, 0, 10))[1:] == [verify(2, (*PROMPT, 10))]


def test_a_failed_verification_is_repeated_with_the_same_block():
    method, _ = start(lookahead=1)
    method.handle(drafted(1, (10,)))
    assert method.handle(VerifyFailed(1)) == [verify(2, PROMPT, (10,))]
    commands = method.handle(CapacityChanged(targets=(1,), drafters=(0,)))
    assert commands == [AbandonVerify(2), verify(3, PROMPT, (10,), target=1)]


def test_a_lost_drafter_and_target_are_survived():
    method, _ = start(lookahead=3)
    method.handle(drafted(1, (10,)))
    assert method.handle(CapacityChanged(targets=(), drafters=())) == [StopDraft(1)]
    commands = method.handle(CapacityChanged(targets=(1,), drafters=()))
    assert commands == [verify(1, PROMPT, (10,), target=1)]


def test_distributions_travel_with_their_tokens():
    method, _ = start(lookahead=2)
    method.handle(drafted(1, (10,), ("p",)))
    commands = method.handle(drafted(1, (11,), ("q",)))
    assert commands == [verify(1, PROMPT, (10, 11), distributions=("p", "q"))]


def test_a_stop_withdraws_what_is_in_flight_and_counts_its_tokens():
    method, _ = start(lookahead=3)
    method.handle(drafted(1, (10,)))
    assert method.stop() == [StopDraft(1), Finish(FinishReason.STOPPED)]
    assert method.stop() == []
    assert method.handle(drafted(1, (11,))) == []
    assert method.statistics.drafted == method.statistics.discarded == 1
