"""Plans follow what the servers are doing now."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.latency import LatencyMeter
from paceline_orchestrator.planning import Planning
from paceline_orchestrator.protocol.strategy import Strategy


def _server(step_ns: int, *, session_count: int) -> SimpleNamespace:
    latency = LatencyMeter()
    latency.adopt(((1, step_ns),), prefill_fixed_ns=step_ns, prefill_ns_per_token=0)
    return SimpleNamespace(latency=latency, session_count=session_count)


def _plan(*, busy: int, idle: int):
    targets = [_server(30_000_000, session_count=0) for _ in range(idle)]
    targets += [_server(30_000_000, session_count=1) for _ in range(busy)]
    pool = SimpleNamespace(
        targets=lambda _: targets, drafters=lambda _: [_server(3_000_000, session_count=0)]
    )
    return Planning(pool).plan(pb.GenerateRequest(text="x"), None, prompt_length=5)


@pytest.mark.parametrize(("busy", "idle"), [(0, 7), (3, 4), (5, 2)])
def test_a_request_spreads_over_idle_targets_only(busy, idle):
    plan = _plan(busy=busy, idle=idle)
    assert plan.strategy is Strategy.DISTRIBUTED
    assert 1 < plan.target_count <= idle


@pytest.mark.parametrize(("busy", "idle"), [(7, 0), (6, 1)])
def test_without_two_idle_targets_a_request_is_decoded_with_one(busy, idle):
    plan = _plan(busy=busy, idle=idle)
    assert plan.strategy is Strategy.SPECULATIVE
    assert plan.target_count == 1
