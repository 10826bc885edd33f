"""Text to tokens and back, by the orchestrator's tokenizer."""

from __future__ import annotations

import inspect

import pytest

from paceline import AsyncClient, Client, PromptPart
from paceline.errors import ContextLengthExceededError, InvalidFieldError, UnsupportedError
from support.orchestrating import orchestrating, targets
from support.waiting import until

TEXT = "once \N{BICYCLIST}<|end|>"
PARTS = [PromptPart("once \N{BICYCLIST}"), PromptPart("<|end|>", parse_special_tokens=True)]


async def test_a_text_becomes_tokens_and_tokens_the_text_again_and_special_ones_their_names():
    async with (
        orchestrating(drafters=[], targets=targets(1, context_length=64)) as system,
        AsyncClient(system.address) as client,
    ):
        plain = await client.tokenize(TEXT, include_token_bytes=True)
        assert b"".join(plain.token_bytes).decode() == TEXT
        assert await client.detokenize(plain.token_ids) == TEXT
        parsed = await client.tokenize(TEXT, parse_special_tokens=True)
        assert parsed == await client.tokenize(PARTS)
        assert parsed.token_ids == (*plain.token_ids[:9], 256)
        ids = [*parsed.token_ids, *plain.token_ids[5:9], 256]
        assert await client.detokenize(ids) == TEXT + "\N{BICYCLIST}<|end|>"
        assert await client.detokenize(plain.token_ids[5:7]) == "\N{REPLACEMENT CHARACTER}"
        assert (await client.tokenize("")).token_ids == ()
        assert await client.detokenize([]) == ""
        with pytest.raises(ContextLengthExceededError, match="at most 64 tokens, and is 65"):
            await client.tokenize("x" * 65)
        with pytest.raises(ContextLengthExceededError, match="at most 64 tokens, and is 65"):
            await client.detokenize([1] * 65)
        with pytest.raises(InvalidFieldError, match=r"token_ids: must be in \[0, 257\)"):
            await client.detokenize([257])
        for bad in ([1, 2], [], b"x"):
            with pytest.raises(InvalidFieldError):
                await client.tokenize(bad)


async def test_texts_are_as_long_as_a_target_that_is_away_for_a_moment_takes_them():
    short, long = targets(1, context_length=64)[0], targets(1, context_length=80)[0]
    async with (
        orchestrating(drafters=[], targets=[short, long]) as system,
        AsyncClient(system.address) as client,
    ):
        await long.kill()
        await until(
            lambda: not all(it.ready for it in system.application.pool.servers), what="it is away"
        )
        ids = (await client.tokenize("x" * 80)).token_ids
        assert await client.detokenize(ids) == "x" * 80
        with pytest.raises(ContextLengthExceededError, match="at most 80 tokens, and is 81"):
            await client.tokenize("x" * 81)


async def test_a_model_without_a_tokenizer_has_no_words_for_tokens():
    async with (
        orchestrating(drafters=[], targets=targets(1, tokenizer=None)) as system,
        AsyncClient(system.address) as client,
    ):
        for question in (client.tokenize("x"), client.detokenize([1])):
            with pytest.raises(UnsupportedError, match="no tokenizer"):
                await question


@pytest.mark.parametrize("name", ["tokenize", "detokenize"])
def test_both_clients_ask_alike(name):
    alike = [inspect.signature(getattr(each, name)) for each in (Client, AsyncClient)]
    assert alike[0] == alike[1]
