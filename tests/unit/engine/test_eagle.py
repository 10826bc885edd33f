"""EAGLE-3's head: what it computes, and how it is trained."""

from __future__ import annotations

import pytest
import torch

from paceline_engine.torch_backend.adapters.trunk import compute_trunk
from paceline_training.objective import chain_loss
from support.eagle_reference import SlowHead
from support.tiny_adapters import random_adapter, tiny_model

TEXT = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(3))
VARIANTS = [
    {},
    {"own_head": True, "own_embedding": True, "norm_before_residual": True, "norm_output": True},
    {"feature_norms": "together", "norm_output": True},
    {"feature_norms": "each", "own_embedding": True},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "its own", "one norm", "three norms"])
def test_all_rows_at_once_are_the_chains_that_begin_at_each_row(variant):
    model = tiny_model()
    head = random_adapter("eagle", model, **variant)
    trunk = compute_trunk(model, TEXT, feature_layers=head.feature_layers)
    slow = SlowHead(head.state_dict(), head.shape, model)
    logits = torch.stack([*head.draft_logits(model, trunk)], 2)
    assert logits.shape == (2, 9, 3, 40)
    assert torch.isfinite(logits[0, 0, 0]).nonzero().flatten().tolist() == [*range(1, 31)]
    for text, features, own in zip(TEXT.tolist(), trunk.features, logits, strict=True):
        for row in range(8):
            after = text[row + 2 :]
            expected = slow.chain(
                features[: row + 1],
                text[: row + 2],
                steps=min(3, 8 - row),
                choose=lambda step, _, after=after: after[step] if step < len(after) else None,
            )
            # The library's rotations are in float32.
            torch.testing.assert_close(own[row, : len(expected)], expected, atol=1e-4, rtol=1e-4)


def test_features_are_what_enters_a_low_a_middle_and_a_high_layer():
    model = tiny_model(num_hidden_layers=10)
    head = random_adapter("eagle", model)
    assert head.feature_layers == (2, 5, 7)
    trunk = compute_trunk(model, TEXT, feature_layers=head.feature_layers)
    entered = {}
    for layer in head.feature_layers:
        model.model.layers[layer].register_forward_pre_hook(
            lambda _, inputs, layer=layer: entered.setdefault(layer, inputs[0])
        )
    model(TEXT)
    assert torch.equal(trunk.features, torch.cat([entered[layer] for layer in (2, 5, 7)], -1))


class Oracle:
    """Says what the model says so many rows further on, of the first 30 tokens."""

    draft_token_ids = torch.arange(30)

    def __init__(self, logits, *, ahead):
        self._logits, self._ahead = logits, ahead

    def step_logits(self, _model, _trunk):
        for step in range(2):
            yield self._logits.roll(-step - self._ahead, 1)[..., :30]


def test_it_learns_the_models_distribution_at_the_token_after_the_next_and_on():
    model = tiny_model()
    trunk = compute_trunk(model, TEXT)
    right, early = (
        chain_loss(Oracle(trunk.logits, ahead=ahead), model, trunk=trunk) for ahead in (1, 0)
    )
    assert abs(right) < 1e-6
    assert early > 0.1
    # A row in which the model says only what cannot be guessed has no weight.
    trunk.logits[:, 3, 35] = 1e4
    wrong = trunk.logits.clone()
    wrong[:, 3] = torch.arange(40.0)
    assert abs(chain_loss(Oracle(wrong, ahead=1), model, trunk=trunk)) < 1e-6
    trunk.logits[:, 3, 35] = 0
    assert chain_loss(Oracle(wrong, ahead=1), model, trunk=trunk) > 0.1
