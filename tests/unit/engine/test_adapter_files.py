"""Adapters that are damaged, for another model, or of another version are refused in one line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import save
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from paceline_engine.model_files.files import find_model_files
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.rank_paths import cartesian_tree
from paceline_engine.torch_backend.adapters.card import AdapterCard, model_fingerprint
from paceline_engine.torch_backend.adapters.files import build_adapter, load_adapter, pack_weights
from paceline_engine.torch_backend.adapters.trunk import compute_trunk
from support.tiny_adapters import random_adapter, tiny_model

FINGERPRINT = "0123456789abcdef" * 4
TEXT = torch.randint(40, (1, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


def write(directory, adapter, *, kind="streams", packed=None):
    own, _ = pack_weights(adapter, dtype=torch.float32)
    packed = own if packed is None else packed
    (directory / "adapter.safetensors").write_bytes(packed)
    card = AdapterCard(
        kind=kind,
        model="tiny",
        fingerprint=FINGERPRINT,
        reach=adapter.reach,
        layers=adapter.upper_layers,
        rank=4,
        exit_rank=2,
        tree=cartesian_tree((2, 1)) if kind == "streams" else ((0,), (0, 0)),
        eagle=adapter.shape if kind == "eagle" else None,
        weights_sha256=hashlib.sha256(packed).hexdigest(),
        training={"steps": 3},
    )
    card.write(directory)
    return card


def refusal(directory, model, fingerprint=FINGERPRINT):
    with pytest.raises(ModelLoadError) as caught:
        load_adapter(directory, model=model, fingerprint=fingerprint)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["medusa", "streams", "eagle"])
def test_what_was_written_is_read_again(kind, model, tmp_path):
    adapter = random_adapter(kind, model)
    card = write(tmp_path, adapter, kind=kind)
    loaded = load_adapter(tmp_path, model=model, fingerprint=FINGERPRINT)
    assert loaded.card == card
    trunk = compute_trunk(
        model,
        TEXT,
        upper_layers=adapter.upper_layers,
        feature_layers=adapter.feature_layers,
    )
    before, after = (list(each.draft_logits(model, trunk)) for each in (adapter, loaded.module))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_it_computes_in_its_models_dtype(tmp_path, model):
    write(tmp_path, random_adapter("streams", model))
    other = tiny_model(dtype=torch.bfloat16)
    loaded = load_adapter(tmp_path, model=other, fingerprint=FINGERPRINT)
    assert {each.dtype for each in loaded.module.parameters()} == {torch.bfloat16}


def test_another_model_is_refused(tmp_path, model):
    write(tmp_path, random_adapter("streams", model))
    message = refusal(tmp_path, model, fingerprint="f" * 64)
    assert "'tiny'" in message
    assert "0123456789ab" in message
    assert "ffffffffffff" in message
    assert "a model that was only saved anew needs the config.json with which" in message


def test_a_fingerprint_is_the_models_whatever_it_is_computed_in(tiny_pair):
    files = find_model_files(str(tiny_pair.target))
    other = find_model_files(str(tiny_pair.drafter))
    assert model_fingerprint(files) == model_fingerprint(find_model_files(str(tiny_pair.target)))
    assert model_fingerprint(files) != model_fingerprint(other)


def test_damaged_weights_are_refused(tmp_path, model):
    write(tmp_path, random_adapter("streams", model))
    path = tmp_path / "adapter.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert "damaged" in refusal(tmp_path, model)


@pytest.mark.parametrize("name", ["adapter.safetensors", "card.json"])
def test_a_git_lfs_pointer_in_the_place_of_a_file_is_named_as_such(tmp_path, model, name):
    write(tmp_path, random_adapter("streams", model))
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert f"{name} is a Git LFS pointer" in refusal(tmp_path, model)


def test_weights_that_are_cut_short_are_refused(tmp_path, model):
    adapter = random_adapter("streams", model)
    packed, _ = pack_weights(adapter, dtype=torch.float32)
    write(tmp_path, adapter, packed=packed[:-8])
    assert "cannot be loaded" in refusal(tmp_path, model)


def test_weights_of_other_sizes_than_the_cards_are_refused(tmp_path, model):
    other, _ = pack_weights(random_adapter("streams", model, reach=2), dtype=torch.float32)
    write(tmp_path, random_adapter("streams", model), packed=other)
    assert "cannot be loaded" in refusal(tmp_path, model)


def test_weights_that_are_no_numbers_are_refused(tmp_path, model):
    adapter = random_adapter("streams", model)
    state = adapter.state_dict()
    state["embeddings"][0, 0] = float("nan")
    write(tmp_path, adapter, packed=save(state))
    assert "embeddings has weights that are no numbers" in refusal(tmp_path, model)


def test_missing_weights_are_refused(tmp_path, model):
    write(tmp_path, random_adapter("streams", model))
    (tmp_path / "adapter.safetensors").unlink()
    assert "adapter.safetensors is not readable" in refusal(tmp_path, model)


def test_a_directory_without_a_card_is_refused(tmp_path, model):
    assert "no readable card" in refusal(tmp_path, model)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format_version": 2}, "format_version 2; this program reads 1"),
        ({"kind": "oracle"}, "kind 'oracle' is none of medusa, streams"),
        ({"reach": 0}, r"reach 0 is not in [1, 16]"),
        ({"reach": True}, "reach True is not in"),
        ({"layers": 9}, "9 upper layers of a model with 4"),
        ({"layers": -1}, "layers -1 is not in"),
        ({"fingerprint": 7}, "fingerprint 7 is no text"),
        ({"tree": [[0, 0]]}, "stands before its parent"),
        ({"tree": [[0, 0.5]]}, "a path is a list of ranks"),
        ({"tree": "all"}, "tree is not a list"),
        ({"tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, "not up to 3 ranks"),
        ({"mood": "good"}, "unknown key 'mood'"),
        ({"rank": None}, "rank None"),
    ],
)
def test_a_card_that_says_nonsense_is_refused(change, complaint, tmp_path, model):
    write(tmp_path, random_adapter("streams", model))
    path = tmp_path / "card.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert complaint in refusal(tmp_path, model)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"feature_layers": [3, 2, 1]}, "feature_layers"),
        ({"feature_layers": [1, 2, 4]}, "reads what enters layer 4, and the model has 4"),
        ({"draft_vocabulary": 41}, "guesses 41 tokens, and the model has 40"),
        ({"heads": 3}, "no multiple"),
        ({"inner_width": 0}, "inner_width 0"),
        ({"inner_width": 1 << 19}, "of another shape than its card says"),
        ({"own_head": 1}, "own_head 1"),
        ({"own_head": True}, "lacks lm_head.weight"),
        ({"activation": "magic"}, "magic"),
        ({"epsilon": 2.0}, "epsilon"),
        ({"rope": {"rope_theta": 0}}, "rope_theta"),
        ({"rope": {"rope_type": "dynamic"}}, "dynamic"),
        ({"rope": {"mood": 1}}, "mood"),
        ({"mood": 1}, "unknown key 'mood'"),
        ({"feature_norms": "all"}, "feature_norms 'all'"),
    ],
)
def test_a_heads_card_that_says_nonsense_is_refused(change, complaint, tmp_path, model):
    write(tmp_path, random_adapter("eagle", model), kind="eagle")
    path = tmp_path / "card.json"
    card = json.loads(path.read_text())
    path.write_text(json.dumps(card | {"eagle": card["eagle"] | change}))
    assert complaint in refusal(tmp_path, model)


@pytest.mark.parametrize("key", [x.name for x in dataclasses.fields(AdapterCard)])
def test_a_card_without_one_of_its_facts_is_refused(key, tmp_path, model):
    kind = "eagle" if key == "eagle" else "streams"
    write(tmp_path, random_adapter(kind, model), kind=kind)
    path = tmp_path / "card.json"
    card = json.loads(path.read_text())
    del card[key]
    path.write_text(json.dumps(card))
    assert key in refusal(tmp_path, model)


@pytest.mark.parametrize("text", ["", "[]", "{", '"card"', "\x00"])
def test_a_card_that_is_no_card_is_refused(text, tmp_path, model):
    write(tmp_path, random_adapter("streams", model))
    (tmp_path / "card.json").write_text(text)
    assert "card" in refusal(tmp_path, model)


def test_a_model_of_another_family_is_refused():
    config = GPTNeoXConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    with pytest.raises(ModelLoadError, match="GPTNeoXForCausalLM is not of the families"):
        build_adapter("medusa", GPTNeoXForCausalLM(config), reach=2, layers=0, rank=0, exit_rank=0)


@pytest.mark.parametrize("name", ["adapter.safetensors", "card.json"])
@pytest.mark.parametrize("made", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_refused_at_once(tmp_path, model, name, made):
    write(tmp_path, random_adapter("streams", model))
    (tmp_path / name).unlink()
    made(tmp_path / name)
    assert f"{name}: is not a regular file" in refusal(tmp_path, model)


def test_more_weights_than_the_card_says_are_refused_unread(tmp_path, model):
    write(tmp_path, random_adapter("streams", model))
    with (tmp_path / "adapter.safetensors").open("ab") as file:
        file.truncate(1 << 40)
    assert "adapter.safetensors: has more than" in refusal(tmp_path, model)


def test_weights_under_foreign_names_take_one_line_with_a_count(tmp_path, model):
    adapter = random_adapter("streams", model)
    state = adapter.state_dict() | {f"z.{each:04}": torch.zeros(0) for each in range(2000)}
    write(tmp_path, adapter, packed=save(state))
    message = refusal(tmp_path, model)
    assert "it has foreign z.0000, z.0001, z.0002 and 1997 more" in message
    assert "\n" not in message
    write(tmp_path, adapter, packed=save({"z": torch.zeros(1)}))
    assert "it lacks " in refusal(tmp_path, model)
