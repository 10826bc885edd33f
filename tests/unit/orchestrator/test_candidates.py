"""Which servers a request may use, and whom a refusal concerns; on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_contract.calls import VerificationRule
from paceline_orchestrator.decoding.candidates import Candidates
from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.fleet.silence import NeglectError
from support.fake_text import continuation
from support.orchestrating import PROMPT
from support.virtual_servers import drafters, targets
from support.virtual_system import now, virtual_system
from support.virtual_time import virtually

BY_REJECTION = {
    "verification_rule": sampling_pb2.VERIFICATION_RULE_REJECTION,
    "sampling": sampling_pb2.SamplingParameters(temperature=1),
}


@pytest.mark.parametrize(
    "refusal",
    [errors.UnsupportedError("not this"), errors.InvalidFieldError.of("spec", "is too much")],
)
@virtually
async def test_a_drafter_that_refuses_one_request_is_asked_by_the_next_one(refusal):
    (drafter,) = drafters(1)
    async with virtual_system(drafter, *targets(1)) as system:
        drafter.open_error = refusal
        refused = await system.generate(strategy=pb.STRATEGY_SPECULATIVE)
        assert refused.token_ids == continuation(PROMPT, 24)
        assert len(system.records("OpenSession", server="drafter-0")) == 1, "asked once"
        assert system.server("drafter-0").ready
        drafter.open_error = None
        served = await system.generate(strategy=pb.STRATEGY_SPECULATIVE)
        assert served.finished.statistics.drafter_forward_count


@virtually
async def test_a_drafter_is_not_asked_for_drafts_under_a_rule_that_it_does_not_know():
    unfit, fit = drafters(2)
    fit.rules = tuple(VerificationRule)
    async with virtual_system(unfit, fit, *targets(1, rules=fit.rules)) as system:
        await system.generate(strategy=pb.STRATEGY_SPECULATIVE, **BY_REJECTION)
        assert not system.records("OpenSession", server="drafter-0")
        assert system.records("Draft", server="drafter-1")
        stream = await system.generate(strategy=pb.STRATEGY_DISTRIBUTED, drafter_count=2)
        assert not stream.fallbacks
        assert system.records("OpenSession", server="drafter-0"), "under EXACT it is one like any"


@virtually
async def test_a_target_that_does_not_know_a_rule_does_not_speak_for_the_others():
    unfit, fit = targets(2)
    fit.rules = tuple(VerificationRule)
    async with virtual_system(unfit, fit) as system:
        stream = await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, **BY_REJECTION)
        assert stream.token_ids
        assert not system.records("Decode", server="target-0")


@virtually
async def test_a_target_is_not_taken_out_by_a_request_that_it_does_not_support():
    refusing, other = targets(2)
    async with virtual_system(refusing, other) as system:
        refusing.open_error = errors.UnsupportedError("not this")
        stream = await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=4)
        assert stream.token_ids == continuation(PROMPT, 4)
        assert system.server("target-0").ready


@virtually
async def test_a_server_that_keeps_calls_waiting_is_left_alone_for_twice_as_long_each_time():
    async with virtual_system(*targets(1)) as system:
        server = system.server("target-0")
        candidates = Candidates(system.pool, system.pool.model())
        for seconds in (20, 40, 80):
            error = NeglectError("it has the call")
            candidates.blame(server, error, asked_at=now(), reach=0, was_open=True)
            await asyncio.sleep(seconds - 1)
            assert server.ready, "it has answered a probe"
            assert not candidates.not_among((), role=Role.TARGET)
            await asyncio.sleep(1)
            assert candidates.not_among((), role=Role.TARGET) == [server]
