"""Log probabilities of the prompt, through the whole service.

They are compared with the library's own forward over the whole prompt.
"""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.errors import ContextLengthExceededError, InvalidFieldError, UnsupportedError
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_contract import limits
from support.fake_text import continuation, likeliest_after, logprob_of
from support.in_process import system_of_pair
from support.orchestrating import PROMPT, STRATEGIES, a_drafter, orchestrating, targets
from support.tiny_models import tiny_pair

__all__ = ["tiny_pair"]

LONG = continuation(PROMPT, 600)


def scored(received, *, prompt, count):
    """Check what was told of a prompt, each token once, and return the number of messages."""
    told, first = received.prompt[1:], received.prompt[0]
    assert (first.position, [*first.token_ids], [*first.logprobs]) == (0, [prompt[0]], [])
    position = 1
    for chunk in told:
        assert chunk.position == position
        assert len(chunk.token_ids) <= limits.MOST_PROMPT_CHUNK_TOKENS
        assert len(chunk.top_logprobs) == (len(chunk.token_ids) if count else 0)
        for index, token_id in enumerate(chunk.token_ids):
            assert token_id == prompt[position]
            assert chunk.logprobs[index] == pytest.approx(logprob_of(prompt[: position + 1]))
            if count:
                each = chunk.top_logprobs[index]
                likeliest = list(zip(each.token_ids, each.logprobs, strict=True))
                assert likeliest == likeliest_after(prompt[:position], count)
            position += 1
    assert position == len(prompt)
    return len(told)


async def test_each_token_of_the_prompt_is_told_once_before_the_answer():
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        for strategy in STRATEGIES:
            received = await system.generate(
                token_ids=pb.TokenIds(ids=LONG),
                strategy=strategy,
                prompt_logprobs=3,
                max_tokens=8,
            )
            assert scored(received, prompt=LONG, count=3) == 3
            assert received.token_ids == continuation(LONG, 8)
            assert not any(it.logprobs for it in received.chunks)
            assert received.finished.cached_prompt_token_count == 0
        await system.settled()


async def test_a_prompt_is_scored_alone_and_nothing_is_generated():
    async with orchestrating(drafters=[a_drafter()], targets=targets(1)) as system:
        for prompt in (LONG, LONG[:2], LONG[:1]):
            ids = pb.TokenIds(ids=prompt)
            received = await system.generate(token_ids=ids, prompt_logprobs=0, max_tokens=0)
            scored(received, prompt=prompt, count=0)
            assert not received.chunks
            assert received.finished.finish_reason == pb.FINISH_REASON_LENGTH
            assert received.finished.completion_token_count == 0
        assert not system.drafters[0].calls
        whole = continuation(PROMPT, 4096)
        ids = pb.TokenIds(ids=whole)
        received = await system.generate(token_ids=ids, prompt_logprobs=0, max_tokens=0)
        assert len(received.prompt) == 17
        ids = pb.TokenIds(ids=[*whole, 1])
        with pytest.raises(ContextLengthExceededError, match="at most 4096 tokens, and is 4097"):
            await system.generate(token_ids=ids, prompt_logprobs=0, max_tokens=0)


async def test_nothing_is_told_twice_where_targets_fail_in_the_middle():
    models = targets(2)
    async with orchestrating(drafters=[a_drafter()], targets=models) as system:
        for target in models:
            target.faults.extend(["", "fail", "lose_session", "lose_tokens", "wrong_answer"])
        received = await system.generate(
            token_ids=pb.TokenIds(ids=LONG), prompt_logprobs=2, strategy=pb.STRATEGY_DISTRIBUTED
        )
        assert scored(received, prompt=LONG, count=2) == 3
        assert received.token_ids == continuation(LONG, 24)
        assert received.fallbacks["target_lost"] > 0


async def test_a_client_that_leaves_ends_the_scoring():
    (target,) = models = targets(1)
    async with orchestrating(drafters=[], targets=models) as system:
        target.answers.clear()
        call = system.call(token_ids=pb.TokenIds(ids=LONG), prompt_logprobs=0)
        reading = asyncio.create_task(anext(aiter(call)))
        await target.until(lambda it: it.running > 0)
        call.cancel()
        await asyncio.wait([reading])
        await target.until(lambda it: bool(it.cancelled))
        target.answers.set()
        await system.settled()


async def test_a_target_that_cannot_score_gets_no_such_request():
    old, new = targets(1, scores_prompts=False), targets(1)
    async with orchestrating(drafters=[], targets=[*old, *new]) as system:
        scored(await system.generate(prompt_logprobs=1), prompt=PROMPT, count=1)
        assert not old[0].specs
        assert new[0].specs
    async with orchestrating(drafters=[], targets=old) as system:
        with pytest.raises(UnsupportedError, match="prompt_logprobs"):
            await system.generate(prompt_logprobs=1)


async def test_what_would_take_too_much_is_refused():
    async with orchestrating(drafters=[], targets=targets(1, context_length=1 << 15)) as system:
        long = pb.TokenIds(ids=[1] * 20_000)
        with pytest.raises(InvalidFieldError, match="at most 12 with a prompt of 20000 tokens"):
            await system.generate(token_ids=long, prompt_logprobs=13)
        with pytest.raises(InvalidFieldError, match=r"prompt_logprobs: must be in \[0, 20\]"):
            await system.generate(prompt_logprobs=21)
        with pytest.raises(InvalidFieldError, match="max_tokens: must be 1 or more"):
            await system.generate(max_tokens=0)


@pytest.mark.parametrize("rule", ["exact", "rejection"])
async def test_a_model_says_what_the_library_says_of_the_same_prompt(tiny_pair, rule, monkeypatch):
    prompt = [(7 * index * index + index) % 290 for index in range(90)]
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.target).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :, :300].double()
    expected = logits.log_softmax(-1)
    # Seven blocks, though the vocabulary is small.
    monkeypatch.setattr(limits, "_SCORED_LOGITS", 1)
    async with system_of_pair(tiny_pair) as system:
        for _ in range(2):  # the second time the text is kept
            done = await system.client.generate(
                prompt,
                prompt_logprobs=4,
                max_tokens=3,
                rule=rule,
                temperature=0.8,
                seed=5,
                logit_bias={9: 50.0},
            ).collect()
            told = [
                (token, logprob, likeliest)
                for chunk in done.prompt_chunks[1:]
                for token, logprob, likeliest in zip(
                    chunk.token_ids, chunk.logprobs, chunk.top_logprobs, strict=True
                )
            ]
            assert len(done.prompt_chunks) == 7
            assert [token for token, _, _ in told] == prompt[1:]
            for position, (token, logprob, likeliest) in enumerate(told):
                assert logprob == pytest.approx(expected[position, token].item(), abs=1e-3)
                best = expected[position].topk(4).values.tolist()
                assert [it.logprob for it in likeliest] == pytest.approx(best, abs=1e-3)
            assert done.finished.usage.completion_token_count == 3


async def test_tokens_are_told_with_their_bytes_and_the_prompts_without_a_forward():
    async with orchestrating(drafters=[], targets=targets(1, scores_prompts=False)) as system:
        asked = {"include_prompt": True, "include_token_bytes": True, "top_logprobs": 2}
        received = await system.generate(text="once \N{BICYCLIST}", **asked)
        told = b"".join(it for chunk in received.prompt for it in chunk.token_bytes)
        assert told.decode() == "once \N{BICYCLIST}"
        assert not any(it.logprobs for it in received.prompt)
        answer = b"".join(it for chunk in received.chunks for it in chunk.token_bytes)
        assert answer.decode(errors="replace") == received.text
        likeliest = received.chunks[0].top_logprobs[0]
        assert likeliest.token_bytes[0] == received.chunks[0].token_bytes[0]
        assert len(likeliest.token_bytes) == 2
