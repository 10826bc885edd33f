"""A model that learns together with its adapter: what it learns, and what it then decodes."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaForCausalLM

from paceline_cli.__main__ import main
from paceline_contract.proposal import Proposal
from paceline_contract.sampling import SamplingParameters
from paceline_engine.model_files.files import find_model_files
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.torch_backend.adapters.card import AdapterCard, model_fingerprint
from paceline_engine.torch_backend.adapters.files import build_adapter
from paceline_engine.torch_backend.adapters.trunk import compute_trunk
from paceline_engine.torch_backend.model_loading import load_model
from paceline_engine.torch_backend.transformers import TransformersBackend
from paceline_training.continuations import Continuations, continue_greedily
from paceline_training.fine_tuning import FineTuning, check_names, write_fine_tuned
from paceline_training.hit_rates import guess_ranks, hit_rates
from paceline_training.objective import Joint
from paceline_training.training import CheckpointError, TrainingPlan, train_adapter
from paceline_training.windows import TextWindows
from support.gguf_files import GgufParts, write_gguf
from support.tiny_adapters import random_adapter, tiny_model
from support.tiny_models import tiny_pair
from unit.engine.conftest import continuation

__all__ = ["tiny_pair"]

KINDS = ("medusa", "streams")
REACH = 2
PROMPT = [5, 6, 7, 8, 9, 10]
PLAN = TrainingPlan(
    steps=8,
    rate=1e-2,
    decay="linear",
    warm_up_share=0.0,
    labels="text",
    joint=Joint(rank=4, guess_weights=(0.1, 0.1)),
    checkpoint_steps=3,
)
# A text that goes in circles.
TEXT = (torch.arange(3000) % 5) * 7


def joint(**options):
    return dataclasses.replace(PLAN, joint=dataclasses.replace(PLAN.joint, **options))


class Learner:
    """A tiny model, its adapter, and what it learns."""

    def __init__(self, kind="streams", *, dtype=torch.float32, plan=PLAN):
        torch.set_num_threads(1)
        self.model = tiny_model(dtype=dtype)
        self.base = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(1)
        # Streams have nothing of their own but their embeddings: they share what the model learns.
        self.adapter = build_adapter(
            kind, self.model, reach=REACH, layers=2, rank=0, exit_rank=2
        ).to(dtype)
        self.adapter.start_from(self.model, generator=generator)
        self.tuning = FineTuning(self.model, rank=plan.joint.rank).to(dtype)
        self.tuning.start_from(generator)
        self.tuning.attach(self.model)
        self.plan = plan

    def train(self, folder, *, plan=None, report=lambda _: None):
        train_adapter(
            self.adapter,
            self.model,
            plan=plan or self.plan,
            windows=TextWindows([TEXT], length=24, batch=4, seed=1),
            run={"seed": 1},
            checkpoint=folder / "checkpoint.pt",
            report=report,
            tuning=self.tuning,
        )
        return self

    def merged(self):
        """The model as it was, with what it learnt in its weights."""
        state = self.base.state_dict()
        for name, change in self.tuning.changes().items():
            state[name] += change
        return self.base

    def weights(self):
        return [*self.adapter.state_dict().values(), *self.tuning.state_dict().values()]


def same(one, other):
    pairs = zip(one.weights(), other.weights(), strict=True)
    return all(torch.equal(mine, yours) for mine, yours in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_learns_the_text_and_guesses_learn_the_model(kind, tmp_path):
    plan = dataclasses.replace(joint(guess_weights=(0.5, 0.5)), steps=40, rate=2e-2)
    learner = Learner(kind, plan=dataclasses.replace(plan, warm_up_share=0.1, report_steps=20))
    texts = Continuations(TEXT[1000:1100].view(4, 25), 5)

    def rates():
        ranks = guess_ranks(learner.adapter, learner.model, texts)
        return [each[0] for each in hit_rates(ranks, most=1)]

    before, losses = rates(), []
    learner.train(tmp_path, report=lambda progress: losses.append(progress.loss))
    assert losses[1] < losses[0] / 2
    assert max(before) < 0.5
    assert min(rates()) > 0.9
    # What it goes on with is the text.
    own = continue_greedily(learner.model, texts.token_ids[:, :10], length=15)
    assert torch.equal(own.token_ids, texts.token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_with_guesses_that_weigh_nothing_the_model_learns_as_by_itself(kind, tmp_path):
    """Plain LoRA training, written down once more: weights are merged before each step."""
    plan = dataclasses.replace(joint(guess_weights=(0.0, 0.0)), steps=4)
    learner = Learner(kind, dtype=torch.float64, plan=plan)
    start = copy.deepcopy(learner.tuning)
    guesses = copy.deepcopy(learner.adapter.state_dict())
    learner.train(tmp_path)
    assert all(
        torch.equal(guesses[key], each) for key, each in learner.adapter.state_dict().items()
    )
    optimizer = torch.optim.AdamW(start.parameters(), weight_decay=0.0)
    windows = TextWindows([TEXT], length=24, batch=4, seed=1)
    for step in range(plan.steps):
        state = dict(learner.base.state_dict())
        for name, part in zip(start.names, start.parts, strict=True):
            state[name] = state[name] + 16 / 4 * part.up @ part.down
        ids = windows.at(step)
        logits = torch.func.functional_call(learner.base, state, (ids,)).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(start.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = plan.rate_at(step)
        optimizer.step()
    for own, other in zip(learner.tuning.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-4)


def test_guesses_teach_the_model_too_and_the_early_exit_does_not(tmp_path):
    weightless, alike = (
        Learner(dtype=torch.float64, plan=joint(guess_weights=(weight, 0.0))).train(tmp_path / name)
        for name, weight in (("none", 0.0), ("some", 0.5))
    )
    assert not torch.allclose(weightless.tuning.parts[0].up, alike.tuning.parts[0].up)
    model, adapter = Learner().model, random_adapter("streams", tiny_model(dtype=torch.float32))
    trunk = compute_trunk(model, TEXT[None, :9], upper_layers=2, learns=True)
    assert trunk.entering.requires_grad
    assert not adapter.early_logits(model, trunk).requires_grad


def test_streams_have_what_the_model_learns(tmp_path):
    learner = Learner(dtype=torch.float64).train(tmp_path)
    ids = TEXT[None, :12]
    merged = learner.merged()
    for model in (learner.model, merged):
        model.found = compute_trunk(model, ids, upper_layers=2)
        model.guesses = list(learner.adapter.draft_logits(model, model.found))
    close = {"rtol": 0, "atol": 1e-10}
    torch.testing.assert_close(learner.model.found.logits, merged.found.logits, **close)
    torch.testing.assert_close(learner.model.guesses, merged.guesses, **close)


def test_at_first_heads_learn_alone_and_each_stage_has_its_schedule(tmp_path):
    plan = joint(alone_share=0.5, adapter_rate=4.0)
    stage = [1e-2, 1e-2, 1e-2 * 2 / 3, 1e-2 / 3]
    assert [plan.rate_at(step) for step in range(8)] == pytest.approx(stage * 2)
    learner = Learner("medusa", plan=plan)
    start = copy.deepcopy(learner.tuning.state_dict())
    rose = []

    def look(progress):
        state = learner.tuning.state_dict()
        rose.append(any(not torch.equal(start[key], each) for key, each in state.items()))

    every = dataclasses.replace(plan, report_steps=1)
    learner.train(tmp_path, plan=every, report=look)
    assert rose == [False] * 4 + [True] * 4


def test_heads_learn_faster_than_the_model_by_the_plans_factor(tmp_path):
    steps = []
    for factor in (1.0, 4.0):
        learner = Learner("medusa", plan=joint(adapter_rate=factor))
        before = learner.adapter.biases.detach().clone()
        learner.train(tmp_path / str(factor), plan=dataclasses.replace(learner.plan, steps=1))
        steps.append((learner.adapter.biases - before).detach())
    # The first step of Adam is as long as the rate, whatever the gradient.
    torch.testing.assert_close(steps[1], 4 * steps[0], rtol=1e-3, atol=1e-6)


class KilledError(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(kind, tmp_path):
    plan = dataclasses.replace(joint(alone_share=0.5), report_steps=1)
    whole = Learner(kind, plan=plan).train(tmp_path / "whole")

    def kill(progress):
        if progress.step == 7:  # the last checkpoint has weights of both stages
            raise KilledError

    with pytest.raises(KilledError):
        Learner(kind, plan=plan).train(tmp_path, report=kill)
    resumed = Learner(kind, plan=plan).train(tmp_path)
    assert same(resumed, whole)
    assert not same(resumed, Learner(kind, plan=plan))
    with pytest.raises(CheckpointError, match="joint was"):
        Learner(kind, plan=PLAN).train(tmp_path)


@pytest.fixture(scope="module")
def base(tiny_pair):
    return find_model_files(str(tiny_pair.target))


def learnt(files):
    """What a model may have learnt."""
    tuning = FineTuning(load_model(files, dtype="float32"), rank=2)
    for part in tuning.parts:
        part.down.data.normal_(generator=torch.Generator().manual_seed(1))
        part.up.data.fill_(0.01)
    return tuning


def test_what_is_written_is_the_model_with_other_weights_in_its_own_dtype(base, tmp_path):
    before = load_file(base.weights[0])
    short = tmp_path / "short"
    short.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (short / name).write_bytes((base.directory / name).read_bytes())
    (short / "chat_template.jinja").write_text("{{ messages }}")
    keys = sorted(before)
    parts = {"a": keys[::2], "b": keys[1::2]}
    for part, names in parts.items():
        tensors = {name: before[name].to(torch.bfloat16) for name in names}
        save_file(tensors, short / f"model-{part}.safetensors")
    placed = {name: f"model-{part}.safetensors" for part in parts for name in parts[part]}
    (short / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    files = find_model_files(str(short))
    tuning = learnt(base)
    written = write_fine_tuned(files, tuning, tmp_path / "deep" / "tuned")
    assert written.name == "tuned"
    assert {path.name for path in written.directory.iterdir()} == {
        path.name for path in short.iterdir()
    }
    assert written.tokenizer == files.tokenizer
    assert model_fingerprint(written) != model_fingerprint(files)
    changes = tuning.changes()
    for path in files.weights:
        after = load_file(written.directory / path.name)
        for name, tensor in load_file(path).items():
            assert after[name].dtype == torch.bfloat16
            wanted = tensor + changes[name] if name in changes else tensor
            assert torch.equal(after[name], wanted.bfloat16())
    assert list((tmp_path / "deep").iterdir()) == [written.directory]


def test_weights_under_other_names_are_refused_before_anything_is_learnt(base, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (other / name).write_bytes((base.directory / name).read_bytes())
    tensors = load_file(base.weights[0])
    save_file({f"x.{name}": each for name, each in tensors.items()}, other / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"its files have no model\.layers\.0") as caught:
        check_names(find_model_files(str(other)), learnt(base))
    assert "\n" not in str(caught.value)


def test_a_gguf_file_is_refused_before_anything_is_learnt(base, tmp_path):
    model = LlamaForCausalLM.from_pretrained(base.directory)
    tokenizer = Tokenizer.from_file(str(base.directory / "tokenizer.json"))
    path = write_gguf(tmp_path / "model.gguf", model, tokenizer, GgufParts())
    with pytest.raises(ModelLoadError, match="its weights are in a GGUF file"):
        check_names(find_model_files(str(path)), learnt(base))


@pytest.fixture(scope="module", params=KINDS)
def tuned(request, base, tmp_path_factory):
    """A tiny model that was fine-tuned with its adapter, by the command."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "text").write_text("def draft(prefix):\n    return target(prefix)\n" * 200)
    paths = {"model": base.directory, "data": folder / "text"}
    paths |= {"fine-tune": folder / "model", "out": folder / "adapter"}
    sizes = {"reach": REACH, "rank": 4, "window": 24, "batch": 2, "steps": 20, "rate": 1e-2}
    options = [f"--{name}={value}" for name, value in (paths | sizes).items()]
    assert main(["train", request.param, *options]) == 0
    return folder


def test_the_card_is_the_fine_tuned_models_and_says_where_that_comes_from(tuned, base):
    files = find_model_files(str(tuned / "model"))
    card = AdapterCard.read(tuned / "adapter")
    assert (card.model, card.fingerprint) == ("model", model_fingerprint(files))
    assert card.rank == 0
    facts = json.loads((tuned / "adapter" / "card.json").read_text())["training"]
    assert facts["base"]["model"] == base.name
    assert facts["base"]["fingerprint"] == model_fingerprint(base)
    assert facts["text_loss"] < facts["base"]["text_loss"]
    assert facts["joint"]["rank"] == 4
    assert sorted(path.name for path in tuned.iterdir()) == ["adapter", "model", "text"]
    files = sorted(path.name for path in (tuned / "adapter").iterdir())
    assert files == ["adapter.safetensors", "card.json"]


def test_what_is_served_is_the_fine_tuned_models_own_text(tuned):
    plain = TransformersBackend(str(tuned / "model"), dtype="float32")
    served = TransformersBackend(
        str(tuned / "model"), adapter=str(tuned / "adapter"), dtype="float32", prune_below=0.01
    )
    for spec in (SessionSpec(200), SessionSpec(200, SamplingParameters(0.8), seed=3)):
        text, decoding = list(PROMPT), ModelText(served, spec)
        proposal, forwards = Proposal(), 0
        while len(text) < 40:
            judged = decoding.judge(
                text, proposal.token_ids, parents=proposal.parents, propose=True
            )
            text += [*proposal.along(judged.accepted_path), judged.next_token]
            proposal, forwards = judged.proposal, forwards + 1
        assert text[len(PROMPT) :] == continuation(
            ModelText(plain, spec), PROMPT, len(text) - len(PROMPT)
        )
        assert forwards < len(text) - len(PROMPT), "some guesses are right"


def test_beside_the_model_that_it_comes_from_it_is_refused(tuned, base):
    with pytest.raises(ModelLoadError, match="is for a model 'model' with fingerprint"):
        TransformersBackend(str(base.directory), adapter=str(tuned / "adapter"))


def test_streams_of_a_fine_tuned_model_take_as_few_weights_as_the_paper_says():
    width = 32
    model = tiny_model(hidden_size=width)
    streams = build_adapter("streams", model, reach=4, layers=2, rank=0, exit_rank=8).double()
    assert sum(each.numel() for each in streams.parameters()) == 20 * width
    trunk = compute_trunk(model, TEXT[None, :5], upper_layers=2)
    assert len(list(streams.draft_logits(model, trunk))) == 4
