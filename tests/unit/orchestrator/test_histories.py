"""Requests at servers that fail at random moments: no token, no time, no server is lost by it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.v1 import orchestrator_service_pb2 as pb
from support.virtual_scenario import FAULTS, Fault, Scenario, Wish, play
from support.virtual_time import run_virtually

wishes = st.builds(
    Wish,
    strategy=st.sampled_from(
        [pb.STRATEGY_DISTRIBUTED, pb.STRATEGY_SPECULATIVE, pb.STRATEGY_AUTOREGRESSIVE]
    ),
    max_tokens=st.integers(1, 60),
    lookahead=st.integers(1, 5),
    target_count=st.integers(1, 4),
    drafter_count=st.integers(1, 2),
    at=st.sampled_from([0.0, 0.1, 1.0]),
    seconds=st.sampled_from([60.0, 60.0, 60.0, 0.4, 3.0]),
    leaves_after=st.sampled_from([None, None, None, 0.01, 0.3, 2.0]),
)


@st.composite
def scenarios(draw):
    target_count = draw(st.integers(1, 4))
    drafter_count = draw(st.integers(0, 2))
    servers = [f"target-{index}" for index in range(target_count)]
    servers += [f"drafter-{index}" for index in range(drafter_count)]
    faults = st.builds(
        Fault,
        kind=st.sampled_from(sorted(FAULTS)),
        server=st.sampled_from(servers),
        at=st.integers(0, 60).map(lambda it: it / 20),
        seconds=st.sampled_from([0.05, 0.5, 3.0, 8.0]),
    )
    return Scenario(
        wishes=tuple(draw(st.lists(wishes, min_size=1, max_size=2))),
        target_count=target_count,
        drafter_count=drafter_count,
        agreement=draw(st.sampled_from([0.0, 0.5, 0.8, 1.0])),
        eos_at=draw(st.sampled_from([None, None, 30])),
        faults=tuple(draw(st.lists(faults, max_size=5))),
        seed=draw(st.integers(1, 1000)),
    )


def check(scenario):
    history = run_virtually(play(scenario))
    assert not history.findings(), history.tell()


@settings(max_examples=80, derandomize=True, suppress_health_check=list(HealthCheck))
@given(scenarios())
def test_whatever_fails_the_promises_hold(scenario):
    check(scenario)


@pytest.mark.long
@settings(max_examples=5000, suppress_health_check=list(HealthCheck))
@given(scenarios())
def test_whatever_fails_the_promises_hold_in_thousands_of_histories(scenario):
    check(scenario)
