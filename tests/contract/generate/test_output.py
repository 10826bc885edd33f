"""The same tokens whatever the strategy, and what is said of how they came about."""

from __future__ import annotations

import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_contract.calls import VerificationRule
from support.fake_text import continuation, likeliest_after, logprob_of
from support.orchestrating import PROMPT, STRATEGIES, a_drafter, orchestrating, targets

SAMPLING = sampling_pb2.SamplingParameters


async def test_every_strategy_generates_what_plain_decoding_does():
    async with orchestrating(drafters=[a_drafter()], targets=targets(3)) as system:
        for strategy in STRATEGIES:
            for lookahead in (1, 2, 5):
                for target_count in (1, 2, 3):
                    received = await system.generate(
                        strategy=strategy, lookahead=lookahead, target_count=target_count
                    )
                    assert received.token_ids == continuation(PROMPT, 24)
                    assert received.finished.finish_reason == pb.FINISH_REASON_LENGTH
                    assert received.started.strategy == strategy
        await system.settled()
        assert all(model.opened == model.closed for model in system.models)


@pytest.mark.parametrize("agrees", [lambda _: True, lambda _: False])
async def test_a_perfect_and_a_useless_drafter_change_nothing(agrees):
    async with orchestrating(drafters=[a_drafter(agrees=agrees)], targets=targets(2)) as system:
        for strategy in STRATEGIES[1:]:
            received = await system.generate(strategy=strategy, lookahead=3)
            assert received.token_ids == continuation(PROMPT, 24)


async def test_two_disagreeing_drafters_change_nothing():
    drafters = [a_drafter(), a_drafter(agrees=lambda position: position % 3 != 0)]
    async with orchestrating(drafters=drafters, targets=targets(3)) as system:
        received = await system.generate(
            strategy=pb.STRATEGY_DISTRIBUTED, lookahead=2, drafter_count=2
        )
        assert received.token_ids == continuation(PROMPT, 24)
        assert all(drafter.calls for drafter in drafters)


async def test_speculation_without_a_drafter_is_plain_decoding_and_counted():
    async with orchestrating(targets=targets(1)) as system:
        for strategy in STRATEGIES[1:]:
            received = await system.generate(strategy=strategy)
            assert received.token_ids == continuation(PROMPT, 24)
            assert received.fallbacks == {"no_drafter": 1}


async def test_auto_says_what_it_chose():
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        received = await system.generate()
        assert received.started.strategy in STRATEGIES
        assert received.started.plan_note
        assert received.token_ids == continuation(PROMPT, 24)


async def test_statistics_add_up():
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        received = await system.generate(
            strategy=pb.STRATEGY_DISTRIBUTED, lookahead=2, include_timeline=True
        )
        took = received.finished.statistics
        assert took.drafted_token_count == (
            took.accepted_token_count + took.rejected_token_count + took.discarded_token_count
        )
        origins = [origin for chunk in received.chunks for origin in chunk.origins]
        assert origins.count(pb.TOKEN_ORIGIN_ACCEPTED_DRAFT) == took.accepted_token_count
        assert took.rejected_token_count
        assert took.cancelled_rpc_count
        assert took.target_forward_count
        assert took.time_to_first_token_ns <= took.total_ns
        assert received.finished.targets_used == 2
        kinds = {event.kind for event in received.finished.timeline}
        assert kinds == set(pb.TimelineEventKind.values()) - {pb.TIMELINE_EVENT_KIND_UNSPECIFIED}
        assert not received.events


async def test_the_last_verification_is_counted_too():
    async with orchestrating(targets=targets(1)) as system:
        received = await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=8)
        assert received.finished.statistics.target_forward_count == 8


async def test_timeline_events_stream_between_the_chunks_on_request():
    async with orchestrating(drafters=[a_drafter()], targets=targets(1)) as system:
        received = await system.generate(
            strategy=pb.STRATEGY_SPECULATIVE, lookahead=2, stream_timeline=True
        )
        assert {event.server for event in received.events} == {
            "drafter-0",
            "target-0",
            "orchestrator",
        }
        assert all(event.start_ns <= event.end_ns for event in received.events)
        assert not received.finished.timeline


@pytest.mark.parametrize("seed", [None, 0, 7, 2**53 - 1])
async def test_the_seed_is_told_and_passed_on(seed):
    asked = {} if seed is None else {"seed": seed}
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        received = await system.generate(strategy=pb.STRATEGY_DISTRIBUTED, **asked)
        told = received.started.seed
        specs = [spec for model in system.models for spec in model.specs]
        assert len(specs) == 3
        assert {spec.seed for spec in specs} == {told}
        assert told < 2**53
        assert seed in (None, told)


async def test_seeds_that_are_chosen_differ():
    async with orchestrating(targets=targets(1)) as system:
        chosen = [(await system.generate(max_tokens=1)).started.seed for _ in range(3)]
        assert len(set(chosen)) == 3


async def test_how_tokens_are_chosen_is_passed_on_unread():
    sampling = SAMPLING(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
    rule = sampling_pb2.VERIFICATION_RULE_REJECTION
    models = targets(1, rules=tuple(VerificationRule))
    async with orchestrating(targets=models) as system:
        received = await system.generate(sampling=sampling, verification_rule=rule)
        assert received.started.promise == received.finished.promise == rule
        greedy = await system.generate(verification_rule=rule)
        assert greedy.started.promise == sampling_pb2.VERIFICATION_RULE_EXACT
        assert [spec.verification_rule for spec in models[0].specs] == [rule, 1]
        assert models[0].specs[0].sampling == sampling


@pytest.mark.parametrize("strategy", [*STRATEGIES, pb.STRATEGY_SELF_SPECULATIVE])
@pytest.mark.parametrize("width", [1, 3])
async def test_what_was_likely_at_each_place_is_the_same_with_every_strategy(strategy, width):
    models = targets(2, self_draft_depth=3, agrees=lambda position: position % 5 != 0)
    async with orchestrating(drafters=[a_drafter()], targets=models) as system:
        plain = await system.generate(strategy=strategy, width=width, branches=width - 1)
        asked = {"strategy": strategy, "width": width, "branches": width - 1, "top_logprobs": 4}
        received = await system.generate(**asked)
        assert received.token_ids == plain.token_ids == continuation(PROMPT, 24)
        assert not any(it.top_logprobs for it in plain.chunks)
        assert not any(it.logprobs for it in received.chunks)
        told = [each for chunk in received.chunks for each in chunk.top_logprobs]
        text = [*PROMPT, *received.token_ids]
        for place, each in zip(range(len(PROMPT), len(text)), told, strict=True):
            expected = dict(likeliest_after(text[:place], 4))
            assert dict(zip(each.token_ids, each.logprobs, strict=True)) == expected


async def test_what_was_likely_is_told_of_a_resumed_text_and_after_lost_verdicts():
    models = targets(2)
    async with orchestrating(drafters=[a_drafter()], targets=models) as system:
        for target in models:
            target.faults.extend(["", "lose_session", "", "overload"])
        resumed = continuation(PROMPT, 5)
        received = await system.generate(
            strategy=pb.STRATEGY_DISTRIBUTED, resume_token_ids=resumed, top_logprobs=1
        )
        told = [each for chunk in received.chunks for each in chunk.top_logprobs]
        assert [each.token_ids[0] for each in told] == continuation(PROMPT, 24)[5:]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_each_token_has_its_own_logprob_on_request(strategy):
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        received = await system.generate(strategy=strategy, logprobs=True)
        text = list(PROMPT)
        for chunk in received.chunks:
            assert len(chunk.logprobs) == len(chunk.token_ids)
            for token_id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
                text.append(token_id)
                assert logprob == pytest.approx(logprob_of(text))
        assert text == [*PROMPT, *continuation(PROMPT, 24)]
        without = await system.generate(strategy=strategy)
        assert not any(it.logprobs for it in without.chunks)
