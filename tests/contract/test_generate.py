"""What orchestrator_service.proto promises of Generate, over fake models and real gRPC."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from contextlib import asynccontextmanager
from itertools import pairwise

import grpc
import pytest

from paceline import errors
from paceline.status import decode
from paceline.v1 import model_service_pb2 as model_pb
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from paceline_orchestrator.front.tokenizer import Codec
from paceline_orchestrator.settings import OrchestratorSettings
from support.fake_models import (
    EOS,
    VOCABULARY_SIZE,
    FakeModelServer,
    byte_tokenizer,
    continuation,
    logprob_of,
    next_token,
    serving,
)
from support.orchestrating import PROMPT, not_yet_begun, orchestrating
from support.waiting import until as soon

STRATEGIES = (pb.STRATEGY_AUTOREGRESSIVE, pb.STRATEGY_SPECULATIVE, pb.STRATEGY_DISTRIBUTED)
STEP = 0.002
SAMPLING = sampling_pb2.SamplingParameters


def a_drafter(**settings):
    settings.setdefault("latency_seconds", STEP / 4)
    settings.setdefault("agrees", lambda position: position % 5 != 0)
    return FakeModelServer("drafter", **settings)


def targets(count, **settings):
    settings.setdefault("latency_seconds", STEP)
    return [FakeModelServer("target", **settings) for _ in range(count)]


# --- the same output, whatever the strategy --------------------------------------------------


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


# --- faults that cost time and nothing else ---------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("lose_session", "session_lost"),
        ("lose_tokens", "prefix_resent"),
        ("tamper", "prefix_resent"),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_what_a_server_forgets_is_sent_again(strategy, fault, kind):
    drafter, target = a_drafter(), targets(1)[0]
    async with orchestrating(drafters=[drafter], targets=[target]) as system:
        target.faults.extend(["", "", fault, "", fault])
        drafter.faults.extend(["", fault])
        received = await system.generate(strategy=strategy, lookahead=2)
        assert received.token_ids == continuation(PROMPT, 24)
        assert received.fallbacks[kind] >= 2
        await system.settled()


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_target_that_vanishes_is_replaced(strategy):
    async with orchestrating(drafters=[a_drafter()], targets=targets(3)) as system:
        call = system.call(strategy=strategy, lookahead=2, target_count=2)
        token_ids = []
        async for message in call:
            token_ids += message.chunk.token_ids
            if len(token_ids) == 5:
                victim = max(system.targets, key=lambda it: len(it.calls))
                await victim.kill()
                token_ids.append(-1)
        token_ids.remove(-1)
        assert token_ids == continuation(PROMPT, 24)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
async def test_a_drafter_that_vanishes_is_done_without(strategy):
    drafter = a_drafter()
    async with orchestrating(drafters=[drafter], targets=targets(2)) as system:
        drafter.faults.extend(["", "hang"])
        call = asyncio.create_task(system.generate(strategy=strategy, lookahead=2))
        await drafter.until(lambda it: len(it.calls) >= 2)
        await drafter.kill()
        received = await call
        assert received.token_ids == continuation(PROMPT, 24)
        assert received.fallbacks["no_drafter"]
        assert received.fallbacks.keys() <= {"drafter_lost", "deadline", "no_drafter"}


async def test_a_target_that_hangs_is_given_up_at_its_deadline():
    async with orchestrating(targets=targets(2)) as system:
        for target in system.targets:
            target.faults.extend(["", "", "hang"])
        received = await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=6)
        assert received.token_ids == continuation(PROMPT, 6)
        assert received.fallbacks["deadline"] >= 1


@pytest.mark.parametrize("ends_by", ["deadline", "cancel"])
async def test_requests_that_end_early_do_not_hide_that_a_target_is_silent(ends_by, monkeypatch):
    monkeypatch.setattr("paceline_orchestrator.calls.deadline._UNKNOWN_SECONDS", 0.5)
    async with orchestrating(targets=targets(1, stalls=lambda _: True)) as system:
        for _ in range(20):
            calls_before = len(system.targets[0].calls)
            call = asyncio.create_task(
                system.generate(timeout=0.2 if ends_by == "deadline" else 20)
            )
            await system.targets[0].until(lambda it, n=calls_before: len(it.calls) > n)
            if ends_by == "cancel":
                await asyncio.wait((call,), timeout=0.2)
                call.cancel()
            await asyncio.wait((call,))
            (server,) = (await system.stub.GetSystemInfo(pb.GetSystemInfoRequest())).servers
            if server.status == "SILENT":
                break
        assert server.status == "SILENT"


async def test_a_target_that_answers_nonsense_is_not_believed():
    async with orchestrating(targets=targets(2)) as system:
        system.targets[0].faults.extend(["", "wrong_answer"])
        system.targets[1].faults.extend(["", "wrong_answer"])
        received = await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=6)
        assert received.token_ids == continuation(PROMPT, 6)
        assert received.fallbacks["target_lost"] >= 1


async def test_a_target_without_room_is_passed_over(monkeypatch):
    monkeypatch.setattr(random, "random", lambda: 0.0)  # alike: the first one is asked first
    full, free = targets(2)
    full.open_error = errors.CacheExhaustedError("full", retry_after_seconds=30)
    async with orchestrating(targets=[full, free]) as system:
        received = await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=6)
        assert received.token_ids == continuation(PROMPT, 6)
        assert received.fallbacks == {"session_refused": 1}


async def test_a_request_that_finds_no_room_ends_in_time_and_says_when_to_come_again(monkeypatch):
    monkeypatch.setattr("paceline_orchestrator.fleet.shortage.WAIT_SECONDS", 0.3)
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        for target in system.targets:
            target.open_error = errors.CacheExhaustedError("full", retry_after_seconds=0.01)
        for strategy in STRATEGIES:
            with pytest.raises(errors.OverloadedError, match="full") as caught:
                await system.generate(strategy=strategy)
            assert caught.value.retry_after_seconds
        await system.settled()
        assert not any(target.calls for target in system.targets)


async def test_sessions_that_open_and_calls_that_are_refused_are_no_room(monkeypatch):
    monkeypatch.setattr("paceline_orchestrator.fleet.shortage.WAIT_SECONDS", 0.3)
    async with orchestrating(targets=targets(2)) as system:
        for target in system.targets:
            target.faults.extend(["overload"] * 1000)
        with pytest.raises(errors.OverloadedError, match="full"):
            await system.generate()


async def test_a_target_at_work_is_waited_for_while_another_has_no_room(
    monkeypatch,
):
    monkeypatch.setattr("paceline_orchestrator.fleet.shortage.WAIT_SECONDS", 0.1)
    slow, full = targets(2)
    slow.latency_seconds = 1.0
    full.open_error = errors.CacheExhaustedError("full", retry_after_seconds=0.01)
    async with orchestrating(drafters=[a_drafter()], targets=[slow, full]) as system:
        received = await system.generate(strategy=pb.STRATEGY_DISTRIBUTED, max_tokens=2)
        assert received.token_ids == continuation(PROMPT, 2)
        assert full.refused > 3


async def test_a_request_that_finds_room_within_its_patience_is_served():
    async with orchestrating(targets=targets(1)) as system:
        (target,) = system.targets
        target.open_error = errors.CacheExhaustedError("full", retry_after_seconds=0.01)
        call = asyncio.create_task(system.generate(max_tokens=6))
        await target.until(lambda it: it.refused >= 3)
        target.open_error = None
        assert (await call).token_ids == continuation(PROMPT, 6)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_target_whose_session_does_not_open_holds_up_nothing(strategy, monkeypatch):
    monkeypatch.setattr(random, "random", lambda: 0.0)  # alike: the first one is asked first
    hung, well = targets(2)
    hung.opens.clear()
    async with orchestrating(drafters=[a_drafter()], targets=[hung, well]) as system:
        received = await system.generate(strategy=strategy, max_tokens=6)
        assert received.token_ids == continuation(PROMPT, 6)
        assert not hung.calls
        hung.opens.set()
        await system.settled()


async def test_a_session_reserves_in_steps_and_says_how_far_it_may_grow():
    async with orchestrating(targets=targets(1)) as system:
        call = system.call(max_tokens=2000)
        await system.targets[0].until(lambda it: it.calls)
        call.cancel()
        await system.settled()
        (spec,) = system.targets[0].specs
        assert spec.limit_length == len(PROMPT) + 2000
        assert len(PROMPT) < spec.reserve_length < len(PROMPT) + 1000
        assert spec.share


async def test_an_overloaded_target_is_asked_again():
    async with orchestrating(targets=targets(1)) as system:
        system.targets[0].faults.extend(["", "overload"])
        received = await system.generate(strategy=pb.STRATEGY_AUTOREGRESSIVE, max_tokens=6)
        assert received.token_ids == continuation(PROMPT, 6)
        assert received.fallbacks == {"session_refused": 1}


async def test_without_any_target_the_request_ends_with_no_target(monkeypatch):
    """Before its first token, and after it: either way as soon, and with the same time to wait."""
    monkeypatch.setattr("paceline_orchestrator.fleet.shortage.WAIT_SECONDS", 0.05)
    monkeypatch.setattr("paceline_orchestrator.fleet.shortage.RETRY_SECONDS", 7.0)
    target = targets(1)[0]
    async with orchestrating(drafters=[a_drafter()], targets=[target]) as system:
        target.faults.extend(["", "", "hang"])
        sooner_than_usual = {"timeout": 4.5}
        call = asyncio.create_task(
            system.generate(strategy=pb.STRATEGY_DISTRIBUTED, **sooner_than_usual)
        )
        await target.until(lambda it: len(it.calls) >= 3)
        await target.kill()
        with pytest.raises(errors.NoTargetError) as after:
            await call
        await system.drafters[0].until(lambda it: not it.sessions and not it.running)
        with pytest.raises(errors.NoTargetError) as before:
            await system.generate(**sooner_than_usual)
        assert after.value.retry_after_seconds == before.value.retry_after_seconds == 7.0


async def test_a_target_that_comes_back_in_time_goes_on():
    target = targets(1)[0]
    async with orchestrating(targets=[target]) as system:
        target.faults.extend(["", "", "hang"])
        call = asyncio.create_task(system.generate(max_tokens=6))
        await target.until(lambda it: len(it.calls) >= 3)
        await target.kill()
        await target.start()
        received = await call
        assert received.token_ids == continuation(PROMPT, 6)
        # Once more where it is asked for a session before its port is open again.
        assert received.fallbacks.keys() == {"target_lost"}


async def test_a_target_with_another_model_never_takes_over(monkeypatch):
    monkeypatch.setattr("paceline_orchestrator.fleet.shortage.WAIT_SECONDS", 0.05)
    first = targets(1)[0]
    other = FakeModelServer(
        "target", fingerprint="other", token_after=lambda text: (next_token(text) + 1) % EOS
    )
    async with orchestrating(targets=[first, other]) as system:
        used = first if (await system.generate()).started.model_fingerprint != "other" else other
        used.faults.extend(["", "", "hang"])
        call = asyncio.create_task(system.generate())
        await used.until(lambda it: it.faults == type(it.faults)())
        await used.until(lambda it: it.running == 1)
        await used.kill()
        with pytest.raises(errors.NoTargetError):
            await call


# --- cancellation -----------------------------------------------------------------------------


async def test_a_rejection_cancels_what_it_made_worthless_at_the_servers():
    whole = [*PROMPT, *continuation(PROMPT, 16)]

    def is_wrong(prefix):
        return prefix != whole[: len(prefix)]

    # Fast enough for blocks to be in flight when the first rejection comes, and slow enough to
    # be drafting still.
    drafter = a_drafter(latency_seconds=0.005, agrees=lambda _: False)
    models = targets(3, latency_seconds=0.02, stalls=is_wrong)
    async with orchestrating(drafters=[drafter], targets=models) as system:
        received = await system.generate(
            strategy=pb.STRATEGY_DISTRIBUTED, lookahead=1, max_tokens=16
        )
        assert received.token_ids == whole[len(PROMPT) :]
        await system.settled()
        assert drafter.cancelled
        assert any(target.cancelled for target in system.targets)
        assert received.finished.statistics.cancelled_rpc_count > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_leaving_at_any_message_leaves_nothing_behind(strategy):
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        for message_count in range(12):
            call = system.call(strategy=strategy, lookahead=2, stream_timeline=True)
            received = 0
            while received < message_count:
                await call.read()
                received += 1
            call.cancel()
        await system.settled()
        assert all(model.opened == model.closed for model in system.models)


async def test_leaving_while_a_session_is_being_opened_closes_it_too():
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        for _ in range(10):
            call = system.call(strategy=pb.STRATEGY_DISTRIBUTED)
            await asyncio.sleep(0)
            call.cancel()
        received = await system.generate(strategy=pb.STRATEGY_DISTRIBUTED)
        assert received.token_ids == continuation(PROMPT, 24)
        await system.settled()
        assert all(model.opened == model.closed for model in system.models)


async def test_the_deadline_ends_a_request_and_frees_everything():
    target = targets(1)[0]
    async with orchestrating(targets=[target]) as system:
        target.faults.extend(["hang"])
        with pytest.raises(errors.DeadlineError):
            await system.generate(timeout=0.1)
        await system.settled()


async def test_a_request_without_a_deadline_gets_one():
    target = targets(1)[0]
    async with orchestrating(targets=[target], default_deadline_seconds=0.1) as system:
        target.faults.extend(["hang"])
        with pytest.raises(errors.DeadlineError):
            await system.generate(timeout=None)


# --- text, stops, resuming --------------------------------------------------------------------


def text_of(token_ids):
    return byte_tokenizer().decode(token_ids, skip_special_tokens=True)


async def test_the_text_is_the_decoded_tokens():
    async with orchestrating(targets=targets(1)) as system:
        received = await system.generate(text="once upon a time")
        assert received.started.prompt_token_count == len(PROMPT)
        assert received.text == text_of(continuation(PROMPT, 24))
        positions = [chunk.position for chunk in received.chunks]
        assert positions[0] == len(PROMPT)
        assert [b - a for a, b in pairwise(positions)] == [
            len(chunk.token_ids) for chunk in received.chunks[:-1]
        ]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_stop_string_cuts_the_text_and_ends_the_generation(strategy):
    text = text_of(continuation(PROMPT, 24))
    stop = text[10:13]
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        received = await system.generate(strategy=strategy, stop_strings=[stop, "never"])
        start = text.index(stop)
        assert received.text == text[:start]
        assert received.token_ids == continuation(PROMPT, start + 3)
        assert received.finished.finish_reason == pb.FINISH_REASON_STOP_STRING
        assert received.finished.stop_string == stop
        assert received.finished.completion_token_count == start + 3
        await system.settled()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6])
async def test_a_character_that_the_limit_cuts_is_sent_for_what_it_is(strategy, max_tokens):
    character = byte_tokenizer().encode("🚴").ids

    def cycling(text):
        return character[(len(text) - len(PROMPT)) % len(character)]

    models = targets(2, token_after=cycling)
    async with orchestrating(drafters=[a_drafter(token_after=cycling)], targets=models) as system:
        received = await system.generate(strategy=strategy, lookahead=2, max_tokens=max_tokens)
        assert received.token_ids == (character * 2)[:max_tokens]
        assert received.text == text_of(received.token_ids)
        assert received.finished.completion_token_count == max_tokens


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_beginning_of_a_stop_string_at_the_end_of_the_text_is_sent(strategy):
    whole = continuation(PROMPT, 24)
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        for begun in (1, 3):
            stop = text_of(whole)[-begun:] + "?"
            received = await system.generate(strategy=strategy, stop_strings=[stop])
            assert received.token_ids == whole
            assert received.text == text_of(whole)
            assert received.finished.finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_what_was_held_back_is_sent_before_an_end_of_text_token(strategy):
    text = continuation(PROMPT, 9)

    def ending(prefix):
        return EOS if len(prefix) == len(PROMPT) + 9 else next_token(prefix)

    models = targets(2, token_after=ending)
    async with orchestrating(drafters=[a_drafter(token_after=ending)], targets=models) as system:
        stop = text_of(text)[-2:] + "?"
        received = await system.generate(strategy=strategy, stop_strings=[stop])
        assert received.token_ids == [*text, EOS]
        assert received.text == text_of(text)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_an_end_of_text_token_ends_the_generation_without_text(strategy):
    end = len(PROMPT) + 9

    def ending(text):
        return EOS if len(text) == end else next_token(text)

    models = targets(2, token_after=ending)
    async with orchestrating(drafters=[a_drafter(token_after=ending)], targets=models) as system:
        received = await system.generate(strategy=strategy, lookahead=2)
        assert received.token_ids == [*continuation(PROMPT, 9), EOS]
        assert received.text == text_of(continuation(PROMPT, 9))
        assert received.finished.finish_reason == pb.FINISH_REASON_EOS
        assert received.finished.completion_token_count == 10
        ignoring = await system.generate(strategy=strategy, lookahead=2, ignore_eos=True)
        assert len(ignoring.token_ids) == 24
        assert ignoring.finished.finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_resumed_generation_is_the_rest_of_the_whole_one(strategy):
    whole = continuation(PROMPT, 24)
    stop = text_of(whole)[20:22]
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        for received_count in (1, 7, 23):
            received = await system.generate(
                strategy=strategy, resume_token_ids=whole[:received_count]
            )
            assert received.token_ids == whole[received_count:]
            assert received.text == text_of(whole[received_count:])
            assert received.chunks[0].position == len(PROMPT) + received_count
            assert received.finished.completion_token_count == 24
        stopped = await system.generate(
            strategy=strategy, resume_token_ids=whole[:8], stop_strings=[stop]
        )
        assert stopped.text == text_of(whole)[8 : text_of(whole).index(stop)]


async def test_a_generation_that_was_received_whole_resumes_to_its_end():
    async with orchestrating(targets=targets(1)) as system:
        received = await system.generate(resume_token_ids=continuation(PROMPT, 24))
        assert not received.chunks
        assert received.finished.finish_reason == pb.FINISH_REASON_LENGTH
        assert received.finished.completion_token_count == 24
        assert not system.targets[0].opened


async def test_a_generation_received_to_its_last_token_resumes_to_its_end():
    whole = continuation(PROMPT, 8)
    stop = text_of(whole)[-2:]
    async with orchestrating(targets=targets(1)) as system:
        at_eos = await system.generate(resume_token_ids=[*whole, EOS])
        assert at_eos.finished.finish_reason == pb.FINISH_REASON_EOS
        at_stop = await system.generate(resume_token_ids=whole, stop_strings=[stop])
        assert at_stop.finished.finish_reason == pb.FINISH_REASON_STOP_STRING
        assert at_stop.finished.stop_string == stop
        for received, count in ((at_eos, 9), (at_stop, 8)):
            assert received.started.request_id
            assert not received.chunks
            assert received.finished.completion_token_count == count
        assert not system.targets[0].opened


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
    models = targets(1, rules=(sampling_pb2.VERIFICATION_RULE_EXACT, rule))
    async with orchestrating(targets=models) as system:
        received = await system.generate(sampling=sampling, verification_rule=rule)
        assert received.started.promise == received.finished.promise == rule
        greedy = await system.generate(verification_rule=rule)
        assert greedy.started.promise == sampling_pb2.VERIFICATION_RULE_EXACT
        assert [spec.verification_rule for spec in models[0].specs] == [rule, 1]
        assert models[0].specs[0].sampling == sampling


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


async def test_special_tokens_in_a_prompt_are_text_unless_asked_otherwise():
    async with orchestrating(targets=targets(1)) as system:
        plain = await system.generate(text="a<|end|>", max_tokens=1)
        parsed = await system.generate(text="a<|end|>", max_tokens=1, parse_special_tokens=True)
        assert plain.started.prompt_token_count == len("a<|end|>")
        assert parsed.started.prompt_token_count == 2


# --- what is refused --------------------------------------------------------------------------

BAD_REQUESTS = [
    ("prompt", {"token_ids": None}),
    ("text", {"text": ""}),
    ("text", {"text": "x" * (256 * 1024 + 1)}),
    ("token_ids", {"token_ids": pb.TokenIds()}),
    ("token_ids.ids", {"token_ids": pb.TokenIds(ids=[VOCABULARY_SIZE])}),
    ("token_ids.ids", {"token_ids": pb.TokenIds(ids=[2**32 - 1])}),
    ("max_tokens", {"max_tokens": 0}),
    ("stop_strings", {"stop_strings": [""]}),
    ("stop_strings", {"stop_strings": ["x" * 65]}),
    ("stop_strings", {"stop_strings": ["a", "b", "c", "d", "e"]}),
    ("sampling.temperature", {"sampling": SAMPLING(temperature=math.nan)}),
    ("sampling.temperature", {"sampling": SAMPLING(temperature=math.inf)}),
    ("sampling.temperature", {"sampling": SAMPLING(temperature=-0.1)}),
    ("sampling.temperature", {"sampling": SAMPLING(temperature=100.1)}),
    ("sampling.top_k", {"sampling": SAMPLING(top_k=VOCABULARY_SIZE + 1)}),
    ("sampling.top_p", {"sampling": SAMPLING(top_p=0)}),
    ("sampling.top_p", {"sampling": SAMPLING(top_p=1.1)}),
    ("sampling.top_p", {"sampling": SAMPLING(top_p=math.nan)}),
    ("sampling.min_p", {"sampling": SAMPLING(min_p=-0.1)}),
    ("sampling.min_p", {"sampling": SAMPLING(min_p=1.1)}),
    ("sampling.min_p", {"sampling": SAMPLING(min_p=math.nan)}),
    ("seed", {"seed": 2**53}),
    ("strategy", {"strategy": 99}),
    ("lookahead", {"lookahead": 0}),
    ("lookahead", {"lookahead": 65}),
    ("target_count", {"target_count": 0}),
    ("target_count", {"target_count": 65}),
    ("drafter_count", {"drafter_count": 0}),
    ("drafter_count", {"drafter_count": 9}),
    ("verification_rule", {"verification_rule": 99}),
    ("dispatch_policy", {"dispatch_policy": 99}),
    ("request_id", {"request_id": "a b"}),
    ("request_id", {"request_id": "x" * 65}),
    ("resume_token_ids", {"resume_token_ids": [1], "sampling": SAMPLING(temperature=1)}),
    ("resume_token_ids", {"resume_token_ids": [1, 2], "max_tokens": 1}),
    ("resume_token_ids", {"resume_token_ids": [VOCABULARY_SIZE]}),
    ("resume_token_ids", {"resume_token_ids": [1, EOS, 1]}),
    ("resume_token_ids", {"resume_token_ids": PROMPT, "stop_strings": ["upon"]}),
]


async def test_every_bad_field_is_named_and_reaches_no_model():
    async with orchestrating(targets=targets(1)) as system:
        for field, request in BAD_REQUESTS:
            with pytest.raises(errors.InvalidFieldError) as caught:
                await system.generate(**request)
            assert [it.field for it in caught.value.violations] == [field], request
        assert not system.targets[0].opened


async def test_what_does_not_fit_the_context_is_refused():
    async with orchestrating(targets=targets(1)) as system:
        for request in (
            {"max_tokens": 4096},
            {"token_ids": pb.TokenIds(ids=[1] * 4096)},
        ):
            with pytest.raises(errors.ContextLengthExceededError):
                await system.generate(**request)
        fits = await system.generate(token_ids=pb.TokenIds(ids=[1] * 4095), max_tokens=1)
        assert len(fits.token_ids) == 1


async def test_a_rule_that_the_servers_do_not_know_is_unsupported():
    async with orchestrating(targets=targets(1)) as system:
        request = {"verification_rule": sampling_pb2.VERIFICATION_RULE_REJECTION}
        with pytest.raises(errors.UnsupportedError):
            await system.generate(**request, sampling=SAMPLING(temperature=1))


async def test_more_requests_than_allowed_are_refused_at_once():
    target = targets(1)[0]
    async with orchestrating(targets=[target], request_limit=1) as system:
        target.faults.extend(["", "hang"])
        first = system.call()
        await target.until(lambda it: len(it.calls) >= 2)
        with pytest.raises(errors.OverloadedError) as caught:
            await system.generate()
        assert caught.value.retry_after_seconds
        first.cancel()
        await system.settled()
        assert (await system.generate(max_tokens=1)).token_ids


async def test_one_client_cannot_take_all_requests_there_may_be():
    """Two addresses of this machine are two clients."""
    target = FakeModelServer("target", stalls=lambda _: True)
    async with orchestrating(
        targets=[target], request_limit=10, listen="[::]:0", insecure=True
    ) as system:
        port = system.address.rpartition(":")[2]
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as greedy,
            grpc.aio.insecure_channel(f"[::1]:{port}") as modest,
        ):
            calls = [system.call(channel=greedy) for _ in range(10)]
            refused = [it for it in await asyncio.gather(*map(began, calls)) if not it]
            assert len(refused) == 2, "it gets four fifths"
            late = system.call(channel=modest)
            assert await began(late)
            for call in (*calls, late):
                call.cancel()
        await system.settled()


async def began(call):
    """Whether a call is served; else it was refused as one too many."""
    first = asyncio.ensure_future(call.read())
    await asyncio.wait((first,))
    if first.exception() is None:
        return first.result().HasField("started")
    with pytest.raises(errors.OverloadedError):
        raise decode(first.exception())
    return False


async def test_a_foreign_drafter_is_never_used(caplog):
    foreign = a_drafter(tokenizer=byte_tokenizer().to_str(pretty=True).encode())
    async with orchestrating(drafters=[foreign], targets=targets(1)) as system:
        for _ in range(2):
            for strategy in STRATEGIES[1:]:
                with pytest.raises(errors.TokenizerMismatchError):
                    await system.generate(strategy=strategy)
        received = await system.generate()
        assert received.token_ids == continuation(PROMPT, 24)
        assert received.started.strategy == pb.STRATEGY_AUTOREGRESSIVE
        assert not foreign.opened
        assert len([it for it in caplog.records if "its tokenizer" in it.message]) == 1


async def test_a_model_without_a_tokenizer_takes_token_ids_only():
    async with orchestrating(targets=targets(1, tokenizer=None)) as system:
        received = await system.generate()
        assert received.token_ids == continuation(PROMPT, 24)
        assert received.text == ""
        for request in ({"text": "hello"}, {"stop_strings": ["x"]}):
            with pytest.raises(errors.UnsupportedError):
                await system.generate(**request)


# --- system info ------------------------------------------------------------------------------


async def test_system_info_tells_who_is_there():
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        await system.generate()
        info = await system.stub.GetSystemInfo(pb.GetSystemInfoRequest(), timeout=5)
        assert info.model_name == "fake-target"
        assert info.vocabulary_size == VOCABULARY_SIZE
        assert [(it.name, it.role, it.ready) for it in info.servers] == [
            ("drafter-0", model_pb.MODEL_ROLE_DRAFTER, True),
            ("target-0", model_pb.MODEL_ROLE_TARGET, True),
            ("target-1", model_pb.MODEL_ROLE_TARGET, True),
        ]
        assert info.running_request_count == 0
        assert info.tokenizer_fingerprint


async def test_system_info_still_tells_the_model_when_the_last_target_is_gone():
    async with orchestrating(targets=targets(1)) as system:
        before = await system.stub.GetSystemInfo(pb.GetSystemInfoRequest(), timeout=5)
        await system.targets[0].kill()
        async with asyncio.timeout(10):
            info = before
            while info.servers[0].ready:
                info = await system.stub.GetSystemInfo(pb.GetSystemInfoRequest(), timeout=5)
        assert info.model_fingerprint == before.model_fingerprint == "target-model"
        assert info.vocabulary_size == VOCABULARY_SIZE


async def test_a_request_just_after_the_start_waits_for_the_first_target():
    target = targets(1)[0]
    async with serving(target):
        await target.set_serving(False)
        settings = OrchestratorSettings(
            listen="127.0.0.1:0", health_listen="", targets=(target.address,)
        )
        process = not_yet_begun(settings)
        beginning = asyncio.create_task(process.begin())
        await soon(lambda: "address" in process.addresses, what="the orchestrator listens")
        async with grpc.aio.insecure_channel(process.addresses["address"]) as channel:
            stub = OrchestratorServiceStub(channel)
            call = stub.Generate(
                pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), max_tokens=4), timeout=20
            )
            while not (await stub.GetSystemInfo(pb.GetSystemInfoRequest())).running_request_count:
                assert not call.done()
            await target.set_serving(True)
            token_ids = [id_ async for message in call for id_ in message.chunk.token_ids]
        await beginning
        await process.finish()
    assert token_ids == continuation(PROMPT, 4)


@asynccontextmanager
async def hastily_draining(target):
    """An orchestrator in a hurry; yields a client's stub and what drains it to its end."""
    async with serving(target):
        process = not_yet_begun(
            OrchestratorSettings(
                listen="127.0.0.1:0",
                health_listen="",
                targets=(target.address,),
                drain_seconds=0.05,
            )
        )
        await process.begin()
        async with grpc.aio.insecure_channel(process.addresses["address"]) as channel:
            yield OrchestratorServiceStub(channel), process.finish


async def hears_draining_while_it_waits(stub, request, drain):
    """Whether a request that is not yet decoded is told why it ends."""
    call = stub.Generate(request, timeout=20)
    while not (await stub.GetSystemInfo(pb.GetSystemInfoRequest())).running_request_count:
        assert not call.done()
    await drain()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return isinstance(decode(caught.value), errors.DrainingError)


async def test_a_request_that_waits_for_a_target_at_the_end_of_a_drain_hears_draining():
    target = targets(1)[0]
    async with hastily_draining(target) as (stub, drain):
        await target.set_serving(False)
        while (await stub.GetSystemInfo(pb.GetSystemInfoRequest())).servers[0].ready:
            pass
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), max_tokens=4)
        assert await hears_draining_while_it_waits(stub, request, drain)


async def test_a_request_whose_text_is_read_at_the_end_of_a_drain_hears_draining(monkeypatch):
    goes_on = threading.Event()
    monkeypatch.setattr(Codec, "encode", lambda *_, **__: goes_on.wait(60))
    async with hastily_draining(targets(1)[0]) as (stub, drain):
        request = pb.GenerateRequest(text="long " * 1000, max_tokens=4)
        assert await hears_draining_while_it_waits(stub, request, drain)
        goes_on.set()


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_client_that_leaves_while_its_request_waits_has_cancelled_it(is_cut):
    async with orchestrating(targets=targets(1)) as system:
        servicer = system.application._servicer

        async def wait():
            with servicer._cuttable():
                await asyncio.Event().wait()

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        if is_cut:
            servicer.cut()
        waiting.cancel()
        await asyncio.wait([waiting])
    assert waiting.cancelled()


async def test_malformed_bytes_are_refused():
    async with orchestrating(targets=targets(1)) as system:
        generate = system.channel.unary_stream("/paceline.v1.OrchestratorService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in generate(b"\xff" * 8, timeout=5):
                pass
        assert isinstance(decode(caught.value), errors.MalformedRequestError)
