"""A prompt with a gap is written with the tokenizer's own tokens for that, whichever they are."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.front.prompts import encode_prompt
from paceline_orchestrator.front.tokenizer import Codec
from support.fake_text import byte_tokenizer

END = "<|end|>"
GAP = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


def filling(tokens, *, special=True):
    """Return a tokenizer with tokens for a gap, in another order than they are used."""
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())  # which others have, too
    tokenizer.add_tokens(
        [AddedToken(it, special=special, normalized=False) for it in reversed(tokens)]
    )
    return tokenizer


def prompt_of(tokenizer, *, fim_token_ids=None, **request):
    codec = Codec(tokenizer.to_str().encode())
    if fim_token_ids is None:
        fim_token_ids = tuple(filter(None, map(tokenizer.token_to_id, GAP)))
    asked = pb.GenerateRequest(**request)
    return list(encode_prompt(asked, codec, fim_token_ids=fim_token_ids))


def letters(text):
    tokenizer = filling(())
    tokenizer.encode_special_tokens = True
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("special", [True, False])
def test_a_gap_stands_after_prefix_and_suffix_with_the_model_s_tokens_for_it(special):
    tokenizer = filling(GAP, special=special)
    before, between, last = map(tokenizer.token_to_id, GAP)
    gap = pb.FillIn(prefix="def f(x):\n    ", suffix=f"\n{END}")
    prefix = letters(gap.prefix)
    asked = prompt_of(tokenizer, fill_in=gap)
    assert asked == [before, *prefix, between, *letters(gap.suffix), last]
    end = tokenizer.token_to_id(END)
    parsed = prompt_of(tokenizer, fill_in=gap, parse_special_tokens=True)
    assert parsed == [before, *prefix, between, *letters("\n"), end, last]


def test_a_gap_between_nothing_and_nothing_is_one_still():
    tokenizer = filling(GAP)
    expected = [tokenizer.token_to_id(it) for it in GAP]
    assert prompt_of(tokenizer, fill_in=pb.FillIn()) == expected


def test_the_tokens_of_a_gap_that_somebody_writes_are_letters():
    tokenizer = filling(GAP)
    gap = pb.FillIn(prefix="<fim_middle>", suffix="<fim_prefix>")
    asked = prompt_of(tokenizer, fill_in=gap)
    assert len([it for it in asked if it > tokenizer.token_to_id(END)]) == 3


@pytest.mark.parametrize("ids", [(), (5, 6, 7)])
def test_without_tokens_that_the_tokenizer_adds_for_it_there_is_no_gap(ids):
    with pytest.raises(errors.UnsupportedError, match="fill_in"):
        prompt_of(filling(GAP), fim_token_ids=ids, fill_in=pb.FillIn(prefix="a"))


def test_a_tokenizer_adds_its_first_token_to_parts_unless_it_is_told_not_to():
    tokenizer = filling(())
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, end)])
    parts = pb.PromptParts(parts=[pb.PromptPart(text="a"), pb.PromptPart(text="b")])
    assert prompt_of(tokenizer, parts=parts) == [end, *letters("ab")]
    assert prompt_of(tokenizer, parts=parts, add_special_tokens=False) == letters("ab")
