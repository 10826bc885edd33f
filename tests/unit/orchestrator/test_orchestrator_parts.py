"""The small parts: endpoints, deadlines, latencies, the ledger, what may be imported."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import paceline_orchestrator
from paceline.errors import InvalidFieldError, InvariantViolatedError
from paceline_orchestrator.deadline import Deadline
from paceline_orchestrator.discovery import Endpoint, Role, StaticDiscovery, parse_endpoints
from paceline_orchestrator.latency import LatencyMeter
from paceline_orchestrator.ledger import Ledger
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_orchestrator.wire import Timing
from paceline_serving.settings import SettingsError, load


def test_endpoints_are_named_by_their_number_unless_they_have_a_name():
    assert parse_endpoints(["a:1", "gpu-7=[::1]:2", "unix:/s"], Role.TARGET) == (
        Endpoint("target-0", "a:1", Role.TARGET),
        Endpoint("gpu-7", "[::1]:2", Role.TARGET),
        Endpoint("target-2", "unix:/s", Role.TARGET),
    )


@pytest.mark.parametrize(
    "values", [["a"], ["a:0"], ["a:65536"], [":1"], ["b b=a:1"], ["x=a:1", "x=b:1"], ["a:1", "a:1"]]
)
def test_endpoints_that_cannot_be_meant_are_refused(values):
    with pytest.raises(InvalidFieldError):
        parse_endpoints(values, Role.TARGET)


async def test_a_static_list_is_told_once():
    endpoints = parse_endpoints(["a:1"], Role.TARGET)
    assert await anext(StaticDiscovery(endpoints).endpoints()) == set(endpoints)


def settings_of(**flags):
    return load(OrchestratorSettings, flags=flags, environment={}, file=None)


def test_settings_need_a_target_and_no_plaintext_beyond_this_machine():
    assert len(settings_of(targets="127.0.0.1:1", drafters="127.0.0.1:2").endpoints) == 2
    for flags in (
        {},
        {"targets": "127.0.0.1"},
        {"targets": "10.0.0.1:1"},
        {"targets": "x=127.0.0.1:1", "drafters": "x=127.0.0.1:2"},
        {"targets": "127.0.0.1:1", "pool_tls_key": "key.pem"},
    ):
        with pytest.raises(SettingsError):
            settings_of(**flags)
    assert settings_of(targets="10.0.0.1:1", insecure="true")
    assert settings_of(targets="10.0.0.1:1", pool_tls_authority="ca.pem")


def test_a_call_gets_four_times_what_it_should_take_within_limits():
    deadline = Deadline.after(60)
    assert deadline.for_call(0) == 1.0
    assert deadline.for_call(500_000_000) == 2.0
    assert deadline.for_call(50_000_000_000) == 10.0
    assert Deadline.after(0.1).for_call(10**9) <= 0.1
    assert Deadline.after(-1).remaining_seconds == 0


def test_latencies_start_with_what_the_server_says_and_follow_what_it_does():
    meter = LatencyMeter()
    assert meter.expected_ns(1) == 0
    meter.adopt(((1, 100), (8, 150)), prefill_fixed_ns=1000, prefill_ns_per_token=10)
    assert meter.step_ns == 100
    assert meter.expected_ns(4) == 150
    assert meter.expected_ns(100) == 2000
    for _ in range(50):
        timing = Timing(queue_ns=30, forward_ns=400, forward_count=2, row_count=2)
        meter.observe(timing, elapsed_ns=500)
    assert meter.step_ns == 200
    assert round(meter.queue_ns, -1) == 30
    assert round(meter.network_ns, -1) == 70
    assert meter.worst_wait_ns == 100


def test_a_prefill_says_nothing_of_a_decoding_step():
    meter = LatencyMeter()
    meter.observe(Timing(forward_ns=10**9, forward_count=1, row_count=1000), elapsed_ns=10**9)
    assert meter.step_ns == 0


def test_only_what_a_target_decided_becomes_final():
    ledger = Ledger(10)
    ledger.note(9, [1, 2])
    ledger.note(11, [3, 4])
    ledger.note(11, [5])
    ledger.settle([2, 5])
    assert ledger.final_length == 12
    with pytest.raises(InvariantViolatedError):
        ledger.settle([9])


def test_a_token_without_a_verdict_is_not_let_through():
    with pytest.raises(InvariantViolatedError):
        Ledger(10).settle([1])


def test_the_orchestrator_imports_no_torch():
    code = (
        "import sys, paceline_orchestrator.__main__;"
        "bad = {'torch', 'transformers', 'numpy', 'paceline_engine'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


MODULES = [
    f"paceline_orchestrator.{module.name}"
    for module in pkgutil.iter_modules(paceline_orchestrator.__path__)
    if module.name not in {"__main__", "protocol"}
]


@pytest.mark.parametrize("name", MODULES)
def test_all_is_exactly_what_is_public(name):
    module = importlib.import_module(name)
    defined = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    }
    assert defined <= set(module.__all__) | {"PoolSettings", "RequestSettings"}
    assert all(hasattr(module, each) for each in module.__all__)
