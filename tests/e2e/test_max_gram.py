"""Max-Gram on real models: the tokens of plain decoding, and it really drafted."""

from __future__ import annotations

from functools import cache

import pytest

from paceline import DrafterKind, Strategy, TimelineEventKind
from support.equality import compare
from support.oracle import Sampling
from support.streams import disturbed, mishaps
from support.system import System, bundled_model

TOKENS = 64
SPECULATIVE = [Strategy.SPECULATIVE, Strategy.DISTRIBUTED]
TEXT = "max-gram"
# Every two of a strategy, a temperature and a kind of drafter meet.
CASES = [
    (Strategy.SPECULATIVE, 0.0, DrafterKind.MAX_GRAM),
    (Strategy.SPECULATIVE, 0.8, DrafterKind.SERVER_AND_MAX_GRAM),
    (Strategy.DISTRIBUTED, 0.0, DrafterKind.SERVER_AND_MAX_GRAM),
    (Strategy.DISTRIBUTED, 0.8, DrafterKind.MAX_GRAM),
]
# A stream may be over before a busy machine has killed its drafter.
ATTEMPTS = 4


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
def lonely(bundled):
    """A system with one drafter of its own, which tests kill."""
    drafter = bundled_model("drafter", 1)
    system = System(drafters=[drafter], targets=bundled.targets)
    with system.running():
        yield system


@pytest.fixture(scope="module")
def plain(bundled):
    """Return the tokens of plain decoding; a text is decoded once."""

    @cache
    def decoded(prompt, **options):
        with bundled.client() as client:
            return client.generate(prompt, strategy="autoregressive", **options).collect().token_ids

    return decoded


@pytest.mark.parametrize("strategy", SPECULATIVE)
def test_when_the_drafter_is_killed_mid_stream_the_text_goes_on_drafting(
    lonely, oracle, tokenizer, prompts, plain, strategy
):
    options = {"max_tokens": 160, "ignore_eos": True}
    for _ in range(ATTEMPTS):
        lonely.mend()
        with lonely.client() as client:
            generation = client.generate(
                prompts[0], strategy=strategy, lookahead=4, include_timeline=True, **options
            )
            done = disturbed(generation, lonely.drafters[0].kill, after=10)
        compare(
            oracle,
            tokenizer.encode(prompts[0]).ids,
            Sampling(),
            expected=plain(prompts[0], **options),
            actual=done.token_ids,
        )
        if done.finished.statistics.fallbacks.get("drafter_lost"):
            break
    assert done.finished.statistics.fallbacks["drafter_lost"] >= 1
    assert of_text(done), "it went on speculating"
    assert done.finished.statistics.max_gram_accepted_token_count
