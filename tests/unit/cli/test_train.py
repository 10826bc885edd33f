"""`paceline train`, from text files to an adapter that loads."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch

from paceline_cli.__main__ import main
from paceline_engine.model_files.files import find_model_files
from paceline_engine.torch_backend.adapters.card import AdapterCard, model_fingerprint
from paceline_engine.torch_backend.adapters.files import load_adapter
from paceline_engine.torch_backend.model_loading import load_model
from paceline_training.objective import Joint
from paceline_training.target_texts import load_texts, split_off
from support.draft_vocabularies import narrowed
from support.tiny_models import tiny_pair

__all__ = ["tiny_pair"]

TEXT = "def draft(prefix):\n    return target(prefix)\n" * 200


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def train(kind, pair, text, out, *more):
    sizes = ("--window", "32", "--batch", "2", "--reach", "2", "--report-steps", "2")
    model = ("--model", str(pair.target), "--data", str(text), "--out", str(out))
    return main(["train", kind, *model, *sizes, "--steps", "4", *more])


@pytest.mark.parametrize("kind", ["medusa", "streams"])
def test_an_adapter_is_made_that_loads_beside_its_model(kind, tiny_pair, text, tmp_path, capsys):
    out = tmp_path / "adapter"
    assert train(kind, tiny_pair, text, out, "--rank", "4") == 0
    files = find_model_files(str(tiny_pair.target))
    model = load_model(files, dtype="float32")
    loaded = load_adapter(out, model=model, fingerprint=model_fingerprint(files))
    assert (loaded.card.kind, loaded.card.reach) == (kind, 2)
    # A quarter of four layers.
    assert loaded.card.layers == (1 if kind == "streams" else 0)
    assert sorted(path.name for path in out.iterdir()) == ["adapter.safetensors", "card.json"]
    facts = json.loads((out / "card.json").read_text())["training"]
    assert facts["steps"] == 4
    assert facts["tokens"] == 4 * 2 * 32
    assert len(facts["hit_rates"]) == 2
    lines = capsys.readouterr().out
    assert "step     4/4" in lines
    assert "hit rates" in lines


def test_texts_in_a_pipe_are_refused_without_waiting(tiny_pair, tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    os.mkfifo(tmp_path / "texts" / "a.safetensors")
    options = ("--texts", str(tmp_path / "texts"), "--out", str(tmp_path / "out"))
    assert main(["train", "eagle", "--model", str(tiny_pair.target), *options]) == 1
    assert "is not a regular file" in capsys.readouterr().err


def test_an_eagle_head_is_made_from_texts_that_the_model_writes_itself(
    tiny_pair, text, tmp_path, capsys
):
    out = tmp_path / "eagle"
    sizes = ("--own-texts", "70", "--draft-vocabulary", "60", "--tree-nodes", "5")
    assert train("eagle", tiny_pair, text, out, *sizes) == 0
    files = find_model_files(str(tiny_pair.target))
    model = load_model(files, dtype="float32")
    loaded = load_adapter(out, model=model, fingerprint=model_fingerprint(files))
    texts = load_texts(out / "texts")
    assert texts.shape == (70, 32)
    chosen = loaded.module.draft_token_ids.tolist()
    assert chosen == sorted({*chosen})
    assert len(chosen) == 60
    learnt, held_out = split_off(texts, count=3)
    assert [len(learnt), len(held_out)] == [67, 3]
    counts = learnt.flatten().bincount(minlength=320)
    assert counts[chosen].sum() == counts.topk(60).values.sum()
    assert loaded.card.tree == ((0,), (0, 0))
    assert loaded.card.training["optimizer"] == "muon"
    # Texts that are there are learnt from, with another seed, and by another folder's name.
    made = sorted(path.name for path in (out / "texts").iterdir())
    assert made == ["texts-00000.safetensors", "texts-00001.safetensors"]
    again = tmp_path / "again"
    more = ("--texts", str(out / "texts"), "--draft-vocabulary", "60", "--batch", "2")
    model_at = ("--model", str(tiny_pair.target), "--out", str(again), "--reach", "2")
    assert main(["train", "eagle", *model_at, *more, "--steps", "4"]) == 0
    assert AdapterCard.read(again).weights_sha256 == loaded.card.weights_sha256
    (again / "odd").mkdir()
    capsys.readouterr()
    assert main(["train", "eagle", *model_at, "--texts", str(again / "odd")]) == 1
    assert "no .safetensors file with texts" in capsys.readouterr().err
    # What is to be adopted is a head.
    other = tmp_path / "medusa"
    assert train("medusa", tiny_pair, text, other) == 0
    adopting = ("--data", str(text), "--adopt", str(other))
    assert main(["train", "eagle", *model_at, *adopting]) == 1
    assert "is no EAGLE head" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_file_and_another_one_another(tiny_pair, text, tmp_path):
    digests = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert train("streams", tiny_pair, text, tmp_path / name, "--seed", seed) == 0
        digests.append(AdapterCard.read(tmp_path / name).weights_sha256)
    assert digests[0] == digests[1] != digests[2]


def weights(folder, pair):
    files = find_model_files(str(pair.target))
    model = load_model(files, dtype="float32")
    return load_adapter(folder, model=model, fingerprint=model_fingerprint(files)).module


def test_training_goes_on_from_another_adapters_weights(tiny_pair, text, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert train("streams", tiny_pair, text, first, "--rate", "1e-2") == 0
    more = ("--go-on-from", str(first), "--rate", "1e-9")
    assert train("streams", tiny_pair, text, second, *more) == 0
    before, after = (weights(folder, tiny_pair).state_dict() for folder in (first, second))
    torch.testing.assert_close(before, after)
    card = json.loads((first / "card.json").read_text())
    assert json.loads((second / "card.json").read_text())["training"]["earlier"] == {
        "weights_sha256": card["weights_sha256"],
        "training": card["training"],
    }


@pytest.mark.parametrize(
    ("kind", "more", "complaint"),
    [
        ("medusa", (), "has kind streams, and what is to be trained medusa"),
        ("streams", ("--rank", "4"), "has rank 32, and what is to be trained 4"),
    ],
)
def test_training_goes_on_from_nothing_else(
    kind, more, complaint, tiny_pair, text, tmp_path, capsys
):
    first = tmp_path / "first"
    assert train("streams", tiny_pair, text, first) == 0
    assert train(kind, tiny_pair, text, tmp_path / "b", "--go-on-from", str(first), *more) == 1
    assert complaint in capsys.readouterr().err


def test_a_drafter_that_scores_some_tokens_gets_no_adapter(tiny_pair, text, tmp_path, capsys):
    narrow = narrowed(tiny_pair.target, tmp_path / "narrow", token_ids=range(100))
    pair = SimpleNamespace(target=narrow)
    assert train("medusa", pair, text, tmp_path / "adapter") == 1
    assert "drafts for another model" in capsys.readouterr().err
    assert not (tmp_path / "adapter").exists()


# What comes of it: tests/unit/training/test_fine_tuning.py.
@pytest.mark.parametrize(
    ("kind", "joint"),
    [
        ("medusa", Joint(rank=32, guess_weights=(0.2, 0.2 * 0.8), adapter_rate=4, alone_share=0.5)),
        ("streams", Joint(rank=32, guess_weights=(0.1, 0.1))),
    ],
)
def test_a_model_is_fine_tuned_as_the_papers_have_it(
    kind, joint, tiny_pair, text, tmp_path, monkeypatch
):
    asked = {}
    monkeypatch.setattr(
        "paceline_training.run.run_training",
        lambda _files, **named: asked.update(named) or SimpleNamespace(kind="", model="", reach=2),
    )
    model = tmp_path / "tuned"
    assert train(kind, tiny_pair, text, tmp_path / "out", "--fine-tune", str(model)) == 0
    plan = asked["plan"]
    assert (plan.joint, plan.labels, plan.rate) == (joint, "text", 5e-4)
    assert asked["fine_tuned"] == model
    assert asked["sizes"].rank == 0
    assert train(kind, tiny_pair, text, tmp_path / "out") == 0
    plan = asked["plan"]
    assert (plan.joint, plan.labels, asked["fine_tuned"]) == (None, "model", None)
    assert plan.optimizer == "adamw", "as in the papers"
    assert asked["sizes"].rank == (32 if kind == "streams" else 0)


def test_a_model_that_is_there_is_not_written_over(tiny_pair, text, tmp_path, capsys):
    model = str(tiny_pair.target)
    assert train("streams", tiny_pair, text, tmp_path / "out", "--fine-tune", model) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "--fine-tune" in lines[0]
    assert "exists already" in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "say which: paceline train streams, medusa, or eagle"),
        (["medusa", "--model", "m", "--texts", "t", "--out", "o"], "are for paceline train eagle"),
        (
            ["streams", "--model", "m", "--data", "d", "--out", "o", "--adopt", "h"],
            "are for paceline train eagle",
        ),
        (
            ["eagle", "--model", "m", "--texts", "t", "--data", "d", "--out", "o"],
            "--texts stands instead of --data",
        ),
        (
            ["eagle", "--model", "m", "--data", "d", "--out", "o", "--fine-tune", "t"],
            "learns the model's own distribution",
        ),
        (["oracle"], "KIND: "),
        (["streams"], "--model, --data and --out are needed"),
        (["streams", "--model", "m", "--data", "d", "--out", "o", "--reach", "17"], "--reach: "),
        (
            [
                *("medusa", "--model", "m", "--data", "d", "--out", "o"),
                *("--fine-tune", "t", "--optimizer", "muon"),
            ],
            "low-rank weights learn with adamw alone",
        ),
        (
            ["medusa", "--model", "m", "--data", "d", "--out", "t/a", "--fine-tune", "t"],
            "--out must be a folder outside of --fine-tune",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_said_in_one_line(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", *arguments])
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert complaint in lines[0]


def test_too_little_text_is_said_in_one_line(tiny_pair, tmp_path, capsys):
    path = tmp_path / "short.txt"
    path.write_text("def draft")
    assert train("streams", tiny_pair, path, tmp_path / "out") == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("paceline train: the text has ")


def test_a_model_that_is_not_there_is_said_in_one_line(text, tmp_path, capsys):
    arguments = ["--model", str(tmp_path / "none"), "--data", str(text), "--out", str(tmp_path)]
    assert main(["train", "medusa", *arguments]) == 1
    assert "there is no such directory" in capsys.readouterr().err


def test_a_text_that_is_no_text_is_said_in_one_line(tiny_pair, tmp_path, capsys):
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    assert train("streams", tiny_pair, path, tmp_path / "out") == 1
    assert "is no UTF-8 text" in capsys.readouterr().err
