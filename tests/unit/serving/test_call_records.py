"""What a model server counts of the calls that it answered."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from paceline_engine.calls import CallTiming, PrefixCall
from paceline_model_server.records import CallRecorder

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
