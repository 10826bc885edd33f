"""Which requests the metrics count, from when on they measure, and what each of them tells."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from paceline import errors
from paceline_orchestrator.decoding.metrics import RequestMetrics
from paceline_orchestrator.decoding.statistics import Fallback, ModelForwards, Statistics
from paceline_protocol.draft_statistics import DraftStatistics
from paceline_protocol.methods import Strategy
from support.virtual_servers import targets
from support.virtual_system import virtual_system
from support.virtual_time import virtually

HOPS_SECONDS = 0.01


@virtually
async def test_the_time_of_a_request_counts_from_its_arrival():
    (target,) = targets(1)
    async with virtual_system(target) as system, asyncio.TaskGroup() as tasks:
        await target.kill()
        await system.until(lambda: not system.server("target-0").ready)
        running = tasks.create_task(system.generate(max_tokens=8))
        await asyncio.sleep(2)
        await target.start()
        stream = await running
        took_seconds = stream.ended - stream.began
        assert took_seconds > 2
        told = system.registry.get_sample_value("paceline_request_duration_seconds_sum")
        assert told == pytest.approx(took_seconds, abs=HOPS_SECONDS)


@virtually
async def test_every_request_is_counted_once_whatever_becomes_of_it():
    (target,) = targets(1)
    async with virtual_system(target) as system:

        def told():
            return system.registry.get_sample_value("paceline_incoming_requests_total")

        await system.generate()
        assert told() == 1
        with pytest.raises(errors.InvalidFieldError):
            await system.generate(lookahead=0)
        assert told() == 2
        await target.kill()
        with pytest.raises(errors.NoTargetError):
            await system.generate()
        assert told() == 3
        system.servicer.drain()
        with pytest.raises(errors.DrainingError):
            await system.generate()
        assert told() == 4


def test_each_number_of_a_request_is_told_by_its_own_metric():
    took = Statistics(
        drafts=DraftStatistics(
            drafted=101,
            accepted=90,
            rejected=20,
            discarded=33,
            corrections_ahead=10,
            branch_judged=45,
            branch_accepted=46,
        ),
        target_forward_count=61,
        cancelled_count=63,
        forward_ns=65_000,
        time_to_first_token_ns=2_000_000_000,
        fallbacks=Counter({Fallback.TARGET_LOST: 7, Fallback.LOAD_CHANGED: 8}),
        drafter_models={"large": ModelForwards(71, 10), "small": ModelForwards(72, 20)},
        token_count=122,
    )
    served = SimpleNamespace(
        strategy=Strategy.SPECULATIVE, targets_used=5, speed_up=1.5, statistics=lambda: took
    )
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)

    def value(name, **labels):
        return registry.get_sample_value(f"paceline_{name}", labels)

    with metrics.request(served, arrived_ns=0):
        assert value("num_requests_running") == 1
    assert value("num_requests_running") == 0
    assert value("time_to_first_token_seconds_sum") == 2
    assert value("request_spec_decode_acceptance_rate_sum") == 0.8
    assert value("speedup_vs_autoregressive_sum", strategy="speculative") == 1.5
    assert value("speculation_parallelism_sum") == 5
    assert value("spec_decode_num_draft_tokens_total") == 101
    assert value("spec_decode_num_accepted_tokens_total") == 90
    assert value("spec_decode_num_wasted_tokens_total", reason="rejected") == 20
    assert value("spec_decode_num_wasted_tokens_total", reason="discarded") == 33
    assert value("branch_rows_total") == 45
    assert value("branch_rows_accepted_total") == 46
    assert value("corrections_ahead_total") == 10
    assert value("worthless_rpcs_cancelled_total") == 63
    assert value("drafter_forwards_total", model="large") == 71
    assert value("drafter_forwards_total", model="small") == 72
    assert value("fallbacks_total", kind="target_lost") == 7
    assert value("fallbacks_total", kind="load_changed") == 8
    assert value("request_walltime_improvement_count", strategy="speculative") is None
    took.fallbacks.clear()  # SWI is told where no repair hides what ran
    with metrics.request(served, arrived_ns=0):
        pass
    improvement = value("request_walltime_improvement_sum", strategy="speculative")
    assert improvement == took.walltime_improvement


def test_names_of_models_beyond_the_first_ones_are_counted_together():
    """A drafter can say another name each minute, and a series stays."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    for number in range(200):
        took = Statistics(drafter_models={"first": ModelForwards(1), f"{number}": ModelForwards(1)})
        served = SimpleNamespace(
            strategy=Strategy.SPECULATIVE,
            targets_used=0,
            speed_up=None,
            statistics=lambda took=took: took,
        )
        with metrics.request(served, arrived_ns=0):
            pass

    def value(model):
        return registry.get_sample_value("paceline_drafter_forwards_total", {"model": model})

    assert value("first") == 200
    assert value("0") == value("62") == 1
    assert value("63") is None
    assert value("other") == 200 - 63


def test_what_did_not_happen_is_no_measurement():
    served = SimpleNamespace(
        strategy=Strategy.SPECULATIVE, targets_used=0, speed_up=None, statistics=Statistics
    )
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    with metrics.request(served, arrived_ns=0):
        pass
    counts = {
        sample.name: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith("_count")
    }
    assert counts.pop("paceline_request_duration_seconds_count") == 1
    assert set(counts.values()) <= {0}
