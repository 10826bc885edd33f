"""Speculative Streaming's model: the properties that make a tree of guesses mean something."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from paceline_engine.torch_backend.adapters.streams import Streams
from paceline_engine.torch_backend.adapters.trunk import compute_trunk
from support.tiny_adapters import random_adapter, tiny_model

TEXT = torch.randint(40, (2, 11), generator=torch.Generator().manual_seed(3))
CLOSE = {"rtol": 0, "atol": 1e-12}


def guesses(streams, model, text):
    trunk = compute_trunk(model, text, upper_layers=streams.upper_layers)
    return torch.stack([*streams.draft_logits(model, trunk)], 2)


def rows_alone(streams, model, trunk, rows, sees):
    """Stream rows after the last layer, of some main rows of a trunk."""
    return streams.stream_rows(
        model,
        trunk.entering[:, rows],
        positions=torch.tensor(rows),
        keys=[each[:, :, : sees.shape[1]] for each in trunk.keys],
        values=[each[:, :, : sees.shape[1]] for each in trunk.values],
        sees=sees,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_main_logits_are_bitwise_the_models(dtype):
    model = tiny_model(dtype=dtype)
    expected = model(TEXT).logits
    streams = random_adapter("streams", model)
    trunk = compute_trunk(model, TEXT, upper_layers=streams.upper_layers)
    list(streams.draft_logits(model, trunk))
    assert torch.equal(trunk.logits, expected)
    assert torch.equal(model(TEXT).logits, expected)


def test_a_stream_depends_on_no_later_stream():
    model = tiny_model()
    streams = random_adapter("streams", model)
    before = guesses(streams, model, TEXT)
    for changed in range(streams.reach):
        other = copy.deepcopy(streams)
        other.embeddings.data[changed] += 1
        after = guesses(other, model, TEXT)
        torch.testing.assert_close(after[:, :, :changed], before[:, :, :changed], **CLOSE)
        assert (after[:, :, changed:] - before[:, :, changed:]).abs().amin(dim=(0, 1, 3)).max() > 0
        assert not torch.allclose(after[:, :, changed], before[:, :, changed])


def test_streams_beside_a_trees_nodes_are_those_of_each_path_as_a_text():
    """Two branches after five tokens, their main rows side by side behind the text's."""
    model = tiny_model()
    streams = random_adapter("streams", model)
    context, branches = TEXT[:1, :5], (torch.tensor([[1, 2]]), torch.tensor([[3, 4]]))
    texts = [torch.cat((context, branch), 1) for branch in branches]
    trunks = [compute_trunk(model, text, upper_layers=2) for text in texts]
    first, second = trunks
    keys, values = (
        [torch.cat((one, two[:, :, 5:]), 2) for one, two in zip(ones, twos, strict=True)]
        for ones, twos in ((first.keys, second.keys), (first.values, second.values))
    )
    sees = torch.zeros(4, 9, dtype=torch.bool)
    sees[:, :5] = True  # then: node 5 and its child 6, node 7 and its child 8
    for node, ancestors in enumerate(([5], [5, 6], [7], [7, 8])):
        sees[node, ancestors] = True
    hidden = streams.stream_rows(
        model,
        torch.cat([trunk.entering[:, 5:] for trunk in trunks], 1),
        positions=torch.tensor([5, 6, 5, 6]),
        keys=keys,
        values=values,
        sees=sees,
    )
    logits = model.lm_head(model.model.norm(hidden))
    expected = torch.cat([guesses(streams, model, text)[:, 5:] for text in texts], 1)
    torch.testing.assert_close(logits, expected, **CLOSE)


def test_without_low_rank_weights_streams_are_rows_of_the_models_own_layers():
    """The library's layers, given stream rows behind the main rows and who sees what."""
    model = tiny_model()
    streams = random_adapter("streams", model)
    for layer in streams.layers:
        for part in layer.parts:
            part.up.data.zero_()
    trunk = compute_trunk(model, TEXT, upper_layers=2)
    length, reach = TEXT.shape[1], streams.reach
    rows = [(t, 0) for t in range(length)]
    rows += [(t, j) for t in range(length) for j in range(1, reach + 1)]
    sees = torch.tensor(
        [
            [
                (other_stream == 0 and other <= t) or (other == t and 0 < other_stream <= stream)
                for other, other_stream in rows
            ]
            for t, stream in rows
        ]
    )
    added = (trunk.entering[:, :, None] + streams.embeddings).flatten(1, 2)
    hidden = torch.cat((trunk.entering, added), 1)
    positions = torch.tensor([[t + stream for t, stream in rows]])
    mask = torch.zeros(sees.shape, dtype=hidden.dtype).masked_fill(~sees, -math.inf)
    for layer in model.model.layers[2:]:
        hidden = layer(
            hidden,
            attention_mask=mask[None, None],
            position_ids=positions,
            position_embeddings=model.model.rotary_emb(hidden, positions),
        )
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    logits = model.lm_head(model.model.norm(hidden))
    torch.testing.assert_close(logits[:, :length], trunk.logits, **CLOSE)
    expected = logits[:, length:].unflatten(1, (length, reach))
    torch.testing.assert_close(guesses(streams, model, TEXT), expected, **CLOSE)


def test_low_rank_weights_are_added_to_every_product():
    """Merged into a copy of a layer, they compute the same where there is no main stream to see."""
    model = tiny_model()
    streams = random_adapter("streams", model, reach=1, layers=1)
    merged = copy.deepcopy(model)
    plain = copy.deepcopy(streams)
    names = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    modules = (merged.model.layers[3].self_attn, merged.model.layers[3].mlp)
    linears = [getattr(m, name) for m, each in zip(modules, names, strict=True) for name in each]
    for linear, part, empty in zip(
        linears, streams.layers[0].parts, plain.layers[0].parts, strict=True
    ):
        linear.weight.data += part.up @ part.down
        empty.up.data.zero_()
    trunk = compute_trunk(model, TEXT, upper_layers=1)
    nothing = torch.zeros(3, TEXT.shape[1], dtype=torch.bool)
    rows = [2, 5, 8]
    torch.testing.assert_close(
        rows_alone(streams, model, trunk, rows, nothing),
        rows_alone(plain, merged, trunk, rows, nothing),
        **CLOSE,
    )
    changed = rows_alone(plain, model, trunk, rows, nothing)
    assert not torch.allclose(changed, rows_alone(plain, merged, trunk, rows, nothing))


def test_an_untrained_early_exit_is_the_models_head_on_what_enters_the_upper_layers():
    model = tiny_model()
    streams = random_adapter("streams", model)
    trunk = compute_trunk(model, TEXT, upper_layers=2)
    expected = model.lm_head(model.model.norm(trunk.entering))
    assert not torch.allclose(streams.early_logits(model, trunk), expected)
    streams.early_exit.up.data.zero_()
    assert torch.equal(streams.early_logits(model, trunk), expected)


def test_it_takes_as_many_weights_as_the_paper_says_beside_the_low_rank_ones():
    """20 times the width: four embeddings, and an early exit of rank 8."""
    model = tiny_model()
    streams = random_adapter("streams", model, reach=4, exit_rank=8)
    assert isinstance(streams, Streams)
    own = streams.embeddings.numel() + sum(x.numel() for x in streams.early_exit.parameters())
    assert own == 20 * 32
