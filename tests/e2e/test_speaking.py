"""Drafters of another vocabulary than the target's: the text is that of plain decoding."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.model_files.target_tokens import find_target_tokens
from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.speaking.vocabulary import Vocabulary
from paceline_engine.stack_backend.stacks import StackOptions, load_stack
from support.in_process import in_process_system
from support.smollm2_folder import smollm2_folder
from support.speakers import KINDS, TEXTS, make_speaker

MODELS = Path(__file__).parents[2] / "models"
TOKENS = 24
SAMPLINGS = ({"temperature": 0}, {"temperature": 1.0, "seed": 5})
SHORT_WAYS = (
    {"strategy": "speculative", "drafter": "server", "lookahead": 4},
    {"strategy": "distributed", "drafter": "server", "lookahead": 2, "targets": 2},
)
WAYS = (
    *SHORT_WAYS,
    {"strategy": "speculative", "drafter": "server_and_max_gram", "lookahead": 4},
    {"strategy": "distributed", "drafter": "server_and_max_gram", "targets": 2},
    {"strategy": "auto"},
)
PAIRS = [*itertools.permutations(KINDS, 2)]
POINT = 'class Point:\n    """A point in the plane."""\n\n    def __init__(self, '
SHORT = ("byte level", "pieces"), (0, 7, 12), SHORT_WAYS, False


def host(options: LoadOptions, *then: str) -> ModelHost:
    def load():
        stack = StackOptions(then=then, cascade="[[1,0],[0,4]]" if then else "auto")
        return load_stack(options, stack) if then else load_backend(options)

    return ModelHost(load, limits=HostLimits(warm_up_rounds=0))


@pytest.mark.parametrize(
    ("pair", "texts", "ways", "is_stack"),
    [
        SHORT,
        *(
            pytest.param(
                pair, range(n, len(TEXTS), len(PAIRS)), WAYS, False, marks=pytest.mark.long
            )
            for n, pair in enumerate(PAIRS)
        ),
        pytest.param(
            PAIRS[0], range(0, len(TEXTS), len(PAIRS)), WAYS, True, marks=pytest.mark.long
        ),
    ],
)
async def test_every_strategy_gives_the_tokens_of_plain_decoding(
    tmp_path, pair, texts, ways, is_stack
):
    target, drafter = (make_speaker(kind, tmp_path / kind, seed=len(kind)) for kind in pair)
    said = find_target_tokens(str(target))
    tokens = Vocabulary(said.tokenizer, size=said.vocabulary_size, name="target")
    speaking = LoadOptions(model=str(drafter), speak=str(target))
    drafters = [host(speaking, *(["max-gram"] if is_stack else []))]
    targets = [host(LoadOptions(model=str(target))) for _ in range(2)]
    accepted = 0
    async with in_process_system(drafters=drafters, targets=targets) as system:

        async def decode(prompt, **options):
            stream = system.client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, **options)
            return await stream.collect()

        for index in texts:
            # Cut anywhere, and with a special token: a turn's end, then any ids.
            prompt = [*tokens.encode(TEXTS[index].encode())[: 9 + index], *said.end_ids, 7 + index]
            for sampling in SAMPLINGS:
                plain = await decode(prompt, strategy="autoregressive", **sampling)
                for way in ways:
                    done = await decode(prompt, **way, **sampling)
                    assert done.token_ids == plain.token_ids, (way, sampling)
                    accepted += done.finished.statistics.accepted_token_count
    assert accepted > 0


@pytest.mark.long
@pytest.mark.parametrize("is_target", [True, False])
async def test_a_real_model_and_the_bundled_ones_draft_for_each_other(is_target):
    """SmolLM2's tokens are longer than those of the bundled models: 49,152 and 2,048 of them."""
    real = str(smollm2_folder())
    target, drafter = (
        (real, MODELS / "python-drafter") if is_target else (MODELS / "python-target", real)
    )
    drafters = [host(LoadOptions(model=str(drafter), speak=str(target)))]
    targets = [host(LoadOptions(model=str(target)))]
    async with in_process_system(drafters=drafters, targets=targets) as system:

        async def decode(strategy, **options):
            options |= {"max_tokens": 24, "ignore_eos": True, "temperature": 0}
            stream = system.client.generate(POINT, strategy=strategy, **options)
            return await stream.collect()

        accepted = rejected = 0
        plain = await decode("autoregressive")
        for way in ({"strategy": "speculative", "lookahead": 4}, {"strategy": "distributed"}):
            done = await decode(way.pop("strategy"), drafter="server", **way)
            assert done.token_ids == plain.token_ids
            accepted += done.finished.statistics.accepted_token_count
            rejected += done.finished.statistics.rejected_token_count
    assert accepted > rejected / 3
