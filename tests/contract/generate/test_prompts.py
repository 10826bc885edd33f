"""Prompts of parts, and prompts with a gap: what a target is asked is what is meant."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from support.fake_text import byte_tokenizer
from support.orchestrating import orchestrating, targets

END = "<|end|>"


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


async def prompt_of(tokenizer, *, fim_token_ids=(), **request):
    """Return the token ids that a target got for a prompt."""
    models = targets(1, fim_token_ids=fim_token_ids)
    models[0].tokenizer = tokenizer.to_str().encode()
    async with orchestrating(targets=models) as system:
        received = await system.generate(max_tokens=1, **request)
        count = received.started.prompt_token_count
        (call,) = models[0].calls[:1]
    token_ids = list(call.call.token_ids)
    assert len(token_ids) == count
    return token_ids


async def test_special_tokens_of_a_template_count_and_those_that_people_wrote_are_letters():
    parts = [
        pb.PromptPart(text=f"{END}a", parse_special_tokens=True),
        pb.PromptPart(text=END),
        pb.PromptPart(text=f"b{END}", parse_special_tokens=True),
    ]
    tokenizer = byte_tokenizer()
    end = tokenizer.token_to_id(END)
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    asked = await prompt_of(tokenizer, parts=pb.PromptParts(parts=parts))
    assert asked == [end, *ids_of(plain, f"a{END}b"), end]


async def test_a_gap_is_asked_for_with_the_tokens_that_the_target_says():
    tokenizer = byte_tokenizer()
    end = tokenizer.token_to_id(END)
    gap = pb.FillIn(prefix="a", suffix="b")
    asked = await prompt_of(tokenizer, fim_token_ids=(end, end, end), fill_in=gap)
    assert asked == [end, *ids_of(tokenizer, "a"), end, *ids_of(tokenizer, "b"), end]


async def test_a_gap_needs_a_tokenizer_that_has_tokens_for_it():
    async with orchestrating(targets=targets(1)) as system:
        with pytest.raises(errors.UnsupportedError, match=r"^fill_in: the model"):
            await system.generate(fill_in=pb.FillIn(prefix="a", suffix="b"))
        assert not system.targets[0].opened
