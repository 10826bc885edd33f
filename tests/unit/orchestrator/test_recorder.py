"""What the client is told of a generation's course."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from paceline_contract.calls import CallTiming, StageTiming
from paceline_contract.proposal import Proposal
from paceline_orchestrator.decoding.exchange import Decoded, Drafted, Judged
from paceline_orchestrator.decoding.metrics import RequestMetrics
from paceline_orchestrator.decoding.recorder import Recorder
from paceline_orchestrator.decoding.statistics import (
    EventKind,
    Fallback,
    ModelForwards,
)
from paceline_protocol.draft_statistics import DraftStatistics
from paceline_protocol.messages import EmitTokens, StartDecode, StartDraft, StartVerify

PROMPT = (1, 2, 3)
TIMING = CallTiming(queue_ns=10, forward_ns=100, forward_count=1, row_count=1)


def a_recorder(**settings):
    settings.setdefault("metrics", RequestMetrics(CollectorRegistry()))
    return Recorder(
        arrived_ns=time.perf_counter_ns(), prompt_length=len(PROMPT), keep_timeline=True, **settings
    )


def verifying(recorder, server, *, block=(), prefix=PROMPT):
    return recorder.verifying(server, StartVerify(1, 0, prefix, Proposal(block), depth=2))


def drafted(*token_ids):
    return Drafted(1, 0, Proposal(token_ids), TIMING, elapsed_ns=150, chain=range(len(token_ids)))


def kinds(recorder):
    return [it.kind.name for it in recorder.timeline()]


def test_times_of_answered_calls_are_split():
    recorder = a_recorder()
    recorder.judged(Judged(1, 0, (), 5, (), TIMING, elapsed_ns=150))
    record = recorder.drafting("d", StartDraft(1, 0, PROMPT, 4))
    recorder.drafted(record, drafted(7))
    took = recorder.statistics(DraftStatistics(drafted=1, accepted=1))
    assert (took.queue_ns, took.forward_ns, took.network_ns) == (20, 200, 80)
    assert (took.target_forward_count, took.drafter_forward_count) == (1, 1)
    assert (took.drafts.accepted, took.drafts.acceptance_rate) == (1, 1.0)
    assert took.total_ns


@pytest.mark.parametrize("decodes", [False, True])
def test_what_had_been_computed_before_is_what_the_first_target_says(decodes):
    recorder = a_recorder()
    for reused_count in (2, 0, 3):
        timing = replace(TIMING, reused_token_count=reused_count)
        if decodes:
            record = recorder.decoding("t", StartDecode(1, 0, PROMPT, 4, frozenset()))
            recorder.decoded(record, Decoded(1, 3, (5,), (), timing, elapsed_ns=150))
        else:
            recorder.judged(Judged(1, 0, (), 5, (), timing, elapsed_ns=150))
    assert recorder.statistics(DraftStatistics()).reused_count == 2


def test_forwards_of_drafters_are_told_by_model():
    recorder = a_recorder()
    stack = replace(TIMING, forward_count=3, stages=(StageTiming(1, 70), StageTiming(2, 30)))
    stacked = recorder.drafting("d", StartDraft(1, 0, PROMPT, 4), models=("base", "small"))
    single = recorder.drafting("e", StartDraft(2, 0, PROMPT, 4), models=("small",))
    for record, timing in [(stacked, stack), (stacked, stack), (single, TIMING)]:
        recorder.drafted(record, replace(drafted(7), timing=timing))
    took = recorder.statistics(DraftStatistics())
    assert took.drafter_models == {"base": ModelForwards(2, 140), "small": ModelForwards(5, 160)}
    assert list(took.drafter_models) == ["base", "small"]
    assert sum(ran.forward_count for ran in took.drafter_models.values()) == (
        took.drafter_forward_count
    )


def a_stacks_round(recorder):
    """A draft of 2 forwards of 70 ns and 4 of 15, a verification of 100 ns; 3 tokens."""
    draft = recorder.drafting("d", StartDraft(1, 0, PROMPT, 4), models=("base", "small"))
    timing = replace(
        TIMING, forward_ns=200, forward_count=6, stages=(StageTiming(2, 140), StageTiming(4, 60))
    )
    recorder.drafted(draft, replace(drafted(7, 8), timing=timing))
    recorder.draft_ended(draft)
    verification = verifying(recorder, "t", block=(7, 8))
    recorder.judged(Judged(1, 0, (0, 1), 9, (), TIMING, elapsed_ns=150))
    recorder.verification_ended(verification)
    recorder.emitted(EmitTokens((7, 8, 9), (True, True, False)))


def test_what_the_forwards_make_of_it_is_told_once_all_calls_said_what_they_ran():
    recorder = a_recorder()
    assert recorder.statistics(DraftStatistics()).walltime_improvement == 0
    a_stacks_round(recorder)
    recorder.fallback(Fallback.LOAD_CHANGED)  # nothing was lost by that
    # 3 tokens at 100 ns each, in 300 ns of forwards; then 6 in 500 ns, since a forward took 200.
    assert recorder.statistics(DraftStatistics()).walltime_improvement == 1
    second = verifying(recorder, "t")
    assert recorder.statistics(DraftStatistics()).walltime_improvement == 0
    recorder.judged(Judged(1, 0, (), 9, (), replace(TIMING, forward_ns=200), elapsed_ns=250))
    recorder.verification_ended(second)
    recorder.emitted(EmitTokens((1, 2, 3), (False,) * 3))
    took = recorder.statistics(DraftStatistics())
    assert took.walltime_improvement == pytest.approx(6 * 150 / 500)


@pytest.mark.parametrize("by_rejection", [True, False])
def test_a_call_that_was_withdrawn_or_failed_leaves_it_untold(by_rejection):
    withdrawn, failed = a_recorder(), a_recorder()
    for recorder in (withdrawn, failed):
        a_stacks_round(recorder)
    draft = withdrawn.drafting("d", StartDraft(2, 0, PROMPT, 4), models=("base",))
    withdrawn.draft_ended(draft)
    withdrawn.cancelled(draft, by_rejection=by_rejection)
    failed.fallback(Fallback.TARGET_LOST)
    for recorder in (withdrawn, failed):
        assert recorder.statistics(DraftStatistics()).walltime_improvement == 0


def test_a_decode_tells_with_each_message_what_it_ran_and_so_does_one_that_is_broken_off():
    recorder = a_recorder()
    record = recorder.decoding("t", StartDecode(1, 0, PROMPT, 4, frozenset()))
    for token in (7, 8):
        recorder.decoded(record, Decoded(1, 3, (token,), (), TIMING, elapsed_ns=150))
        recorder.emitted(EmitTokens((token,), (False,)))
    recorder.decode_ended(record)
    recorder.cancelled(record, by_rejection=False)
    assert recorder.statistics(DraftStatistics()).walltime_improvement == 1


def test_of_each_call_the_way_to_the_server_and_back_is_measured_once():
    registry = CollectorRegistry()
    recorder = a_recorder(metrics=RequestMetrics(registry))
    draft = recorder.drafting("d", StartDraft(1, 0, PROMPT, 4))
    recorder.drafted(draft, drafted(7))
    recorder.drafted(draft, drafted(8))
    recorder.judged(Judged(1, 0, (0, 1), 5, (), TIMING, elapsed_ns=150))
    recorder.emitted(EmitTokens((7, 8, 5), (True, True, False)))
    for rpc in ("Draft", "Verify"):
        name, labels = "paceline_rpc_hop_seconds", {"rpc": rpc}
        assert registry.get_sample_value(f"{name}_count", labels) == 1
        assert registry.get_sample_value(f"{name}_sum", labels) == pytest.approx(40e-9)


def test_the_times_between_final_tokens_add_up_to_what_passed_since_the_first():
    registry = CollectorRegistry()
    recorder = a_recorder(metrics=RequestMetrics(registry))
    recorder.emitted(EmitTokens((7, 8), (True, True)))
    for token_ids in ((9,), (1, 2, 3)):
        recorder.emitted(EmitTokens(token_ids, (False,) * len(token_ids)))
    took = recorder.statistics(DraftStatistics())
    name = "paceline_inter_token_latency_seconds"
    assert registry.get_sample_value(f"{name}_count") == 5, "the first token follows none"
    passed_ns = took.total_ns - took.time_to_first_token_ns
    assert 0 < registry.get_sample_value(f"{name}_sum") < passed_ns / 1e9


def test_drafts_and_verifications_are_numbered_together():
    recorder = a_recorder()
    draft = recorder.drafting("d", StartDraft(1, 0, PROMPT, 4))
    assert verifying(recorder, "t").call_id != draft.call_id


def test_the_most_targets_at_the_same_time_are_counted():
    recorder = a_recorder()
    first = verifying(recorder, "a")
    recorder.verification_ended(first)
    second = verifying(recorder, "b")
    assert recorder.targets_used == 1
    verifying(recorder, "a")
    assert recorder.targets_used == 2
    recorder.verification_ended(second)
    assert recorder.targets_used == 2


def test_a_final_token_discards_drafts_on_another_path_once():
    recorder = a_recorder()
    wrong = recorder.drafting("d", StartDraft(1, 0, PROMPT, 4))
    recorder.drafted(wrong, drafted(7, 8, 9))
    recorder.emitted(EmitTokens((7, 5), (True, False)))
    discarded = [it for it in recorder.timeline() if it.kind == EventKind.DISCARDED]
    assert [(it.position, list(it.token_ids)) for it in discarded] == [(4, [8, 9])]
    recorder.emitted(EmitTokens((6,), (False,)))
    assert kinds(recorder).count("DISCARDED") == 1


def test_only_cancels_after_a_rejection_are_counted():
    recorder = a_recorder()
    record = verifying(recorder, "t", block=(4,))
    recorder.cancelled(record, by_rejection=True)
    recorder.cancelled(record, by_rejection=False)
    assert recorder.statistics(DraftStatistics()).cancelled_count == 1
    assert kinds(recorder) == ["CANCELLED", "CANCELLED"]


def test_live_events_are_shown_as_they_happen_and_spans_kept():
    shown = []
    recorder = a_recorder(show=shown.append)
    record = verifying(recorder, "t", block=(4,))
    assert [(it.kind, it.start_ns == it.end_ns) for it in shown] == [(EventKind.VERIFYING, True)]
    recorder.verification_ended(record)
    (span,) = recorder.timeline()
    assert shown[1:] == [span]
    assert (span.server, span.position, list(span.token_ids)) == ("t", 3, [4])
    assert (span.depth, span.call_id) == (2, record.call_id)
    assert span.start_ns < span.end_ns


def test_the_timeline_tells_branches_from_the_chain():
    recorder = a_recorder()
    draft = recorder.drafting("d", StartDraft(1, 0, PROMPT, 4, width=3))
    tree = Proposal((7, 8, 9, 6), (0, 0, 1, 1))
    recorder.drafted(draft, Drafted(1, 0, tree, TIMING, elapsed_ns=150, chain=(0, 2)))
    riding = StartVerify(1, 0, PROMPT, tree, depth=0)
    beside = StartVerify(2, 1, (*PROMPT, 8), Proposal(), depth=1, is_branch=True)
    for verify in (riding, beside):
        recorder.verification_ended(recorder.verifying("t", verify))
    recorder.emitted(EmitTokens((8,), (True,)))
    told = [
        (it.kind.name, it.token_ids, it.branch_count, it.is_branch) for it in recorder.timeline()
    ]
    assert told == [
        ("DRAFTED", (7, 9), 2, False),
        ("VERIFYING", (7, 9), 2, False),
        ("VERIFYING", (), 0, True),
        ("ACCEPTED", (8,), 0, False),
        ("DISCARDED", (7, 9), 0, False),
    ]


def test_what_later_tokens_took_is_averaged_without_those_of_the_first_answer(monkeypatch):
    now_ns = 0
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns)
    recorder = a_recorder()
    now_ns = 1000
    recorder.emitted(EmitTokens((7, 6), (True, False)))
    assert recorder.token_ns is None
    now_ns = 1600
    recorder.emitted(EmitTokens((8, 5), (True, False)))
    now_ns = 1900
    recorder.emitted(EmitTokens((9,), (False,)))
    assert recorder.token_ns == 300
