"""The small parts: endpoints, deadlines, latencies, decided tokens, what may be imported."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from paceline.errors import InvalidFieldError, InvariantViolatedError
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_contract.calls import CallTiming, VerificationRule
from paceline_orchestrator.decoding.deadline import Deadline
from paceline_orchestrator.decoding.decided_tokens import DecidedTokens
from paceline_orchestrator.fleet.discovery import Endpoint, Role, StaticDiscovery, parse_endpoints
from paceline_orchestrator.fleet.latency import ObservedLatency
from paceline_orchestrator.fleet.row_prices import RowPrices
from paceline_orchestrator.front.generation import Generation
from paceline_orchestrator.front.order import Order
from paceline_orchestrator.front.translation import read_options
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_protocol.draft_shape import CHAIN, Shape
from paceline_protocol.messages import CapacityChanged, StartVerify
from paceline_protocol.methods import METHODS, Strategy
from paceline_protocol.task import ASSUMED_RATES, DispatchPolicy
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


def test_a_deadline_that_is_over_leaves_no_time():
    assert Deadline.after(-1).remaining_seconds == 0


def test_the_way_of_a_call_is_told_from_the_lag_of_its_further_answers():
    meter = ObservedLatency()
    assert meter.call_ns is None
    for is_first in (True, False, False):
        timing = CallTiming(queue_ns=100, forward_ns=400, forward_count=2, row_count=2)
        meter.observe(timing, elapsed_ns=1300 if is_first else 660, is_first=is_first)
    assert meter.call_ns == 800
    assert 0 < meter.lag_ns < 80
    for _ in range(60):
        meter.observe(timing, elapsed_ns=660, is_first=False)
    assert meter.lag_ns == 80
    assert meter.call_ns == 800


def test_rows_cost_what_lies_between_those_that_were_measured():
    prices = RowPrices.measured(((1, 100), (2, 90), (4, 130), (8, 210)), shares_forwards=True)
    assert prices.shares_forwards
    costs = [prices.of(rows) for rows in (1, 2, 3, 4, 6, 8)]
    assert costs == pytest.approx([1, 1, 1.15, 1.3, 1.7, 2.1])
    assert prices.of(15) == pytest.approx(2.1 + 7 * 1.1 / 7)
    assert RowPrices.measured(()).of(1000) == 1.0


def test_a_server_seems_free_for_a_while_after_an_answer_that_did_not_wait():
    clock = SimpleNamespace(now=5.0)
    meter = ObservedLatency(clock=lambda: clock.now)
    assert not meter.seems_free
    meter.observe(CallTiming(30, 300, forward_count=1, row_count=1), elapsed_ns=400)
    assert meter.seems_free
    clock.now += 1
    assert not meter.seems_free
    meter.observe(CallTiming(30, 300, forward_count=1, row_count=1), elapsed_ns=400)
    meter.observe(CallTiming(31, 300, forward_count=1, row_count=1), elapsed_ns=400)
    assert not meter.seems_free
    meter.observe(CallTiming(0, 300, 1, 1, shared_row_count=2, shared_call_count=2), elapsed_ns=400)
    assert not meter.seems_free, "somebody is there, though a forward has room for both"


def an_order(*, tree_token_limit=0, **plan):
    plan = {
        "strategy": Strategy.DISTRIBUTED,
        "lookahead": 1,
        "broadcast_prefill": True,
        "keep_prefill": True,
        "shape": CHAIN,
        "hit_rates": ASSUMED_RATES,
        "drafts_ahead": False,
        "own_guesses": False,
    } | plan
    rules = {"rule": VerificationRule.EXACT, "dispatch": DispatchPolicy.WORK_CONSERVING}
    order = SimpleNamespace(
        plan=SimpleNamespace(method=METHODS[plan["strategy"]], **plan),
        prefix=(1, 2),
        eos_ids=frozenset(),
        options=SimpleNamespace(wish=SimpleNamespace(**rules)),
        model=SimpleNamespace(tree_token_limit=tree_token_limit, tree_depth_limit=tree_token_limit),
        _missing=5,
    )
    order.task = partial(Order.task, order)
    return order


def test_a_request_is_decoded_with_the_trees_and_the_hit_rates_of_its_plan():
    planned = {"shape": Shape(3, 2), "hit_rates": (0.5,) * 16}
    task = an_order(tree_token_limit=20, **planned).task(is_alone=True)
    assert (task.width, task.branches, task.tree_tokens, task.tree_depth) == (3, 2, 20, 20)
    assert task.hit_rates == planned["hit_rates"]


@pytest.mark.parametrize("drafts_ahead", [False, True])
def test_a_request_drafts_ahead_if_its_plan_says_so(drafts_ahead):
    order = an_order(strategy=Strategy.SPECULATIVE, drafts_ahead=drafts_ahead)
    assert order.task(is_alone=True).drafts_ahead is drafts_ahead


@pytest.mark.parametrize("policy", pb.DispatchPolicy.values())
def test_a_request_in_blocks_wants_no_drafting_ahead(policy):
    wish = read_options(pb.GenerateRequest(dispatch_policy=policy)).wish
    assert wish.may_draft_ahead is (policy != pb.DISPATCH_POLICY_BLOCKS)


@pytest.mark.parametrize("is_idle", [False, True])
def test_only_a_request_that_is_alone_keeps_targets_busy_with_its_prompt(is_idle):
    order = an_order()
    servers = SimpleNamespace(assigned=SimpleNamespace(is_idle=is_idle))
    generation = SimpleNamespace(_order=order, _servers=servers)
    capacity = CapacityChanged(targets=(0, 1, 2), drafters=(0,))
    method = Generation._create_method(generation, capacity)
    verifications = [it for it in method.start() if isinstance(it, StartVerify)]
    assert len(verifications) == (3 if is_idle else 1)


def test_only_what_a_target_decided_becomes_final():
    decided = DecidedTokens(10)
    decided.add(9, [1, 2])
    decided.add(11, [3, 4])
    decided.add(11, [5])
    decided.finalize([2, 5])
    assert decided.final_length == 12
    with pytest.raises(InvariantViolatedError):
        decided.finalize([9])


def test_a_token_without_a_verdict_is_not_let_through():
    with pytest.raises(InvariantViolatedError):
        DecidedTokens(10).finalize([1])


def test_the_orchestrator_imports_no_torch_and_the_clusters_client_only_where_it_is_used():
    code = (
        "import sys, paceline_orchestrator.__main__;"
        "bad = {'torch', 'transformers', 'numpy', 'paceline_engine', 'kubernetes', 'aiohttp'};"
        "bad &= set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
