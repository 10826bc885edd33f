"""A tokenizer comes with a model: what it does to one text costs that request, and no other."""

from __future__ import annotations

import json

import pytest

from paceline import errors
from support.fake_text import byte_tokenizer, continuation
from support.orchestrating import PROMPT, orchestrating, targets


def panicking_on_long_runs():
    """Return a tokenizer whose regular expression gives up on many letters a before another."""
    content = json.loads(byte_tokenizer().to_str())
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, content["pre_tokenizer"]],
    }
    return json.dumps(content).encode()


@pytest.mark.parametrize("length", [100, 1000])
async def test_a_text_that_the_tokenizer_gives_up_on_is_refused_by_name(length):
    async with orchestrating(targets=targets(1, tokenizer=panicking_on_long_runs())) as system:
        for _ in range(2):
            with pytest.raises(errors.InvalidFieldError) as refused:
                await system.generate(text="a" * length + "b")
            assert refused.value.violations[0].field == "text"
            assert "tokenizer cannot take it" in refused.value.message
        served = await system.generate()
        assert served.token_ids == continuation(PROMPT, 24)
