from __future__ import annotations

import pytest
import torch

from paceline_engine.terms.rank_paths import cartesian_tree, propose
from paceline_engine.torch_backend.adapters.trunk import compute_trunk
from paceline_training.continuations import Continuations, continue_greedily, continue_text
from paceline_training.hit_rates import guess_ranks, hit_rates, tokens_per_forward
from support.tiny_adapters import random_adapter, tiny_model

PROMPTS = torch.randint(40, (3, 5), generator=torch.Generator().manual_seed(1))
LENGTH = 30


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


def test_continuations_are_the_models_own_greedy_ones(model):
    texts = continue_greedily(model, PROMPTS, length=LENGTH)
    assert texts.token_ids.shape == (3, 5 + LENGTH)
    chosen = model(texts.token_ids).logits.argmax(-1)
    assert torch.equal(chosen[:, 4:-1], texts.token_ids[:, 5:])


def test_text_of_a_models_own_begins_as_another_text_does_and_goes_on_greedily(model):
    stream = torch.arange(40)
    done = []
    text = continue_text(
        model, stream, count=3, prompt_length=4, length=6, at_once=2, tell=done.append
    )
    prompts = torch.tensor([[0, 1, 2, 3], [17, 18, 19, 20], [35, 36, 37, 38]])
    assert torch.equal(text.view(3, 10)[:, :4], prompts)
    assert torch.equal(text.view(3, 10), continue_greedily(model, prompts, length=6).token_ids)
    assert done == [2, 3]


def test_a_rank_says_how_many_guesses_were_thought_better():
    """Rank 0 is a hit; the j-th guess of row t is for what the model chooses at row t + j."""
    model = tiny_model(dtype=torch.float32)
    texts = continue_greedily(model, PROMPTS, length=LENGTH)
    adapter = random_adapter("medusa", model, reach=2)
    ranks = guess_ranks(adapter, model, texts)
    assert ranks.shape == (3, LENGTH + 1 - 2, 2)
    trunk = compute_trunk(model, texts.token_ids)
    for ahead, logits in enumerate(adapter.draft_logits(model, trunk), start=1):
        order = logits.argsort(-1, descending=True)
        for text in range(3):
            for row in range(ranks.shape[1]):
                # Beside row 4 + t, and what the model says there is the text's token after it.
                right = texts.token_ids[text, 4 + row + ahead + 1] if row + ahead < LENGTH else None
                if right is not None:
                    assert order[text, 4 + row, ranks[text, row, ahead - 1]] == right


def test_rates_are_shares_by_guess_and_rank():
    ranks = torch.tensor([[[0, 1], [0, 5], [1, 1], [0, 0]]])
    assert hit_rates(ranks, most=2) == [[0.75, 0.25], [0.25, 0.5]]


@pytest.mark.parametrize("widths", [(1, 1, 1), (3, 2, 1), (40, 40)])
def test_tokens_per_forward_are_those_of_decoding_step_by_step(widths, model):
    """A decoder that does nothing but the definition, over trees of tokens."""
    prompt = PROMPTS[:1]
    texts = continue_greedily(model, prompt, length=LENGTH)
    adapter = random_adapter("streams", model)
    paths = cartesian_tree(widths)
    right = texts.token_ids[0].tolist()
    length, forwards, rows = prompt.shape[1], 0, LENGTH + 1 - adapter.reach
    while length - prompt.shape[1] < rows:
        text = torch.tensor([right[:length]])
        trunk = compute_trunk(model, text, upper_layers=2)
        forwards += 1
        guesses = [
            each[0, -1].argsort(descending=True).tolist()
            for each in adapter.draft_logits(model, trunk)
        ]
        proposal = propose(paths, guesses[: len(widths)])
        length += 1  # the main stream's own token, which the tree hangs on
        node = 0
        while True:
            children = [i for i, parent in enumerate(proposal.parents) if parent == node]
            hit = [i for i in children if right[length : length + 1] == [proposal.token_ids[i]]]
            if not hit:
                break
            node, length = hit[0] + 1, length + 1
    decoded = length - prompt.shape[1]
    ranks = guess_ranks(adapter, model, Continuations(texts.token_ids, prompt.shape[1]))
    assert tokens_per_forward(ranks, paths) == pytest.approx(decoded / forwards)


def test_without_guesses_a_forward_decides_one_token():
    ranks = torch.zeros(2, 5, 3, dtype=torch.int64)
    assert tokens_per_forward(ranks, ()) == 1
    assert tokens_per_forward(ranks, cartesian_tree((1, 1, 1))) == 8 / 2
