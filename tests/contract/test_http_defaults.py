"""What nobody has sent is no wish: a gateway's defaults are cut to what its model can do."""

from __future__ import annotations

import pytest

from support.gateway import gateway_over
from support.orchestrating import orchestrating, targets

CONTEXT = 64


@pytest.mark.parametrize("room", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_leaves_less_than_the_default_is_continued_to_the_contexts_end(
    room, stream
):
    async with (
        orchestrating(targets=targets(1, context_length=CONTEXT)) as system,
        gateway_over(orchestrators=(system.address,)) as gateway,
    ):
        asked = {
            "model": "fake-target",
            "prompt": [7] * (CONTEXT - room),
            "extra_body": {"paceline": {"ignore_eos": True}},
        }
        if stream:
            asked["stream_options"] = {"include_usage": True}
        answer = await gateway.client.completions.create(**asked, stream=stream)
        usage = [event.usage async for event in answer][-1] if stream else answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (CONTEXT - room, min(room, 16))


async def test_a_limit_that_was_sent_is_refused_where_there_is_no_room_for_it():
    async with (
        orchestrating(targets=targets(1, context_length=CONTEXT)) as system,
        gateway_over(orchestrators=(system.address,)) as gateway,
    ):
        asked = {"model": "fake-target", "prompt": [7] * (CONTEXT - 8)}
        refused = await gateway.http.post("/v1/completions", json={**asked, "max_tokens": 9})
        full = await gateway.http.post("/v1/completions", json={**asked, "prompt": [7] * CONTEXT})
    for answer, param in ((refused, "max_tokens"), (full, "prompt")):
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)


async def test_each_of_several_prompts_is_given_what_it_leaves():
    async with (
        orchestrating(targets=targets(1, context_length=CONTEXT)) as system,
        gateway_over(orchestrators=(system.address,)) as gateway,
    ):
        answer = await gateway.client.completions.create(
            model="fake-target",
            prompt=[[7] * (CONTEXT - room) for room in (3, 40)],
            n=2,
            extra_body={"paceline": {"ignore_eos": True}},
            logprobs=0,
        )
    counts = [len(choice.logprobs.tokens) for choice in answer.choices]
    assert counts == [3, 3, 16, 16]
