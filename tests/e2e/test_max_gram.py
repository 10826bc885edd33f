"""Max-Gram on real models: the tokens of plain decoding, and it really drafted."""

from __future__ import annotations

from functools import cache

import pytest

from paceline import DrafterKind, Strategy, TimelineEventKind
from support.equality import compare
from support.oracle import Sampling
from support.streams import mishaps

TOKENS = 64
TEXT = "max-gram"
# Every two of a strategy, a temperature and a kind of drafter meet.
CASES = [
    (Strategy.SPECULATIVE, 0.0, DrafterKind.MAX_GRAM),
    (Strategy.SPECULATIVE, 0.8, DrafterKind.SERVER_AND_MAX_GRAM),
    (Strategy.DISTRIBUTED, 0.0, DrafterKind.SERVER_AND_MAX_GRAM),
    (Strategy.DISTRIBUTED, 0.8, DrafterKind.MAX_GRAM),
]


def of_text(completion):
    """Return the tokens that were drafted from the text, by the record of the stream."""
    return [
        token
        for event in completion.finished.timeline
        if event.kind is TimelineEventKind.DRAFTED and event.server == TEXT
        for token in event.token_ids
    ]


@pytest.mark.parametrize(("strategy", "temperature", "kind"), CASES)
def test_the_tokens_are_those_of_plain_decoding(
    bundled, oracle, tokenizer, prompts, plain, strategy, temperature, kind
):
    options = {"max_tokens": TOKENS, "temperature": temperature, "seed": 7, "ignore_eos": True}
    drafted = accepted = 0
    with bundled.client() as client:
        for prompt in prompts[:2]:
            done = client.generate(
                prompt,
                strategy=strategy,
                drafter=kind,
                lookahead=4,
                targets=3,
                include_timeline=True,
                **options,
            ).collect()
            compare(
                oracle,
                tokenizer.encode(prompt).ids,
                Sampling(temperature=temperature, seed=7),
                expected=plain(prompt, **options),
                actual=done.token_ids,
            )
            assert not mishaps(done)
            took = done.finished.statistics
            assert took.max_gram_drafted_token_count == len(of_text(done))
            if kind is DrafterKind.MAX_GRAM:
                assert not took.drafter_forward_count
                assert took.drafted_token_count == len(of_text(done))
            drafted += len(of_text(done))
            accepted += took.max_gram_accepted_token_count
    if kind is DrafterKind.SERVER_AND_MAX_GRAM and strategy is Strategy.SPECULATIVE:
        return  # the server is first, and it drafts as long as it is there
    assert drafted
    if not temperature:
        assert accepted


@pytest.fixture(scope="module")
def plain(bundled):
    """Return the tokens of plain decoding; a text is decoded once."""

    @cache
    def decoded(prompt, **options):
        with bundled.client() as client:
            return client.generate(prompt, strategy="autoregressive", **options).collect().token_ids

    return decoded
