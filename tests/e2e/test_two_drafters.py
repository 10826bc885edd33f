"""Three models at work on one text: two drafters that disagree, and the target that decides."""

from __future__ import annotations

import shutil
from collections import defaultdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline import TimelineEventKind
from support.processes import running
from support.streams import mishaps
from support.system import MODELS, System, bundled_model

TOKENS, NOISE = 48, 0.15


@pytest.fixture(scope="module")
def noisy_drafter(tmp_path_factory):
    """The bundled drafter with noise on its weights: it knows the language, and errs more."""
    directory = tmp_path_factory.mktemp("noisy-drafter")
    original = MODELS / "python-drafter"
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += NOISE * weight.std() * torch.randn(weight.shape, generator=noise)
    model.save_pretrained(directory)
    shutil.copy(original / "tokenizer.json", directory)
    return bundled_model("drafter", 1, directory=directory)


@pytest.fixture(scope="module")
def three_models(bundled, noisy_drafter):
    system = System(drafters=[*bundled.drafters, noisy_drafter], targets=bundled.targets)
    with running(noisy_drafter, *system.orchestrators):
        yield system


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_drafters_that_disagree_give_the_tokens_of_plain_decoding(
    temperature, three_models, prompts
):
    options = {"max_tokens": TOKENS, "temperature": temperature, "seed": 5, "ignore_eos": True}
    speculation = {"strategy": "distributed", "drafters": 2, "lookahead": 2, "targets": 3}
    disagreements = 0
    with three_models.client() as client:
        for prompt in prompts[:3]:
            plain = client.generate(prompt, strategy="autoregressive", **options).collect()
            done = client.generate(
                prompt, include_timeline=True, **speculation, **options
            ).collect()
            assert done.token_ids == plain.token_ids
            assert not mishaps(done)
            assert done.finished.statistics.accepted_token_count > 0
            disagreements += count_disagreements(done.finished.timeline)
    assert disagreements > 0


def count_disagreements(timeline):
    """Count the positions for which the two drafters guessed different tokens."""
    guesses = defaultdict(lambda: defaultdict(set))
    for event in timeline:
        if event.kind is TimelineEventKind.DRAFTED:
            for position, token in enumerate(event.token_ids, start=event.position):
                guesses[position][event.server].add(token)
    assert {server for by in guesses.values() for server in by} == {"drafter-0", "drafter-1"}
    return sum(
        by["drafter-0"].isdisjoint(by["drafter-1"]) for by in guesses.values() if len(by) == 2
    )
