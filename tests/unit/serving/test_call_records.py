"""What a model server counts of the calls that it answered."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from paceline_contract.calls import CallTiming, PrefixCall
from paceline_engine.scheduling.accounting import HostLimits, HostStatistics
from paceline_model_server.records import CallRecorder, HostCollector

CALL = PrefixCall(
    session_id="s", sequence=1, base_length=0, base_digest=b"", token_ids=(1, 2), caller=""
)


@pytest.fixture
def registry():
    return CollectorRegistry()


def answered(registry, *timings, keep=False) -> CallRecorder:
    recorder = CallRecorder(registry, role="target", keep=keep)
    with recorder.record("Decode", CALL, depth=0, rows=0) as record:
        for timing in timings:
            recorder.count_answer(record, timing, phase="decode")
    return recorder


def seen(registry, name, **labels):
    labels = {"role": "target", **labels}
    return tuple(registry.get_sample_value(f"{name}_{part}", labels) for part in ("count", "sum"))


def test_each_forward_of_an_answer_is_seen_with_its_own_part_of_the_time(registry):
    answered(registry, CallTiming(forward_ns=6_000_000_000, forward_count=3))
    count, seconds = seen(registry, "paceline_forward_seconds", phase="decode")
    assert (count, seconds) == (3, pytest.approx(6))


def test_an_answer_that_needed_no_forward_is_seen_in_the_queue_alone(registry):
    answered(registry, CallTiming(queue_ns=500_000_000))
    assert seen(registry, "paceline_forward_seconds", phase="decode") == (0, 0)
    assert seen(registry, "paceline_queue_seconds") == (1, 0.5)


def test_a_calls_answers_add_up_in_its_record(registry):
    timing = CallTiming(queue_ns=5, forward_ns=70, forward_count=1)
    (record,) = answered(registry, timing, timing, keep=True).recent()
    assert (record["queue_ns"], record["forward_ns"]) == (10, 140)
    assert seen(registry, "paceline_queue_seconds")[0] == 2


# What each metric of a host shows; of a counter without its suffix.
GAUGES = {
    "sessions_active": "sessions_open",
    "num_requests_waiting": "queue_length",
    "num_requests_running": "forwards_running",
    "calls_live": "calls_live",
    "kept_tokens": "tokens_kept",
}
COUNTERS = {
    "sessions_opened": "sessions_opened",
    "sessions_released": "sessions_released",
    "forwards": "forwards",
    "forward_calls": "items",
    "forward_rows": "rows",
    "prefill_parts": "prefill_parts",
    "forwards_interrupted": "forwards_interrupted",
    "layers_run": "layers_run",
    "reused_tokens": "tokens_reused",
    "calls_refused": "calls_refused",
    "calls_adopted": "calls_adopted",
    "calls_anticipated": "calls_anticipated",
    "calls_superseded": "calls_superseded",
    "calls_cancelled": "calls_cancelled",
    "spec_decode_num_drafts": "draft_calls",
    "spec_decode_num_accepted_tokens": "accepted_tokens",
    "forced_tokens": "forced_tokens",
    "self_draft_num_proposed_tokens": "guesses_proposed",
    "self_draft_num_judged_tokens": "guesses_judged",
    "self_draft_num_pruned_tokens": "guesses_pruned",
    "self_draft_num_accepted_tokens": "guesses_accepted",
}
# Of these, more than the number itself is told.
OTHERWISE = {"tokens_reserved", "sessions_expired", "draft_tokens", "judged_tokens", "wasted_ns"}
OTHERWISE |= {"forwards_wasted", "freeing_ns", "model_forwards"}
UNTOLD = {"verify_calls", "decode_calls"}


def test_each_statistic_of_a_host_is_told_by_its_own_metric(registry):
    names = [it.name for it in fields(HostStatistics) if it.name != "model_forwards"]
    numbers = {name: 1000 + at for at, name in enumerate(names)}
    told = HostStatistics(**numbers, model_forwards=(("large", 11), ("small", 12)))
    host = SimpleNamespace(
        statistics=lambda: told,
        limits=HostLimits(token_budget=2 * told.tokens_reserved),
        overdue_seconds=lambda: 7.5,
    )
    registry.register(HostCollector(host, role="target"))

    def value(name, **labels):
        return registry.get_sample_value(f"paceline_{name}", {"role": "target", **labels})

    assert {it: value(it) for it in GAUGES} == {it: numbers[GAUGES[it]] for it in GAUGES}
    counted = {it: value(f"{it}_total") for it in COUNTERS}
    assert counted == {it: numbers[COUNTERS[it]] for it in COUNTERS}
    assert value("forward_overdue_seconds") == 7.5
    assert value("kv_cache_usage_perc") == 0.5
    drafted = told.draft_tokens + told.judged_tokens
    assert value("spec_decode_num_draft_tokens_total") == drafted
    assert value("wasted_forward_seconds_total") == told.wasted_ns / 1e9
    assert value("cancel_to_free_seconds_count") == told.forwards_wasted
    assert value("cancel_to_free_seconds_sum") == told.freeing_ns / 1e9
    assert value("sessions_evicted_total", reason="lease") == told.sessions_expired
    assert value("stage_forwards_total", stage="0", model="large") == 11
    assert value("stage_forwards_total", stage="1", model="small") == 12
    tested = {*GAUGES.values(), *COUNTERS.values(), *OTHERWISE, *UNTOLD}
    assert tested == {it.name for it in fields(HostStatistics)}, "a new one is to be told, too"
