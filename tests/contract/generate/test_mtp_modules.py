"""Targets that draft with the module inside their checkpoint, through the whole service."""

from __future__ import annotations

import asyncio

import pytest

from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.in_process import in_process_system
from support.library_texts import texts_of
from support.mtp_checkpoints import LAYOUTS, build_with_module, let_it_guess_well

# Rows of recurrent layers are closed on the way.
PROMPT_LENGTH, TOKENS = 165, 40
WAYS = [
    {"strategy": "self_speculative"},
    {"strategy": "autoregressive"},
    *({"strategy": "speculative", "lookahead": lookahead} for lookahead in (1, 4)),
    *({"strategy": "distributed", "lookahead": lookahead} for lookahead in (1, 3)),
    {"strategy": "speculative", "lookahead": 3, "width": 2, "branches": 1},
    {},
]
SAMPLED = {"temperature": 0.9, "seed": 5}


def host(directory, adapter=None):
    limits = HostLimits(warm_up_rounds=0)
    return ModelHost(lambda: TransformersBackend(str(directory), adapter=adapter), limits=limits)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3.5",
        *(pytest.param(each, marks=pytest.mark.long) for each in LAYOUTS if each != "qwen3.5"),
    ],
)
async def test_every_strategy_says_what_the_library_says(family, tmp_path):
    """Also with lost sessions and a client that leaves, of which no text shows a trace."""
    directory = build_with_module(family, tmp_path / "target")
    let_it_guess_well(family, directory)
    reference = texts_of(directory, [PROMPT_LENGTH, 3, 70], count=TOKENS)
    expected = [tuple(text) for text in reference.texts]
    targets = [host(directory, "mtp"), host(directory, "mtp")]
    async with in_process_system(drafters=[host(directory)], targets=targets) as system:

        def asked(n, **way):
            prompt = reference.prompts[n]
            return system.client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, **way)

        sampled = await asked(1, strategy="autoregressive", **SAMPLED).collect()
        for way in WAYS:
            done = await asked(0, **way).collect()
            assert done.token_ids == expected[0], way
            done = await asked(1, **way, **SAMPLED).collect()
            assert done.token_ids == sampled.token_ids, way
        own = await asked(0, strategy="self_speculative").collect()
        took = own.finished.statistics
        assert took.accepted_token_count > 5
        assert took.rejected_token_count > 5
        assert took.target_forward_count < TOKENS - 4
        # Many at once, whose sessions are lost on the way; one client leaves.
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(asked(n % 3, strategy="self_speculative").collect())
                for n in range(6)
            ]
            async for _ in asked(2, strategy="self_speculative").events():
                break
            for session in [*targets[0]._sessions]:
                targets[0].close_session(session.session_id)
        for n, task in enumerate(running):
            assert task.result().token_ids == expected[n % 3]
        await system.settled()
