"""Servers with --invariant: every strategy and load has the same tokens, and logprobs.

They compute in bfloat16, and in four bits.

No near-tie is excused here, other than in the equality tests without it.
"""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from paceline import AsyncClient
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend.grouped_linear import refuse_int4
from support.processes import ServerProcess
from support.system import MODELS, System

FLAGS = ("--invariant", "--debug-calls")
FORMS = ("--dtype=bfloat16", "--weights=int4")
STRATEGIES = (
    {"strategy": "autoregressive"},
    {"strategy": "speculative", "lookahead": 3},
    {"strategy": "distributed", "lookahead": 1, "targets": 2},
    {"strategy": "distributed", "lookahead": 4, "targets": 2},
    {"strategy": "speculative", "lookahead": 3, "width": 3},
    {"strategy": "distributed", "lookahead": 2, "targets": 2, "width": 2, "branches": 4},
    {"strategy": "auto"},
)
# One is computed in parts where others are waiting.
PROMPTS = 2
MAX_TOKENS = 32
SAMPLINGS = ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 11})


@pytest.fixture(scope="module", params=FORMS)
def invariant(request):
    if request.param == "--weights=int4" and not can_compute_groups():
        pytest.skip("this machine computes no products in four bits")

    def server(role, index):
        model = f"--model={MODELS / f'python-{role}'}"
        return ServerProcess(role, model, request.param, *FLAGS, name=f"{role}-{index}")

    system = System(
        drafters=[server("drafter", 0)], targets=[server("target", index) for index in range(2)]
    )
    with system.running():
        yield system


def can_compute_groups() -> bool:
    try:
        refuse_int4(dtype="float32", device=torch.device("cpu"), compiled=True)
    except ModelLoadError:
        return False
    return True


async def decoded(client, prompt, sampling, strategy):
    """A stream's tokens, their log probabilities, and what else was likely: to the last bit."""
    tokens, logprobs, likeliest = [], [], []
    told = {"logprobs": True, "top_logprobs": 5}
    generation = client.generate(
        prompt, max_tokens=MAX_TOKENS, ignore_eos=True, **told, **sampling, **strategy
    )
    async for chunk in generation:
        tokens.extend(chunk.token_ids)
        logprobs.extend(chunk.logprobs)
        likeliest.extend(chunk.top_logprobs)
    return tokens, logprobs, likeliest


def shared_calls(system) -> float:
    """How many calls a target's forward computed on average."""
    calls, forwards = (
        sum(server.metric(f"paceline_{name}_total") for server in system.targets)
        for name in ("forward_calls", "forwards")
    )
    return calls / forwards


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_strategies_and_loads_have_the_same_bits(invariant, prompts):
    chance = random.Random(4)
    texts = [chance.choice(prompts) for _ in range(PROMPTS - 1)]
    texts.append("\n".join(chance.sample(prompts, 4)))
    cells = [(text, sampling) for text in texts for sampling in SAMPLINGS]
    async with AsyncClient(invariant.orchestrators[0].address) as client:
        plain = [await decoded(client, *cell, STRATEGIES[0]) for cell in cells]
        for tokens, logprobs, likeliest in plain:
            assert len(logprobs) == len(likeliest) == MAX_TOKENS
            for token, logprob, found in zip(tokens, logprobs, likeliest, strict=True):
                among = {it.token_id: it.logprob for it in found}
                assert among.get(token, logprob) == logprob
        for strategy in STRATEGIES[1:]:
            for cell, expected in zip(cells, plain, strict=True):
                assert await decoded(client, *cell, strategy) == expected, strategy
        asked = [(n, strategy) for n in range(len(cells)) for strategy in STRATEGIES]
        chance.shuffle(asked)
        together = await asyncio.gather(
            *(decoded(client, *cells[n], strategy) for n, strategy in asked)
        )
    for (n, strategy), actual in zip(asked, together, strict=True):
        assert actual == plain[n], strategy
    assert shared_calls(invariant) > 1.1
