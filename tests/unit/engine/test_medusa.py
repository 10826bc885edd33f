from __future__ import annotations

import torch
from torch.nn import functional

from paceline_engine.torch_backend.adapters.files import build_adapter
from paceline_engine.torch_backend.adapters.trunk import compute_trunk
from support.tiny_adapters import random_adapter, tiny_model

TEXT = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(3))


def test_untrained_heads_are_the_models_own():
    model = tiny_model()
    heads = build_adapter("medusa", model, reach=3, layers=0, rank=0, exit_rank=0).double()
    heads.start_from(model, generator=torch.Generator())
    trunk = compute_trunk(model, TEXT)
    logits = list(heads.draft_logits(model, trunk))
    assert len(logits) == 3
    assert all(torch.equal(each, model(TEXT).logits) for each in logits)


def test_each_head_is_a_residual_block_and_a_product_of_its_own():
    model = tiny_model()
    heads = random_adapter("medusa", model)
    trunk = compute_trunk(model, TEXT)
    last = model.model(TEXT).last_hidden_state
    for index, logits in enumerate(heads.draft_logits(model, trunk)):
        inner = last @ heads.blocks[index].T + heads.biases[index]
        expected = (last + inner * functional.sigmoid(inner)) @ heads.heads[index].T
        torch.testing.assert_close(logits, expected)


def test_heads_take_as_many_weights_as_the_paper_says():
    """4 (h² + h v), and the blocks' biases."""
    model = tiny_model()
    heads = random_adapter("medusa", model, reach=4)
    assert sum(each.numel() for each in heads.parameters()) == 4 * (32 * 32 + 32 * 40 + 32)
