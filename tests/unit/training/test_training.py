"""Training on a tiny random model: it learns, and the same run gives the same weights."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math

import pytest
import torch

from paceline_engine.torch_backend.adapters.files import build_adapter
from paceline_engine.torch_backend.adapters.trunk import compute_trunk
from paceline_training.continuations import Continuations, continue_greedily
from paceline_training.hit_rates import guess_ranks, hit_rates
from paceline_training.objective import Joint, training_loss
from paceline_training.training import CheckpointError, TrainingPlan, train_adapter
from paceline_training.windows import TextWindows
from support.tiny_adapters import eagle_adapter, tiny_model

KINDS = ("medusa", "streams", "eagle")
PLAN = TrainingPlan(
    steps=12, rate=1e-2, decay="linear", warm_up_share=0.1, labels="model", checkpoint_steps=4
)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    model = tiny_model(dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()  # What it says depends on the last token alone.
    return model


@pytest.fixture(scope="module")
def texts(model):
    """What the model says by itself: 24 texts that it goes on with."""
    prompts = torch.randint(40, (24, 4), generator=torch.Generator().manual_seed(1))
    return continue_greedily(model, prompts, length=40)


def fresh(kind, model):
    if kind == "eagle":
        adapter = eagle_adapter(model, token_ids=range(38))
        adapter.start_from(model, generator=torch.Generator().manual_seed(1))
        return adapter
    adapter = build_adapter(kind, model, reach=3, layers=3, rank=16, exit_rank=4)
    adapter.start_from(model, generator=torch.Generator().manual_seed(1))
    return adapter


def train(adapter, model, texts, *, folder, plan=PLAN, run=None, report=lambda _: None):
    windows = TextWindows([texts.token_ids[:20].flatten()], length=44, batch=4, seed=1)
    train_adapter(
        adapter,
        model,
        plan=plan,
        windows=windows,
        run=run or {"seed": 1},
        checkpoint=folder / "checkpoint.pt",
        report=report,
    )


def same(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(mine, yours) for mine, yours in pairs)


@pytest.mark.parametrize(
    ("kind", "optimizer", "steps", "least"),
    [
        ("medusa", "adamw", 120, 0.8),
        ("streams", "adamw", 120, 0.8),
        ("eagle", "adamw", 200, 0.6),
        ("eagle", "muon", 200, 0.6),
    ],
)
def test_hit_rates_rise_on_texts_that_it_did_not_learn_from(
    kind, optimizer, steps, least, model, texts, tmp_path
):
    adapter = fresh(kind, model)
    held_out = Continuations(texts.token_ids[20:], texts.prompt_length)

    def rates():
        return [each[0] for each in hit_rates(guess_ranks(adapter, model, held_out), most=1)]

    before = rates()
    plan = dataclasses.replace(PLAN, steps=steps, optimizer=optimizer)
    train(adapter, model, texts, folder=tmp_path, plan=plan)
    assert min(before) < 0.1
    assert min(rates()) > least


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_not_changed(kind, model, texts, tmp_path):
    state = copy.deepcopy(model.state_dict())
    logits = model(texts.token_ids[:2]).logits
    adapter = fresh(kind, model)
    train(adapter, model, texts, folder=tmp_path)
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    trunk = compute_trunk(model, texts.token_ids[:2], upper_layers=adapter.upper_layers)
    assert torch.equal(trunk.logits, logits)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_run_gives_the_same_weights(kind, model, texts, tmp_path):
    one, other = fresh(kind, model), fresh(kind, model)
    train(one, model, texts, folder=tmp_path / "one")
    train(other, model, texts, folder=tmp_path / "other")
    assert same(one, other)
    assert not same(one, fresh(kind, model))


def test_products_may_be_short_and_weights_are_not(model, texts, tmp_path):
    exact, short = fresh("streams", model), fresh("streams", model)
    train(exact, model, texts, folder=tmp_path / "exact")
    plan = dataclasses.replace(PLAN, precision="bfloat16")
    train(short, model, texts, folder=tmp_path / "short", plan=plan)
    assert {each.dtype for each in short.parameters()} == {torch.float32}
    assert not same(exact, short)
    for one, other in zip(exact.parameters(), short.parameters(), strict=True):
        assert float((one - other).detach().abs().mean()) < PLAN.steps * PLAN.rate / 2


def test_a_full_disk_is_told_as_such_and_leaves_the_last_checkpoint(model, texts, tmp_path):
    """The command tells it in one line, as of any file."""
    (tmp_path / "checkpoint.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        train(fresh("eagle", model), model, texts, folder=tmp_path)
    assert not (tmp_path / "checkpoint.pt").exists()


class KilledError(Exception):
    pass


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("medusa", "adamw"), ("streams", "adamw"), ("eagle", "adamw"), ("eagle", "muon")],
)
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(kind, optimizer, model, texts, tmp_path):
    plan = dataclasses.replace(PLAN, optimizer=optimizer)
    whole = fresh(kind, model)
    train(whole, model, texts, folder=tmp_path / "whole", plan=plan)

    def kill(progress):
        if progress.step == 7:
            raise KilledError

    every_step = dataclasses.replace(plan, report_steps=1)
    with pytest.raises(KilledError):
        train(fresh(kind, model), model, texts, folder=tmp_path, plan=every_step, report=kill)
    resumed = fresh(kind, model)
    steps = []
    train(
        resumed,
        model,
        texts,
        folder=tmp_path,
        plan=every_step,
        report=lambda progress: steps.append(progress.step),
    )
    assert steps == list(range(5, 13))  # from the checkpoint after four steps
    assert same(resumed, whole)


def test_a_limit_in_seconds_ends_the_schedule_and_a_resumed_run_has_what_was_left(
    model, texts, tmp_path, monkeypatch
):
    now = iter(range(1000))  # a look at the clock takes a second
    monkeypatch.setattr("paceline_training.training.time.monotonic", lambda: next(now))
    plan = dataclasses.replace(PLAN, steps=100, seconds=10.0, report_steps=1, checkpoint_steps=1)
    rates = [plan.rate_at(plan.place(0, seconds=spent)) for spent in range(2, 10)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0] / 5

    def steps(*, until):
        done = []

        def report(progress):
            done.append(progress.step)
            if progress.step == until:
                raise KilledError

        with contextlib.suppress(KilledError):
            train(fresh("medusa", model), model, texts, folder=tmp_path, plan=plan, report=report)
        return done

    assert steps(until=3) == [1, 2, 3]
    rest = steps(until=None)
    assert rest[0] == 3, "it goes on from the second step's checkpoint"
    assert rest[-1] < 8, "the time before the kill counts"
    assert steps(until=None) == []


@pytest.mark.parametrize(
    ("plan", "run", "complaint"),
    [
        ({"rate": 2e-2}, None, "rate was 0.01, is 0.02"),
        ({"steps": 13}, None, "steps was 12, is 13"),
        ({"optimizer": "muon"}, None, "optimizer was 'adamw', is 'muon'"),
        ({}, {"seed": 2}, "seed was 1, is 2"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(plan, run, complaint, model, texts, tmp_path):
    train(fresh("streams", model), model, texts, folder=tmp_path)
    other = dataclasses.replace(PLAN, **plan)
    with pytest.raises(CheckpointError, match=f"{complaint}.*remove .*checkpoint.pt") as caught:
        train(fresh("streams", model), model, texts, folder=tmp_path, plan=other, run=run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_checkpoint_is_refused(damage, model, texts, tmp_path):
    train(fresh("streams", model), model, texts, folder=tmp_path)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-900] if damage is None else damage)
    with pytest.raises(CheckpointError, match="damaged checkpoint") as caught:
        train(fresh("streams", model), model, texts, folder=tmp_path)
    assert "\n" not in str(caught.value)


def test_the_rate_rises_and_then_falls_to_zero():
    linear = TrainingPlan(steps=100, rate=1.0, decay="linear", warm_up_share=0.1, labels="text")
    cosine = dataclasses.replace(linear, decay="cosine")
    for plan in (linear, cosine):
        rates = [plan.rate_at(step) for step in range(100)]
        assert rates[0] == pytest.approx(0.1)
        assert max(rates) == 1.0
        assert rates[10:] == sorted(rates[10:], reverse=True)
        assert 0 < rates[-1] < 0.02
    assert linear.rate_at(55) == pytest.approx(0.5)
    assert cosine.rate_at(55) == pytest.approx(0.5)
    assert cosine.rate_at(30) > linear.rate_at(30)


class Oracle:
    """Guesses exactly what is right, or what the text says."""

    upper_layers = 0
    feature_layers = ()

    def __init__(self, logits):
        self.logits = logits

    def draft_logits(self, _model, _trunk):
        yield from self.logits

    def early_logits(self, _model, _trunk):
        return None


def test_the_models_own_distribution_further_on_is_what_is_learnt(model, texts):
    ids = texts.token_ids[:3]
    trunk = compute_trunk(model, ids)
    right = [trunk.logits.roll(-ahead, 1) for ahead in (1, 2)]
    early = [trunk.logits.roll(-ahead, 1) for ahead in (0, 1)]
    assert training_loss(Oracle(right), model, trunk=trunk, token_ids=ids, labels="model") < 1e-6
    assert training_loss(Oracle(early), model, trunk=trunk, token_ids=ids, labels="model") > 0.1


def test_the_texts_token_further_on_is_what_is_learnt(model, texts):
    ids = texts.token_ids[:3]
    trunk = compute_trunk(model, ids)
    right, early = (
        [torch.nn.functional.one_hot(ids.roll(-1 - ahead, 1), 40) * 50.0 for ahead in aheads]
        for aheads in ((1, 2), (0, 1))
    )
    assert training_loss(Oracle(right), model, trunk=trunk, token_ids=ids, labels="text") < 1e-6
    assert training_loss(Oracle(early), model, trunk=trunk, token_ids=ids, labels="text") > 0.1


class EarlyOracle(Oracle):
    """Says what it says at its last row from an early exit."""

    def draft_logits(self, _model, _trunk):
        yield from self.logits[:-1]

    def early_logits(self, _model, _trunk):
        return self.logits[-1]


@pytest.mark.parametrize(("wrong", "weight"), [(None, 0), (0, 0.5), (1, 0.25), (2, 0.5)])
def test_an_early_exit_weighs_as_the_first_guess_where_the_model_learns_too(
    wrong, weight, model, texts
):
    ids = texts.token_ids[:3]
    trunk = compute_trunk(model, ids)
    joint = Joint(rank=1, guess_weights=(0.5, 0.25))
    # The guesses for the tokens after the next, then the early exit's for the next.
    logits = [
        torch.nn.functional.one_hot(ids.roll(-1 - ahead, 1), 40) * 50.0 for ahead in (1, 2, 0)
    ]
    alone = float(
        training_loss(
            EarlyOracle(logits), model, trunk=trunk, token_ids=ids, labels="text", joint=joint
        )
    )
    if wrong is not None:
        # As likely as all others: the loss is the logarithm of their number.
        logits[wrong] = torch.zeros_like(logits[wrong])
    loss = float(
        training_loss(
            EarlyOracle(logits), model, trunk=trunk, token_ids=ids, labels="text", joint=joint
        )
    )
    assert loss - alone == pytest.approx(weight * math.log(40), abs=1e-4)
