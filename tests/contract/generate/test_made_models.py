"""Models in the shapes that people have, through the whole service: each token is the library's."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.gateway import gateway_over
from support.in_process import in_process_system
from support.made_models import KINDS, make

STRATEGIES = ["autoregressive", "speculative", "distributed"]
WITH_A_TEMPLATE = [kind for kind in KINDS if kind != "byte fallback"]


def host(made):
    limits = HostLimits(warm_up_rounds=0)
    return ModelHost(lambda: TransformersBackend(str(made.folder)), limits=limits)


@asynccontextmanager
async def serving(kind, folder, **how):
    """Serve a model of a kind with a drafter that is wrong after every third token."""
    target = make(kind, folder / "target", layers=2, **how)
    drafter = make(kind, folder / "drafter", wrong_after=target.token_ids[::3], **how)
    targets = [host(target), host(target)]
    async with in_process_system(drafters=[host(drafter)], targets=targets) as system:
        yield target, system


def as_the_library_says(made, *, count):
    model = AutoModelForCausalLM.from_pretrained(made.folder)
    prompt = made.tokenizer.encode(made.prompt).ids
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=[*made.end_ids],
    )
    return tuple(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("kind", KINDS)
async def test_every_strategy_says_what_the_library_says_and_ends_where_it_ends(kind, tmp_path):
    async with serving(kind, tmp_path) as (made, system):
        expected = as_the_library_says(made, count=40)
        done = {}
        for strategy in STRATEGIES:
            done[strategy] = await system.client.generate(
                made.prompt, strategy=strategy, lookahead=3, max_tokens=40
            ).collect()
            assert done[strategy].token_ids == expected
            assert done[strategy].finished.finish_reason == "eos"
        assert len({each.text for each in done.values()}) == 1
        # Others do not wait for a drafter, and a text may be over before it has said anything.
        counts = done["speculative"].finished.statistics
        assert counts.accepted_token_count > 0
        assert counts.rejected_token_count > 0


@pytest.mark.parametrize("kind", WITH_A_TEMPLATE)
async def test_a_chat_over_http_is_the_templates_prompt_continued(kind, tmp_path):
    async with (
        serving(kind, tmp_path) as (made, system),
        gateway_over(orchestrators=(system.address,)) as gateway,
    ):
        written = f"<s>{made.prompt}</s><s>"
        expected = await system.client.generate(
            written, add_special_tokens=False, parse_special_tokens=True, max_tokens=40
        ).collect()
        answer = await gateway.client.chat.completions.create(
            model="target", messages=[{"role": "user", "content": made.prompt}], max_tokens=40
        )
        (choice,) = answer.choices
        assert choice.message.content == expected.text
        assert choice.finish_reason == "stop"
        assert expected.token_ids[:-1] == made.token_ids


async def test_a_stream_of_byte_tokens_that_is_left_goes_on_as_if_it_had_not_been(tmp_path):
    async with serving("byte fallback", tmp_path, ends=False) as (made, system):
        whole = await system.client.generate(made.prompt, max_tokens=24).collect()
        assert whole.token_ids == made.token_ids * 3
        left = system.client.generate(made.prompt, max_tokens=24)
        async for chunk in left:
            if chunk.token_ids:
                break
        await left.aclose()
        resumed = await system.client.resume(left).collect()
        assert resumed.token_ids == whole.token_ids


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_target_that_leaves_in_mid_stream_costs_no_token(strategy, tmp_path):
    async with serving("word pieces", tmp_path, ends=False) as (made, system):
        generation = system.client.generate(
            made.prompt, strategy=strategy, lookahead=3, max_tokens=12 * len(made.token_ids)
        )
        left = None
        async for _ in generation:
            if left is None:
                left = next(it for it in system.targets if it.statistics().sessions_open)
                left.end_sessions()
        done = await generation.collect()
        assert left is not None
        assert done.token_ids == made.token_ids * 12
