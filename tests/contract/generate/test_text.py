"""The text, where it stops, and how a broken stream is resumed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.decoding.session_opener import LongTextQueue
from support.fake_text import EOS, byte_tokenizer, continuation, next_token
from support.orchestrating import PROMPT, STRATEGIES, a_drafter, orchestrating, targets


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


async def test_token_ids_wait_for_their_turn_before_anything_is_made_of_them(monkeypatch):
    lengths = []

    async def wait_turn(_queue, length, *, share):
        assert share
        lengths.append(length)

    monkeypatch.setattr(LongTextQueue, "wait_turn", wait_turn)
    async with orchestrating(targets=targets(1)) as system:
        token_ids = pb.TokenIds(ids=PROMPT)
        await system.generate(token_ids=token_ids, resume_token_ids=[7, 8])
    assert lengths[0] == len(PROMPT) + 2


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_stop_string_cuts_the_text_and_ends_the_generation(strategy):
    text = text_of(continuation(PROMPT, 24))
    stop = text[10:13]
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        received = await system.generate(strategy=strategy, stop_strings=[stop, "never"])
        start = text.index(stop)
        count = len(byte_tokenizer().encode(text[: start + 3]).ids)
        assert received.text == text[:start]
        assert received.token_ids == continuation(PROMPT, count)
        assert received.finished.finish_reason == pb.FINISH_REASON_STOP_STRING
        assert received.finished.stop_string == stop
        assert received.finished.completion_token_count == count
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


async def test_special_tokens_in_a_prompt_are_text_unless_asked_otherwise():
    async with orchestrating(targets=targets(1)) as system:
        plain = await system.generate(text="a<|end|>", max_tokens=1)
        parsed = await system.generate(text="a<|end|>", max_tokens=1, parse_special_tokens=True)
        assert plain.started.prompt_token_count == len("a<|end|>")
        assert parsed.started.prompt_token_count == 2
