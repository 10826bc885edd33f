"""Biases, penalties and min_tokens through the whole service: every strategy says the same.

What they say is compared with the library's forwards, shaped and sampled in plain Python.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.errors import UnsupportedError
from paceline_contract.sampling import FILTERS, SAMPLING_PARAMETERS, SamplingParameters
from paceline_engine.deciding.noise import Purpose
from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.fake_text import continuation
from support.in_process import in_process_system, system_of_pair
from support.orchestrating import PROMPT as FAKE_PROMPT
from support.orchestrating import a_drafter, orchestrating, targets
from support.plain_sampling import choose, filtered, shaped
from support.tiny_models import tiny_pair

__all__ = ["tiny_pair"]

PROMPT = [5, 9, 9, 17, 40, 9]
SEED = 1234
LENGTH = 24
SIZE = 300
SHAPES = {
    "bias": {"logit_bias": {9: 8.0, 11: -100.0}},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.6},
    "all": {
        "logit_bias": {40: 3.0},
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "min_tokens": 12,
    },
}
WAYS = {
    "plain": {"strategy": "autoregressive"},
    "si": {"strategy": "speculative", "lookahead": 4},
    "si from the text": {"strategy": "speculative", "lookahead": 4, "drafter": "max_gram"},
    "si with trees": {"strategy": "speculative", "lookahead": 3, "width": 3, "branches": 2},
    "dsi": {"strategy": "distributed", "lookahead": 2},
    "dsi with trees": {"strategy": "distributed", "lookahead": 2, "width": 3, "branches": 2},
    "auto": {},
}


@cache
def model_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.inference_mode()
def as_told(folder, shape, temperature) -> tuple[int, ...]:
    """Decode token by token as docs/protocol.md says, by the library's forwards."""
    model = model_of(folder)
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else [*ends]
    biases = tuple(shape.get("logit_bias", {}).items())
    parameters = SamplingParameters(temperature, **{**shape, "logit_bias": biases})
    answer: list[int] = []
    while len(answer) < LENGTH and not (answer and answer[-1] in ends):
        row = model(torch.tensor([[*PROMPT, *answer]])).logits[0, -1, :SIZE].tolist()
        row = shaped(row, parameters, prompt=PROMPT, answer=answer, end_ids=ends)
        if temperature == 0:
            answer.append(max(range(SIZE), key=lambda token: (row[token], -token)))
            continue
        position = len(PROMPT) + len(answer)
        weights = filtered(row, parameters)
        answer.append(choose(weights, position=position, seed=SEED, purpose=Purpose.EXACT))
    return tuple(answer)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_strategy_says_what_is_told(tiny_pair, temperature):
    async with system_of_pair(tiny_pair) as system:
        plain = as_told(tiny_pair.target, {}, temperature)
        for index, shape in enumerate(SHAPES.values()):
            expected = as_told(tiny_pair.target, shape, temperature)
            assert expected != plain, "the shape changes something"
            # Drawn, each shape meets every other way, and each way a shape.
            for way in list(WAYS.values())[index % 2 :: 2 if temperature else 1]:
                done = await system.client.generate(
                    PROMPT, max_tokens=LENGTH, temperature=temperature, seed=SEED, **shape, **way
                ).collect()
                assert done.token_ids == expected, (shape, way)
        await system.settled()


async def test_drafters_shape_as_targets_do(tiny_pair):
    """Few tokens are left, and a drafter that is not told of it would guess none of them."""
    async with system_of_pair(tiny_pair) as system:
        done = await system.client.generate(
            PROMPT,
            max_tokens=LENGTH,
            strategy="speculative",
            lookahead=4,
            logit_bias={token: -100.0 for token in range(SIZE) if token % 50},
        ).collect()
        counts = done.finished.statistics
        assert {token % 50 for token in done.token_ids} == {0}
        assert counts.accepted_token_count > counts.rejected_token_count


@pytest.mark.parametrize("way", ["plain", "dsi"])
async def test_a_resumed_answer_counts_the_tokens_that_came_before(tiny_pair, way):
    shape = SHAPES["all"]
    async with system_of_pair(tiny_pair) as system:
        expected = as_told(tiny_pair.target, shape, 1.0)
        for received in (1, 7, 20):
            done = await system.client.generate(
                PROMPT,
                max_tokens=LENGTH,
                temperature=1.0,
                seed=SEED,
                resume_token_ids=expected[:received],
                **shape,
                **WAYS[way],
            ).collect()
            assert done.token_ids == expected[received:]


async def test_log_probabilities_are_the_models_own(tiny_pair):
    async with system_of_pair(tiny_pair) as system:
        told = [
            await system.client.generate(
                PROMPT, max_tokens=1, logprobs=True, top_logprobs=2, **shape
            ).collect()
            for shape in ({}, {"logit_bias": {77: 100.0}})
        ]
        plain, biased = told
        assert biased.token_ids == (77,)
        plain, biased = plain.chunks[0], biased.chunks[0]
        assert biased.top_logprobs == plain.top_logprobs
        assert biased.logprobs < plain.logprobs


@pytest.mark.parametrize("way", ["plain", "si", "dsi"])
async def test_no_end_comes_before_min_tokens(tiny_pair, way):
    """The end is made the likeliest token by far: it comes as soon as it may."""
    (end,) = {model_of(tiny_pair.target).generation_config.eos_token_id}
    async with system_of_pair(tiny_pair) as system:
        for least in (0, 1, 9):
            done = await system.client.generate(
                PROMPT,
                max_tokens=LENGTH,
                logit_bias={end: 100.0},
                min_tokens=least,
                **WAYS[way],
            ).collect()
            assert done.token_ids.index(end) == least
            assert done.finished.finish_reason == "eos"


async def draw_one_of_two(system):
    """Decode by SI under REJECTION, where a bias leaves two tokens, of about the same weight."""
    return await system.client.generate(
        PROMPT,
        max_tokens=LENGTH,
        temperature=5.0,
        seed=SEED,
        rule="rejection",
        strategy="speculative",
        lookahead=3,
        logit_bias={token: -100.0 for token in range(SIZE) if token not in {50, 60}},
    ).collect()


async def test_under_rejection_the_shaped_distribution_is_drawn_from(tiny_pair):
    """Two tokens are left, of one weight: drafts of both are accepted, and nothing else comes."""
    async with system_of_pair(tiny_pair) as system:
        done = await draw_one_of_two(system)
        assert {*done.token_ids} == {50, 60}
        assert done.finished.statistics.accepted_token_count > 0


class OlderHost(ModelHost):
    """A server of a version that has never heard of shaping: it leaves the fields out."""

    def open_session(self, spec):
        given = asdict(spec.sampling)
        known = SamplingParameters(**{name: given[name] for name in FILTERS})
        return super().open_session(replace(spec, sampling=known))


def host_of(folder, kind=ModelHost):
    def load():
        backend = TransformersBackend(str(folder))
        if kind is OlderHost:
            backend.description = replace(backend.description, samples_by=FILTERS)
        return backend

    return kind(load, limits=HostLimits(warm_up_rounds=0))


async def test_an_older_target_that_ignores_shaping_has_no_part_in_a_shaped_text(tiny_pair):
    targets = [host_of(tiny_pair.target, kind) for kind in (OlderHost, OlderHost, ModelHost)]
    drafters = [host_of(tiny_pair.drafter, OlderHost)]
    async with in_process_system(drafters=drafters, targets=targets) as system:
        for temperature in (0.0, 1.0):
            shape = SHAPES["all"]
            expected = as_told(tiny_pair.target, shape, temperature)
            plain = as_told(tiny_pair.target, {}, temperature)
            for way in WAYS.values():
                asked = {"max_tokens": LENGTH, "temperature": temperature, "seed": SEED, **way}
                done = await system.client.generate(PROMPT, **asked, **shape).collect()
                assert done.token_ids == expected, way
                done = await system.client.generate(PROMPT, **asked).collect()
                assert done.token_ids == plain, way
        opened = [it.statistics().sessions_opened for it in targets]
        assert min(opened[:2]) > 0, "they have the requests without"


async def test_under_rejection_a_drafter_that_does_not_shape_leaves_the_targets_distribution(
    tiny_pair,
):
    """It tells what it drew from: drafts of tokens that may not come are rejected by that."""
    drafters = [host_of(tiny_pair.drafter, OlderHost)]
    async with in_process_system(drafters=drafters, targets=[host_of(tiny_pair.target)]) as system:
        done = await draw_one_of_two(system)
        assert {*done.token_ids} == {50, 60}
        assert done.finished.statistics.rejected_token_count > 0


async def test_a_target_that_does_not_shape_gets_no_such_request():
    shape = {"logit_bias": {3: 1.0}}
    old, new = targets(1), targets(1, samples_by=SAMPLING_PARAMETERS)
    async with orchestrating(drafters=[a_drafter()], targets=[*old, *new]) as system:
        received = await system.generate(sampling={"logit_bias": {3: 1.0}}, target_count=2)
        assert received.token_ids == continuation(FAKE_PROMPT, 24)
        assert not system.targets[0].specs
        assert system.targets[1].specs
        assert not any(it.sampling.logit_bias for it in system.drafters[0].specs)
    async with orchestrating(drafters=[a_drafter()], targets=old) as system:
        with pytest.raises(UnsupportedError, match="sampling"):
            await system.generate(sampling=shape)
        assert (await system.generate()).token_ids == continuation(FAKE_PROMPT, 24)
