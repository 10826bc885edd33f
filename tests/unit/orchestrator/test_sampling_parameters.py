"""Targets of several versions: a request goes to those that apply all of its sampling parameters.

A target that lacks one of them would choose other tokens, as an older version does that has never
heard of the parameter; here such a target says another text altogether.
"""

from __future__ import annotations

import asyncio

import pytest

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline.v1.sampling_pb2 import SamplingParameters
from paceline_contract.calls import VerificationRule
from paceline_contract.sampling import FILTERS, SAMPLING_PARAMETERS
from paceline_orchestrator.fleet import shortage
from support.fake_text import continuation
from support.orchestrating import PROMPT
from support.virtual_servers import VirtualServer
from support.virtual_system import now, virtual_system
from support.virtual_time import virtually

TOKENS = 24
NEWER = FILTERS | {"min_tokens"}
WAYS = {
    "plain": {"strategy": pb.STRATEGY_AUTOREGRESSIVE},
    "si": {"strategy": pb.STRATEGY_SPECULATIVE, "lookahead": 3},
    "dsi": {"strategy": pb.STRATEGY_DISTRIBUTED, "lookahead": 2, "target_count": 3},
    "auto": {},
}


def wrong(text):
    return 200 + len(text) % 5


def a_target(number, applied, **more):
    return VirtualServer("target", name=f"target-{number}", samples_by=applied, **more)


class Wordless(VirtualServer):
    """It is too old to say what it applies."""

    def info(self):
        said = super().info()
        del said.sampling_parameters[:]
        return said


def asking(**sampling):
    return {"sampling": SamplingParameters(**sampling)}


def opened_at(system, server):
    return len(system.records("OpenSession", server=server))


@pytest.mark.parametrize("way", WAYS)
@virtually
async def test_a_parameter_goes_to_the_targets_that_apply_it_alone(way):
    """The older ones are quicker, and more."""
    older = [a_target(n, FILTERS, token_after=wrong, latency_seconds=0.01) for n in (0, 1)]
    newer = [a_target(n, NEWER, latency_seconds=0.05) for n in (2, 3)]
    drafter = VirtualServer("drafter", name="drafter-0", latency_seconds=0.005)
    async with virtual_system(*older, *newer, drafter) as system:
        stream = await system.generate(max_tokens=TOKENS, **asking(min_tokens=2), **WAYS[way])
        assert stream.token_ids == continuation(PROMPT, TOKENS)
        assert stream.fallbacks == {}
        assert opened_at(system, "target-0") == opened_at(system, "target-1") == 0
        assert not any(it.sampling.min_tokens for it in drafter.specs)
        await system.generate(max_tokens=TOKENS, **asking(top_p=0.5))
        assert opened_at(system, "target-0") + opened_at(system, "target-1") > 0


@virtually
async def test_the_newer_target_is_waited_for_while_it_is_full_and_while_it_restarts():
    older, newer = a_target(0, FILTERS, token_after=wrong), a_target(1, NEWER, latency_seconds=0.1)
    async with virtual_system(older, newer) as system:
        newer.is_full = True
        asked = asyncio.create_task(system.generate(max_tokens=TOKENS, **asking(min_tokens=2)))
        await asyncio.sleep(2)
        newer.is_full = False
        await asyncio.sleep(1)
        await newer.kill()
        await newer.start()
        assert (await asked).token_ids == continuation(PROMPT, TOKENS)
        assert opened_at(system, "target-0") == 0


@virtually
async def test_parameters_that_no_one_target_applies_together_are_refused_by_name_at_once():
    one, other = a_target(0, FILTERS | {"min_tokens"}), a_target(1, FILTERS | {"logit_bias"})
    async with virtual_system(one, other) as system:
        for alone in ({"min_tokens": 2}, {"logit_bias": {3: 1.0}}):
            await system.generate(max_tokens=TOKENS, **asking(**alone))
        began = now()
        with pytest.raises(
            errors.UnsupportedError, match=r"sampling\.logit_bias: .* it together with min_tokens$"
        ):
            await system.generate(max_tokens=TOKENS, **asking(min_tokens=2, logit_bias={3: 1.0}))
        with pytest.raises(
            errors.UnsupportedError, match=r"sampling\.frequency_penalty: .* it, nor logit_bias$"
        ):
            await system.generate(**asking(frequency_penalty=1, min_tokens=2, logit_bias={3: 1.0}))
        assert now() - began < shortage.WAIT_SECONDS / 2


@virtually
async def test_a_grammar_needs_the_engine_of_most_at_the_target_that_applies_the_rest():
    everything = {"samples_by": SAMPLING_PARAMETERS}
    ours = [a_target(n, FILTERS | {"grammar"}, grammar_engine="e 1") for n in (0, 1)]
    other = VirtualServer("target", name="target-2", grammar_engine="e 2", **everything)
    async with virtual_system(*ours, other) as system:
        with pytest.raises(errors.UnsupportedError, match=r"sampling\.(grammar|min_tokens): "):
            await system.generate(**asking(grammar={"regex": "a"}, min_tokens=2))
        await system.generate(**asking(grammar={"regex": "a"}))
        await system.generate(**asking(min_tokens=2))


@virtually
async def test_a_value_that_changes_nothing_is_not_sent_to_a_server_that_does_not_know_the_field():
    older, drafter = a_target(0, FILTERS), VirtualServer("drafter", name="drafter-0")
    async with virtual_system(older, drafter) as system:
        asked = asking(temperature=0.5, min_tokens=0, repetition_penalty=1, top_k=0)
        stream = await system.generate(max_tokens=TOKENS, **asked, **WAYS["si"])
        assert stream.token_ids == continuation(PROMPT, TOKENS)
        for spec in (*older.specs, *drafter.specs):
            sent = {field.name for field, _ in spec.sampling.ListFields()}
            assert sent == {"temperature", "top_k"}


@pytest.mark.parametrize("rule", VerificationRule)
@virtually
async def test_a_drafter_is_asked_for_what_it_applies_under_each_rule(rule):
    """Its tokens are judged; under REJECTION by the distribution that it drew them from."""
    rules = {"rules": tuple(VerificationRule)}
    drafter, newer = (
        VirtualServer("drafter", name="drafter-0", **rules),
        a_target(0, NEWER, **rules),
    )
    async with virtual_system(newer, drafter) as system:
        asked = asking(temperature=0.5, min_tokens=3)
        number = sampling_pb2.VerificationRule.Value(f"VERIFICATION_RULE_{rule.name}")
        await system.generate(verification_rule=number, **asked, **WAYS["si"])
        assert [it.sampling for it in drafter.specs] == [SamplingParameters(temperature=0.5)]
        assert {it.sampling.min_tokens for it in newer.specs} == {3}


@pytest.mark.parametrize("rule", VerificationRule)
@virtually
async def test_a_drafter_that_applies_no_temperature_drafts_without_one_under_each_rule(rule):
    rules = {"rules": tuple(VerificationRule)}
    cold = VirtualServer("drafter", name="drafter-0", samples_by=FILTERS - {"temperature"}, **rules)
    async with virtual_system(cold, a_target(0, FILTERS, **rules)) as system:
        number = sampling_pb2.VerificationRule.Value(f"VERIFICATION_RULE_{rule.name}")
        asked = asking(temperature=0.5, top_k=3)
        stream = await system.generate(verification_rule=number, **asked, **WAYS["si"])
        assert [it.sampling for it in cold.specs] == [SamplingParameters(top_k=3)]
        assert stream.fallbacks == {}
        assert stream.finished.statistics.accepted_token_count


@virtually
async def test_a_field_that_this_version_does_not_know_is_refused_and_not_left_out():
    unknown = SamplingParameters.FromString(b"\xfa\x01\x01x")  # the field with the number 31
    target = a_target(0, SAMPLING_PARAMETERS)
    async with virtual_system(target) as system:
        for is_away in (False, True):
            if is_away:
                await target.kill()
                await system.until(lambda: not system.server("target-0").ready)
            began = now()
            with pytest.raises(errors.UnsupportedError, match=r"sampling: .* field number 31"):
                await system.generate(sampling=unknown)
            assert now() == began, "no target's word would change it, so none is waited for"
        assert opened_at(system, "target-0") == 0


@virtually
async def test_a_server_that_names_nothing_applies_what_the_protos_had_at_first():
    async with virtual_system(Wordless("target", name="target-0")) as system:
        applied = {frozenset({"temperature", "top_k", "top_p", "min_p"})}
        assert system.server("target-0").facts.sampling_parameters == applied
        await system.generate(**asking(temperature=1, top_k=3, top_p=0.5, min_p=0.1))
        later = {
            "logit_bias": {3: 1.0},
            "presence_penalty": 2,
            "frequency_penalty": 2,
            "repetition_penalty": 2,
            "min_tokens": 2,
            "grammar": {"regex": "a"},
        }
        for name, value in later.items():
            with pytest.raises(errors.UnsupportedError, match=f"sampling.{name}: "):
                await system.generate(**asking(**{name: value}))


@virtually
async def test_a_name_that_this_version_does_not_know_means_nothing():
    """A later version's target applies it; no request can have it here."""
    plain, later = a_target(0, NEWER), a_target(1, NEWER | {"later_p"})
    async with virtual_system(plain, later) as system:
        said = [system.server(it.name).facts.sampling_parameters for it in (plain, later)]
        assert said == [{frozenset(NEWER)}] * 2
        standings = system.pool.standings()
        assert [standings[it].detail for it in system.pool.servers] == ["", ""]


@virtually
async def test_a_plan_counts_the_targets_alone_that_apply_the_requests_sampling():
    plans = []
    for older_count in (0, 3):
        older = [a_target(n, FILTERS, latency_seconds=0.1) for n in range(1, 1 + older_count)]
        drafter = VirtualServer("drafter", name="drafter-0", latency_seconds=0.02)
        async with virtual_system(a_target(0, NEWER, latency_seconds=0.1), *older, drafter) as it:
            await it.generate(max_tokens=200)
            stream = await it.generate(max_tokens=200, **asking(min_tokens=2))
            plans.append((stream.started.strategy, stream.started.lookahead))
            plain = await it.generate(max_tokens=50)
            is_dsi = plain.started.strategy == pb.STRATEGY_DISTRIBUTED
            assert is_dsi is (older_count > 0), "all targets together are for DSI"
    assert plans[0] == plans[1]
