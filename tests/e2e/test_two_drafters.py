"""Three models at work on one text: two drafters that disagree, and the target that decides."""

from __future__ import annotations

import shutil
from collections import defaultdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline import Strategy, TimelineEventKind
from support.cells import Cell, Outcome, missing_evidence
from support.streams import mishaps
from support.system import MODELS, System, bundled_model

TOKENS, NOISE = 48, 0.15
# A busy machine may take more prompts until everything has been seen to happen.
FEWEST_PROMPTS, MOST_PROMPTS = 3, 12
WAY = Cell(Strategy.DISTRIBUTED, lookahead=2, target_count=3, sampling="")


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
    with system.running():
        yield system


def test_two_drafters_that_disagree_give_the_tokens_of_plain_decoding(three_models, prompts):
    options = {"max_tokens": TOKENS, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    speculation = {
        "strategy": WAY.strategy,
        "drafters": 2,
        "lookahead": WAY.lookahead,
        "targets": WAY.target_count,
    }
    disagreements, outcome = 0, Outcome()
    with three_models.client() as client:
        for index, prompt in enumerate(prompts[:MOST_PROMPTS], start=1):
            plain = client.generate(prompt, strategy="autoregressive", **options).collect()
            evidence = three_models.watch()
            with evidence.gathered():
                done = client.generate(
                    prompt, include_timeline=True, **speculation, **options
                ).collect()
            assert done.token_ids == plain.token_ids
            assert done.started.strategy is WAY.strategy
            assert not mishaps(done)
            if done.finished.statistics.fallbacks:
                three_models.wait_until_whole()
            outcome.add(done, evidence)
            disagreements += count_disagreements(done.finished.timeline)
            if index >= FEWEST_PROMPTS and disagreements and not unseen(outcome):
                break
    assert disagreements > 0
    assert not unseen(outcome), outcome


def unseen(outcome):
    """Say what the servers should have seen, and did not."""
    missing = missing_evidence(WAY, outcome, undisturbed_runs=FEWEST_PROMPTS)
    return missing if outcome.servers_drafters == 2 else [*missing, "drafts by both drafters"]


def count_disagreements(timeline):
    """Count the positions for which the two drafters guessed different tokens."""
    guesses = defaultdict(lambda: defaultdict(set))
    for event in timeline:
        if event.kind is TimelineEventKind.DRAFTED:
            for position, token in enumerate(event.token_ids, start=event.position):
                guesses[position][event.server].add(token)
    return sum(
        by["drafter-0"].isdisjoint(by["drafter-1"]) for by in guesses.values() if len(by) == 2
    )
