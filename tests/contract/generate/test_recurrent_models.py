"""Models with a recurrent state, through the whole service: each token is the library's."""

from __future__ import annotations

import asyncio

import pytest

from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.families import build_family, build_noisy_twin
from support.in_process import in_process_system
from support.library_texts import texts_of

# Rows are closed on the way.
PROMPT_LENGTH, TOKENS = 165, 40
WAYS = [
    {"strategy": "autoregressive"},
    {"strategy": "distributed", "lookahead": 2, "width": 2},
    *({"strategy": "speculative", "lookahead": lookahead} for lookahead in range(1, 9)),
    *({"strategy": "distributed", "lookahead": lookahead} for lookahead in (1, 3, 7)),
    {"strategy": "speculative", "lookahead": 3, "width": 2, "branches": 1},
    {},
]


def host(directory, *, invariant=False):
    limits = HostLimits(warm_up_rounds=0)
    return ModelHost(
        lambda: TransformersBackend(str(directory), invariant=invariant), limits=limits
    )


@pytest.mark.parametrize(
    ("family", "ways", "invariant"),
    [
        pytest.param("lfm2", WAYS[:2], False, id="lfm2"),
        pytest.param("falcon-h1", WAYS[1:2], True, id="falcon-h1 invariant"),
        *(
            pytest.param(name, WAYS, False, marks=pytest.mark.long, id=name)
            for name in ("qwen3.5", "falcon-h1", "jamba")
        ),
        pytest.param("qwen3.5", WAYS, True, marks=pytest.mark.long, id="qwen3.5 invariant"),
    ],
)
async def test_every_strategy_says_what_the_library_says(family, ways, invariant, tmp_path):
    directory = build_family(family, tmp_path / "target")
    reference = texts_of(directory, [PROMPT_LENGTH, 3, 70], count=TOKENS)
    expected = [tuple(text) for text in reference.texts]
    drafters = [host(build_noisy_twin(directory, tmp_path / "drafter"))]
    targets = [host(directory, invariant=invariant) for _ in range(2)]
    async with in_process_system(drafters=drafters, targets=targets) as system:

        def asked(n, **way):
            prompt = reference.prompts[n]
            return system.client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, **way)

        async def left_early(n, **way):
            events = asked(n, **way).events()
            async for _ in events:
                break
            await events.aclose()

        for way in ways:
            done = await asked(0, **way).collect()
            assert done.token_ids == expected[0], way
        # Many at once; some leave, and the sessions of the others are lost on the way.
        for strategy in ("speculative", "distributed"):
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(asked(n % 3, strategy=strategy, lookahead=3).collect())
                    for n in range(6)
                ]
                await left_early(1, strategy=strategy, lookahead=3)
                for each in (*drafters, targets[0]):
                    for session in [*each._sessions]:
                        each.close_session(session.session_id)
            for n, task in enumerate(running):
                assert task.result().token_ids == expected[n % 3]
        await system.settled()
        assert targets[0].statistics().judged_tokens > targets[0].statistics().accepted_tokens > 0
