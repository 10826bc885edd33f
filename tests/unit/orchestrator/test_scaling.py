"""How many verifiers are wanted, and what an autoscaler makes of that."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.planning.equation import needed_target_count
from paceline_orchestrator.scaling.autoscaler import Autoscaler as OwnAutoscaler
from paceline_orchestrator.scaling.demand import (
    Demand,
    DemandMeter,
    RunningMaximum,
    desired_verifiers,
    unlimited_verifiers,
)
from paceline_orchestrator.settings import ScalingSettings
from support.hpa import Autoscaler
from support.waiting import until

demands = st.builds(
    Demand,
    stream_verifiers=st.integers(0, 100),
    verification_count=st.integers(0, 100),
    is_active=st.booleans(),
)
limits = st.tuples(st.integers(0, 20), st.integers(1, 40)).map(sorted)


@given(
    target_us=st.integers(1, 10**7), drafter_us=st.integers(1, 10**6), lookahead=st.integers(1, 64)
)
def test_equation_1_is_exact(target_us, drafter_us, lookahead):
    exact = math.ceil(Fraction(target_us, lookahead * drafter_us))
    assert needed_target_count(target_us, drafter_us, lookahead=lookahead) == exact


def test_equation_1_is_exact_where_floating_point_is_one_too_many():
    assert needed_target_count(900, 300, lookahead=3) == 1 < math.ceil(0.9 / (3 * 0.3))
    assert needed_target_count(2100, 300, lookahead=1) == 7 < math.ceil(2.1 / 0.3)


@given(demands, limits)
def test_the_larger_of_floor_and_elastic_part_is_wanted_within_the_limits(demand, limits):
    least, most = limits
    larger = unlimited_verifiers(demand)
    assert larger == max(demand.stream_verifiers, demand.verification_count)
    wanted = desired_verifiers(larger, least=least, most=most)
    assert least <= wanted <= most
    assert wanted == larger or (larger < least and wanted == least) or wanted == most < larger


@given(demands, limits, st.integers(0, 200))
def test_targets_that_nobody_scales_are_taken_off_within_the_limits(demand, limits, fixed):
    least, most = limits
    wanted = unlimited_verifiers(demand, fixed=fixed)
    assert wanted == max(0, unlimited_verifiers(demand) - fixed)
    assert desired_verifiers(wanted, least=least, most=most) == max(
        least, min(most, unlimited_verifiers(demand) - fixed)
    )


@given(st.lists(demands), st.lists(demands))
def test_it_does_not_matter_which_replica_a_stream_is_at(here, there):
    together = Demand.sum([*here, *there])
    assert Demand.sum([Demand.sum(here), Demand.sum(there)]) == together
    assert Demand.sum([Demand.sum([*there, *here])]) == together


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 50)), min_size=1))
def test_the_largest_wish_of_the_last_while_stands(steps):
    now, seen = 0, []
    maximum = RunningMaximum(60, clock=lambda: now)
    for seconds, value in steps:
        now += seconds
        seen.append((now, value))
        assert maximum.push(value) == max(it for at, it in seen if at >= now - 60)


def a_pool(target_ms=(36,), drafter_ms=(4,), calls=0):
    def servers(role, latencies_ms):
        return [
            SimpleNamespace(
                role=role,
                latency=SimpleNamespace(step_ns=int(it * 1_000_000)),
                call_count=calls,
            )
            for it in latencies_ms
        ]

    return SimpleNamespace(
        servers=[*servers(Role.TARGET, target_ms), *servers(Role.DRAFTER, drafter_ms)]
    )


def an_order(*, lookahead=None, limit=64):
    return {"lookahead": lookahead, "verifier_limit": lambda: limit}


def wanted(meter, *orders):
    if not orders:
        return meter.demand().stream_verifiers
    with meter.stream(**orders[0]):
        return wanted(meter, *orders[1:])


def test_each_stream_wants_what_equation_1_says_for_its_lookahead():
    meter = DemandMeter(a_pool(), lookahead=3)
    assert wanted(meter) == 0
    assert wanted(meter, an_order()) == 3
    assert wanted(meter, an_order(), an_order(lookahead=1)) == 3 + 9
    assert wanted(meter, an_order(limit=2)) == 2
    assert wanted(meter, an_order(limit=1)) == 1


def test_a_stream_wants_what_its_method_can_use_by_now():
    meter = DemandMeter(a_pool(), lookahead=3)
    limit = 1
    with meter.stream(verifier_limit=lambda: limit):
        assert wanted(meter) == 1
        limit = 64
        assert wanted(meter) == 3


def test_one_slow_server_does_not_count_and_unknown_latencies_make_one():
    assert wanted(DemandMeter(a_pool((36, 36, 900)), lookahead=3), an_order()) == 3
    assert wanted(DemandMeter(a_pool((0, 36)), lookahead=3), an_order()) == 3
    assert wanted(DemandMeter(a_pool((0,)), lookahead=3), an_order()) == 1
    assert wanted(DemandMeter(a_pool(drafter_ms=()), lookahead=3), an_order()) == 1


def test_of_servers_that_differ_the_median_counts_the_faster_one_of_two():
    """At 36 and 4 ms, and not at 24 or 48, 3 or 6."""
    assert wanted(DemandMeter(a_pool((48, 24, 900, 36)), lookahead=3), an_order()) == 3
    assert wanted(DemandMeter(a_pool((36,), (6, 3, 50, 4)), lookahead=1), an_order()) == 9


def test_verifications_under_way_are_those_at_targets():
    meter = DemandMeter(a_pool((36, 36), (4, 4, 4), calls=2), lookahead=3)
    assert meter.demand().verification_count == 4


def test_a_scrape_shows_what_is_asked_at_that_moment():
    pool, registry = a_pool(calls=2), CollectorRegistry()
    meter = DemandMeter(pool, lookahead=3)
    OwnAutoscaler(meter, settings=ScalingSettings(), registry=registry, replica_id=1)
    shown = registry.get_sample_value
    assert shown("paceline_verifications_in_flight") == 2
    pool.servers[0].call_count = 5
    with meter.stream(**an_order()):
        assert shown("paceline_verifications_in_flight") == 5
        assert shown("paceline_stream_verifiers") == 3
    assert shown("paceline_stream_verifiers") == 0


async def test_what_the_load_wants_is_told_beside_what_the_limits_leave_of_it():
    pool, registry = a_pool(calls=10), CollectorRegistry()
    settings = ScalingSettings(least_verifiers=2, most_verifiers=4, fixed_verifiers=1)
    autoscaler = OwnAutoscaler(
        DemandMeter(pool, lookahead=3), settings=settings, registry=registry, replica_id=1
    )
    told = registry.get_sample_value
    assert told("paceline_desired_verifiers") == 2
    async with autoscaler:
        await until(lambda: told("paceline_desired_verifiers") == 4, what="it has looked")
        assert told("paceline_desired_verifiers_unlimited") == 9


def test_activity_outlasts_a_stream_and_wakes_whoever_waits():
    now = 100.0
    meter = DemandMeter(a_pool(), lookahead=3, clock=lambda: now)
    assert not meter.is_active
    meter.arrived()
    assert meter.woken.is_set()
    assert meter.is_active
    now += 31
    assert not meter.is_active
    meter.woken.clear()
    with meter.stream(**an_order()):
        now += 1000
        assert meter.is_active
    now += 29
    assert meter.is_active
    meter.arrived()
    assert not meter.woken.is_set()
    now += 31
    assert not meter.is_active


# --- with an autoscaler behind it --------------------------------------------------------------


@given(
    wishes=st.lists(st.integers(0, 40), max_size=12),
    last=st.integers(0, 40),
    limits=limits,
    start=st.integers(1, 40),
    down_pods=st.integers(1, 10),
)
def test_replicas_converge_to_what_is_wanted_within_the_limits(
    wishes, last, limits, start, down_pods
):
    least, most = max(1, limits[0]), max(1, limits[1])
    hpa = Autoscaler(least, most, down_pods=down_pods, replicas=min(most, max(least, start)))
    for wish in wishes:
        replicas = hpa.sync(desired_verifiers(wish, least=least, most=most))
        assert least <= replicas <= most
    wanted = desired_verifiers(last, least=least, most=most)
    # The window of 300 s, then one policy period of 60 s for each of at most 40 steps down.
    for _ in range(300 // 15 + 40 * 60 // 15):
        hpa.sync(wanted)
    assert hpa.replicas == wanted
