"""What clients are told of a generation and of servers: each number under its own name."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from paceline.v1 import model_service_pb2 as model_pb
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_contract.calls import VerificationRule
from paceline_orchestrator.decoding.statistics import (
    EventKind,
    Fallback,
    ModelForwards,
    Statistics,
    TextStatistics,
    TimelineEvent,
)
from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.fleet.words import Standing, Word
from paceline_orchestrator.front.text import FinalToken, Piece
from paceline_orchestrator.front.translation import (
    chunk_message,
    finished_message,
    server_message,
    started_message,
    timeline_message,
)
from paceline_protocol.draft_shape import Shape
from paceline_protocol.draft_statistics import DraftStatistics
from paceline_protocol.messages import FinishReason
from paceline_protocol.methods import Strategy

ORDER = SimpleNamespace(
    request_id="r",
    seed=51,
    model=SimpleNamespace(fingerprint="f"),
    prompt=(1,) * 52,
    plan=SimpleNamespace(
        strategy=Strategy.SPECULATIVE, lookahead=53, note="n", shape=Shape(54, 55)
    ),
    options=SimpleNamespace(wish=SimpleNamespace(rule=VerificationRule.REJECTION)),
)
TOOK = Statistics(
    drafts=DraftStatistics(
        drafted=101,
        accepted=90,
        rejected=20,
        discarded=33,
        corrections_ahead=10,
        branch_drafted=44,
        branch_judged=45,
        branch_accepted=46,
    ),
    text=TextStatistics(drafted=57, accepted=58, rejected=59, predicted=47, predicted_accepted=48),
    target_forward_count=61,
    drafter_forward_count=62,
    cancelled_count=63,
    queue_ns=64,
    forward_ns=65_000,
    network_ns=66,
    time_to_first_token_ns=67,
    total_ns=68,
    fallbacks=Counter({Fallback.LOAD_CHANGED: 69}),
    drafter_models={"d": ModelForwards(71, 35_000)},
    token_count=122,
    reused_count=42,
    forced_drafted=51,
    forced_accepted=52,
)
EVENT = TimelineEvent(
    EventKind.DRAFTED,
    "s",
    start_ns=81,
    end_ns=82,
    position=83,
    token_ids=(84, 85),
    call_id=86,
    depth=87,
    branch_count=88,
    is_branch=True,
)
TOLD_EVENT = pb.TimelineEvent(
    kind=pb.TIMELINE_EVENT_KIND_DRAFTED,
    server="s",
    start_ns=81,
    end_ns=82,
    position=83,
    token_ids=(84, 85),
    call_id=86,
    speculation_depth=87,
    branch_token_count=88,
    is_branch=True,
)


def untold(message):
    """Name the fields that a message leaves out."""
    told = {field.name for field, _ in message.ListFields()}
    return set(message.DESCRIPTOR.fields_by_name) - told


def test_the_first_message_says_all_that_a_generation_will_be():
    started = started_message(ORDER, target_count=56).started
    assert not untold(started)
    assert started == pb.GenerationStarted(
        request_id="r",
        seed=51,
        model_fingerprint="f",
        strategy=pb.STRATEGY_SPECULATIVE,
        promise=sampling_pb2.VERIFICATION_RULE_REJECTION,
        prompt_token_count=52,
        lookahead=53,
        target_count=56,
        plan_note="n",
        width=54,
        branches=55,
    )


def test_the_last_message_says_all_that_a_generation_took():
    finished = finished_message(
        ORDER,
        reason=FinishReason.EOS,
        stop_string="",
        lookahead=91,
        targets_used=92,
        token_count=93,
        statistics=TOOK,
        timeline=[EVENT],
    ).finished
    assert untold(finished) == {"stop_string"}
    assert not untold(finished.statistics)
    assert finished == pb.GenerationFinished(
        finish_reason=pb.FINISH_REASON_EOS,
        promise=sampling_pb2.VERIFICATION_RULE_REJECTION,
        lookahead=91,
        targets_used=92,
        prompt_token_count=52,
        completion_token_count=93,
        cached_prompt_token_count=42,
        timeline=[TOLD_EVENT],
        statistics=pb.GenerationStatistics(
            target_forward_count=61,
            drafter_forward_count=62,
            drafted_token_count=101,
            accepted_token_count=90,
            rejected_token_count=20,
            discarded_token_count=33,
            acceptance_rate=0.8,  # of first choices: 80 of 100
            cancelled_rpc_count=63,
            fallbacks=[pb.Fallback(kind=pb.FALLBACK_KIND_LOAD_CHANGED, count=69)],
            queue_ns=64,
            forward_ns=65_000,
            network_ns=66,
            time_to_first_token_ns=67,
            total_ns=68,
            corrections_ahead_count=10,
            branch_token_count=45,
            branch_accepted_count=46,
            max_gram_drafted_token_count=57,
            max_gram_accepted_token_count=58,
            predicted_token_count=47,
            predicted_accepted_token_count=48,
            forced_drafted_token_count=51,
            forced_accepted_token_count=52,
            drafter_models=[pb.ModelForwards(model_name="d", forward_count=71, forward_ns=35_000)],
            walltime_improvement=122 * (65_000 - 35_000) / 61 / 65_000,
        ),
    )


@pytest.mark.parametrize(
    ("reason", "stop_string", "told"),
    [
        (FinishReason.LENGTH, "", pb.FINISH_REASON_LENGTH),
        (FinishReason.EOS, "", pb.FINISH_REASON_EOS),
        (FinishReason.LENGTH, "x", pb.FINISH_REASON_STOP_STRING),
    ],
)
def test_a_stop_string_that_was_found_is_the_reason(reason, stop_string, told):
    finished = finished_message(
        ORDER,
        reason=reason,
        stop_string=stop_string,
        lookahead=1,
        targets_used=1,
        token_count=1,
        statistics=TOOK,
        timeline=[],
    ).finished
    assert (finished.finish_reason, finished.stop_string) == (told, stop_string)


def test_a_chunk_says_all_of_its_tokens():
    tokens = (
        FinalToken(11, True, -0.25, ((11, -0.25), (12, -1.5))),
        FinalToken(13, False, -0.5, ((13, -0.5),)),
    )
    piece = Piece(tokens, "ab", (2, 0))
    chunk = chunk_message(piece, position=14, bytes_of=lambda it: b"%d" % it).chunk
    assert not untold(chunk)
    assert chunk == pb.GenerationChunk(
        position=14,
        token_ids=[11, 13],
        text="ab",
        logprobs=[-0.25, -0.5],
        origins=[pb.TOKEN_ORIGIN_ACCEPTED_DRAFT, pb.TOKEN_ORIGIN_TARGET],
        top_logprobs=[
            sampling_pb2.LikeliestTokens(
                token_ids=[11, 12], logprobs=[-0.25, -1.5], token_bytes=[b"11", b"12"]
            ),
            sampling_pb2.LikeliestTokens(token_ids=[13], logprobs=[-0.5], token_bytes=[b"13"]),
        ],
        text_lengths=[2, 0],
        token_bytes=[b"11", b"13"],
    )


def test_an_event_of_the_timeline_says_all_that_is_known_of_it():
    event = timeline_message(EVENT).timeline_event
    assert not untold(event)
    assert event == TOLD_EVENT


def a_server(*, status="", facts=None, step_ns=0):
    return SimpleNamespace(
        name="n",
        endpoint=SimpleNamespace(address="a:1"),
        role=Role.TARGET,
        status=status,
        facts=facts,
        latency=SimpleNamespace(step_ns=step_ns),
    )


def test_a_server_is_described_by_all_that_is_known_of_it():
    facts = SimpleNamespace(fingerprint="f", self_draft_kind="medusa", is_invariant=True)
    server = a_server(facts=facts, step_ns=95)
    told = pb.ServerInfo(
        name="n",
        address="a:1",
        role=model_pb.MODEL_ROLE_TARGET,
        ready=True,
        model_fingerprint="f",
        decode_step_ns=95,
        self_draft_kind="medusa",
        is_invariant=True,
        standing=pb.SERVER_STANDING_RESTING,
        standing_detail="it is a spare",
    )
    message = server_message(server, Standing(Word.RESTING, "it is a spare"))
    assert untold(message) == {"status"}
    assert message == told


def test_a_server_that_takes_no_work_has_its_status_and_its_word():
    server = a_server(status="x")
    told = {
        "name": "n",
        "address": "a:1",
        "role": model_pb.MODEL_ROLE_TARGET,
        "standing": pb.SERVER_STANDING_SILENT,
        "standing_detail": "y",
    }
    standing = Standing(Word.SILENT, "y")
    assert server_message(server, standing) == pb.ServerInfo(status="x", **told)
    server.status = None
    assert server_message(server, standing) == pb.ServerInfo(status="SILENT: y", **told)
