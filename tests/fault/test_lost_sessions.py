"""A session that is evicted, or holds other tokens than it should, costs time and never a token."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.families import build_family, build_noisy_twin
from support.in_process import in_process_system
from support.library_texts import texts_of
from support.oracle import Oracle, Sampling
from support.quantised_folders import LAYOUTS, SIZES, write_folder
from support.tiny_models import build_tokenizer

# More than one window of plain decoding.
PROMPT, TOKENS = [5, 6, 7, 8, 9, 10], 80
# On a busy machine the damage may come after the last call.
ATTEMPTS = 4
WISHES = {"max_tokens": TOKENS, "lookahead": 3, "targets": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tiny_pair):
    """A drafter's and two targets', loaded once: each test has hosts of its own."""
    return [load(getattr(tiny_pair, it)) for it in ("drafter", "target", "target")]


@pytest.fixture(scope="module")
def expected(tiny_pair):
    return tuple(Oracle(tiny_pair.target).decode(PROMPT, Sampling(), TOKENS))


def load(directory):
    return TransformersBackend(str(directory))


def host(model):
    return ModelHost(lambda: model, limits=HostLimits(warm_up_rounds=0))


def evict(session, of):
    of.close_session(session.session_id)


def swap_last_token(session, of):
    length = session.held_length
    if length:
        last = session._prefix.tokens()[-1]
        session._prefix.truncate(length - 1)
        session._prefix.extend([(last + 1) % of.description.vocabulary_size])


def forget_last_tokens(session, of):
    session._prefix.truncate(max(0, session.held_length - 3))


def tamper(damage, hosts):
    """Damage every session of some hosts; say how many there were."""
    sessions = [(session, each) for each in hosts for session in each._sessions]
    for session, each in sessions:
        damage(session, each)
    return len(sessions)


# Every two of a strategy, a damage and a role meet; plain decoding has no drafter.
CASES = [
    ("autoregressive", evict, "targets"),
    ("autoregressive", swap_last_token, "targets"),
    ("autoregressive", forget_last_tokens, "targets"),
    ("speculative", evict, "drafters"),
    ("speculative", swap_last_token, "targets"),
    ("speculative", forget_last_tokens, "drafters"),
    ("distributed", evict, "targets"),
    ("distributed", swap_last_token, "drafters"),
    ("distributed", forget_last_tokens, "targets"),
]


@pytest.mark.parametrize(("strategy", "damage", "role"), CASES)
async def test_a_damaged_session_costs_no_token(strategy, damage, role, models, expected):
    drafter, *targets = map(host, models)
    async with in_process_system(drafters=[drafter], targets=targets) as system:
        ask = partial(system.client.generate, PROMPT, **WISHES, strategy=strategy)
        await survive(ask, damage, getattr(system, role), expected=expected)


async def survive(ask, damage, hosts, *, expected):
    """Damage sessions in mid-stream until a stream has felt it; each has the text."""
    repair = "session_lost" if damage is evict else "prefix_resent"
    for _ in range(ATTEMPTS):
        generation, damaged = ask(), 0
        async for _ in generation:
            damaged += tamper(damage, hosts)
        done = await generation.collect()
        assert done.token_ids == expected
        repairs = done.finished.statistics.fallbacks.get(repair, 0)
        if repairs:
            break
    assert damaged > 0
    assert repairs > 0


def build_quantised(directory):
    """Write a model whose products are in eight bits."""
    torch.manual_seed(5)
    directory.mkdir()
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 512, "initializer_range": 0.2})
    tokenizer = build_tokenizer(config.vocab_size)
    write_folder(LlamaForCausalLM(config), tokenizer, directory, LAYOUTS["w8a8"])
    return directory / "quantised", directory / "plain"


# A prompt whose rows are closed in part: what is forgotten lies before and behind the last tile.
STATE_PROMPT_LENGTH = 70
LATER = ("qwen3.5", "falcon-h1", "jamba", "w8a8")
LONG = [pytest.param(name, marks=pytest.mark.long) for name in LATER]


@pytest.mark.parametrize("kind", ["lfm2", *LONG])
async def test_a_state_that_was_lost_or_cut_back_costs_no_token(kind, tmp_path):
    """A recurrent state has no tokens to cut off; rows in eight bits are computed in blocks."""
    if kind == "w8a8":
        target, drafter = build_quantised(tmp_path / "models")
        (prompt,) = texts_of(drafter, [STATE_PROMPT_LENGTH], count=TOKENS).prompts
    else:
        target = build_family(kind, tmp_path / "target")
        drafter = build_noisy_twin(target, tmp_path / "drafter")
        reference = texts_of(target, [STATE_PROMPT_LENGTH], count=TOKENS)
        (prompt,) = reference.prompts
    drafters, targets = [host(load(drafter))], [host(load(target)) for _ in range(2)]
    async with in_process_system(drafters=drafters, targets=targets) as system:
        ask = partial(system.client.generate, prompt, **WISHES)
        expected = (await ask(strategy="autoregressive").collect()).token_ids
        if kind != "w8a8":
            assert expected == tuple(reference.texts[0])
        for strategy, damage, damaged in (
            ("speculative", evict, targets),
            ("speculative", forget_last_tokens, targets),
            ("distributed", swap_last_token, targets),
            ("distributed", forget_last_tokens, drafters),
        ):
            await survive(partial(ask, strategy=strategy), damage, damaged, expected=expected)
        # Another orchestrator would ask the same: for the rest of a text that a client has in part.
        for length in (1, 7, 40):
            left = ask(strategy="distributed")
            async for _ in left:
                if sum(len(it.token_ids) for it in left.transcript.chunks) >= length:
                    break
            await left.aclose()
            done = await system.client.resume(left).collect()
            assert done.token_ids == expected
            assert done.resumed_token_count >= length
        await asyncio.wait_for(system.settled(), 60)
