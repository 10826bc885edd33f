"""How the bundled models were made: each step beside a slow computation of its own."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

import training
from growth import CONTEXT, build_model, grow
from training import Stage, Windows, held_out_loss, train_stage
from vocabulary import VOCABULARY_SIZE

STAGE = Stage(
    name="toy", layers=1, minutes=10, matrix_rate=0.5, embedding_rate=0.25, decay_share=0.4
)


def a_model(seed, *, layers=1, width=24):
    """A model whose distributions are far from flat, and others for each seed."""
    torch.manual_seed(seed)
    model = build_model(layers=layers, width=width)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(30)
    return model


def a_stream(length, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY_SIZE, (length,), generator=generator)


@torch.inference_mode()
def slow_losses(model, stream):
    """Nats of each token after the first of each window, the windows on after another."""
    losses = []
    for start in range(0, len(stream) - CONTEXT, CONTEXT):
        logits = model(stream[start : start + CONTEXT][None]).logits[0].double()
        for place, row in enumerate(logits):
            wanted = stream[start + place + 1]
            losses.append(float(row.logsumexp(0) - row[wanted]))
    return losses


def test_the_held_out_loss_is_the_mean_over_every_token_of_the_windows():
    model, stream = a_model(1), a_stream(2 * CONTEXT + 700)
    losses = slow_losses(model, stream)
    assert len(losses) == 2 * CONTEXT, "what fills no window is left out"
    assert held_out_loss(model, stream) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_a_quick_look_takes_windows_spread_over_the_whole_text():
    model, stream = a_model(1), a_stream(5 * CONTEXT + 1)
    losses = slow_losses(model, stream)
    seen = losses[:CONTEXT] + losses[2 * CONTEXT : 3 * CONTEXT]
    quick = held_out_loss(model, stream, window_limit=2)
    assert quick == pytest.approx(sum(seen) / len(seen), rel=1e-5)


def test_an_epoch_shows_each_window_once_and_each_stream_as_often():
    length = 4 * CONTEXT + 1  # at any offset three whole windows
    streams = [torch.arange(length), torch.arange(length) + 10**6]
    windows = Windows(streams, batch=2, seed=7)
    epochs = [torch.stack([windows.at(3 * epoch + step) for step in range(3)]) for epoch in (0, 1)]
    for epoch in epochs:
        assert epoch.shape == (3, 2, CONTEXT + 1)
        for number, part in enumerate(epoch.unbind(1)):
            starts = sorted(int(row[0]) - number * 10**6 for row in part)
            assert [start - starts[0] for start in starts] == [0, CONTEXT, 2 * CONTEXT]
            assert all(torch.equal(row, row[0] + torch.arange(CONTEXT + 1)) for row in part)
    assert not torch.equal(*epochs)
    assert len({int(epoch[0, 0, 0]) % CONTEXT for epoch in epochs}) == 2, "each cuts elsewhere"
    assert torch.equal(Windows(streams, batch=2, seed=7).at(4), epochs[1][1]), (
        "whatever came before"
    )


def test_a_grown_model_says_the_same_and_its_new_layers_are_alike_to_none():
    source = a_model(3, layers=2, width=192)
    grown = grow(source, layers=5, seed=11)
    tokens = a_stream(20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(grown(tokens).logits, source(tokens).logits)
    old, new = (
        [it.mlp.up_proj.weight.detach() for it in each.model.layers] for each in (source, grown)
    )
    assert torch.equal(new[0], old[0])
    assert torch.equal(new[3], old[1])  # 0, 0, 0, 1, 1
    for ancestor, copy in ((old[0], new[1]), (old[0], new[2]), (old[1], new[4])):
        share = torch.corrcoef(torch.stack([ancestor.flatten(), copy.flatten()]))[0, 1]
        assert float(share) == pytest.approx(0.7, abs=0.02)
        assert float(copy.std() / ancestor.std()) == pytest.approx(1, abs=0.02)
    assert not torch.equal(new[1], new[2])
    outputs = [grown.model.layers[it].self_attn.o_proj.weight for it in (1, 2, 4)]
    assert not any(weight.any() for weight in outputs)


class Steps:
    """An optimizer that notes its rates and changes nothing."""

    def __init__(self):
        self.rates = {}
        self.taken = []

    def made(self, _model, **rates):
        self.rates = rates
        return self

    def step(self, rate):
        self.taken.append(rate)

    def state_dict(self):
        return {}


@pytest.fixture
def steps(monkeypatch):
    """The optimizer above, and a clock that stands still but where a step begins."""
    seconds = iter((0, 3, 6, 60, 360, 420, 480, 540, 600))
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    steps = Steps()
    monkeypatch.setattr(training, "MuonWithAdamW", steps.made)
    return steps


def trained(model, folder, *, stream, teacher=None):
    return train_stage(
        model,
        stage=STAGE,
        windows=Windows([stream], batch=1, seed=1),
        held_out=stream,
        folder=folder,
        teacher=teacher,
        thread_counts=(torch.get_num_threads(),),
    )


def test_rates_warm_up_hold_and_fall_to_zero_at_the_end_of_the_budget(steps, tmp_path):
    model, stream = a_model(1), a_stream(2 * CONTEXT + 1)
    result = trained(model, tmp_path, stream=stream)
    assert steps.rates == {"matrix_rate": 0.5, "embedding_rate": 0.25}
    assert steps.taken == pytest.approx([0.25, 0.5, 1, 1, 0.75, 0.5, 0.25])
    assert (result.steps, result.tokens, result.seconds) == (7, 7 * CONTEXT, 600)
    assert result.held_out_loss == held_out_loss(model, stream)
    assert not [*tmp_path.iterdir()], "the checkpoint is of use to a stage that is not finished"


@torch.inference_mode()
def slow_divergence(teacher, model, window):
    """Nats of a token by which a model misses its teacher: KL(teacher || model)."""
    rows = [each(window[None, :-1]).logits[0].double().log_softmax(-1) for each in (teacher, model)]
    return sum(float((said.exp() * (said - made)).sum()) for said, made in zip(*rows, strict=True))


@pytest.mark.usefixtures("steps")
def test_a_pupil_is_told_by_how_much_it_misses_its_teacher(tmp_path, capsys):
    teacher, pupil, stream = a_model(1), a_model(2), a_stream(2 * CONTEXT + 1)
    trained(pupil, tmp_path, stream=stream, teacher=teacher)
    windows = Windows([stream], batch=1, seed=1)
    first = [slow_divergence(teacher, pupil, windows.at(step)[0]) / CONTEXT for step in range(3)]
    told = [float(it) for it in re.findall(r"  loss ([0-9.]+)", capsys.readouterr().out)]
    assert told[0] == pytest.approx(sum(first) / 3, abs=6e-4), "of the steps until then"
    backwards = slow_divergence(pupil, teacher, windows.at(0)[0]) / CONTEXT
    assert abs(first[0] - backwards) > 0.01, "here the two directions can be told apart"
