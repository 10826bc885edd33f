"""Plain decoding step by step."""

from __future__ import annotations

from paceline_protocol.autoregressive import AutoregressiveDecoding
from paceline_protocol.messages import (
    AbandonVerify,
    CapacityChanged,
    EmitTokens,
    Finish,
    FinishReason,
    StartVerify,
    VerifyFailed,
)
from paceline_protocol.proposal import Proposal
from paceline_protocol.task import DecodingTask
from support.chains import verified


def forward(verify_id, prefix, *, target=0):
    return StartVerify(verify_id, target, prefix, Proposal(), depth=0)


def method(max_tokens=3, **task):
    return AutoregressiveDecoding(
        DecodingTask((1, 2), max_tokens, **task), CapacityChanged(targets=(0, 1), drafters=())
    )


def test_it_asks_for_one_token_after_the_other():
    decoding = method(max_tokens=2)
    assert decoding.start() == [forward(1, (1, 2))]
    assert decoding.handle(verified(1, 0, 3, logprobs=(-0.25,))) == [
        EmitTokens((3,), (False,), (-0.25,)),
        forward(2, (1, 2, 3)),
    ]
    assert decoding.handle(verified(2, 0, 4)) == [
        EmitTokens((4,), (False,)),
        Finish(FinishReason.LENGTH),
    ]


def test_an_eos_ends_it_and_nothing_follows():
    decoding = method(eos_ids=frozenset({9}))
    decoding.start()
    commands = decoding.handle(verified(1, 0, 9))
    assert commands == [EmitTokens((9,), (False,)), Finish(FinishReason.EOS)]
    assert decoding.handle(verified(1, 0, 9)) == []
    assert decoding.stop() == []


def test_a_failed_forward_is_repeated_and_a_lost_target_replaced():
    decoding = method()
    decoding.start()
    assert decoding.handle(VerifyFailed(1)) == [forward(2, (1, 2))]
    assert decoding.handle(VerifyFailed(1)) == []
    commands = decoding.handle(CapacityChanged(targets=(1,), drafters=()))
    assert commands == [AbandonVerify(2), forward(3, (1, 2), target=1)]
    commands = decoding.handle(CapacityChanged(targets=(0, 1), drafters=()))
    assert commands == []


def test_nothing_left_to_generate_ends_it_at_once():
    assert method(max_tokens=0).start() == [Finish(FinishReason.LENGTH)]


def test_a_stop_withdraws_the_forward():
    decoding = method()
    decoding.start()
    assert decoding.stop() == [AbandonVerify(1), Finish(FinishReason.STOPPED)]
