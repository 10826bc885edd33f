"""The bundled models are what their card says, and their training script does what it claims."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from card import replace_adapters, replace_tables
from corpus import is_held_out
from growth import build_model, grow
from paceline_engine.model_files.files import find_model_files
from paceline_engine.torch_backend.adapters.card import model_fingerprint
from paceline_engine.torch_backend.adapters.files import load_adapter
from paceline_engine.torch_backend.model_loading import load_model

MODELS = Path(__file__).parents[3] / "models"
ADAPTERS = sorted(MODELS.glob("python-target-*"))
SIZE_LIMIT_BYTES = 25_000_000
SIZE_LIMIT_WITH_ADAPTERS_BYTES = 35_000_000
SIZE_LIMIT_OF_DRAFTER_BYTES = 15_000_000


@pytest.fixture(scope="module")
def training():
    return json.loads((MODELS / "training.json").read_text())


def test_the_cards_tables_are_those_of_its_measurements():
    text = (MODELS / "README.md").read_text()
    assert replace_tables(text, json.loads((MODELS / "card.json").read_text())) == text


def test_the_adapters_table_is_that_of_their_cards():
    text = (MODELS / "README.md").read_text()
    assert replace_adapters(text, MODELS) == text


def stored_bytes(folders):
    return sum(path.stat().st_size for path in MODELS.glob(f"{folders}/*.safetensors"))


def test_the_adapters_are_for_the_bundled_target():
    files = find_model_files(str(MODELS / "python-target"))
    model = load_model(files, dtype="float32")
    for folder in ADAPTERS:
        load_adapter(folder, model=model, fingerprint=model_fingerprint(files))
    assert stored_bytes("python-*") < SIZE_LIMIT_WITH_ADAPTERS_BYTES


def test_the_drafter_for_a_fetched_target_has_its_own_weights_alone():
    assert stored_bytes("smollm2-drafter") < SIZE_LIMIT_OF_DRAFTER_BYTES


def test_what_was_held_out_is_what_the_rule_holds_out(training):
    assert training["held_out_files"]
    assert all(map(is_held_out, training["held_out_files"]))


def test_prompts_are_of_the_promised_length_and_from_held_out_files(training):
    tokenizer = Tokenizer.from_file(str(MODELS / "python-target" / "tokenizer.json"))
    lines = (MODELS / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line) for line in lines]
    assert len(prompts) >= 100
    assert {prompt["file"] for prompt in prompts} <= set(training["held_out_files"])
    assert all(60 <= len(tokenizer.encode(prompt["text"]).ids) <= 200 for prompt in prompts)


def test_the_models_share_a_tokenizer_and_are_small():
    folders = [MODELS / name for name in ("python-target", "python-drafter", "python-tiny")]
    assert len({(folder / "tokenizer.json").read_bytes() for folder in folders}) == 1
    weights = [folder / "model.safetensors" for folder in folders]
    sizes = [path.stat().st_size for path in weights]
    assert sum(sizes) < SIZE_LIMIT_BYTES
    assert sizes[2] < sizes[1] / 3


def test_each_model_is_what_its_last_stage_trained(training):
    last = {stage["name"]: stage for stage in training["stages"]}
    for name in ("target", "drafter", "tiny"):
        config = json.loads((MODELS / f"python-{name}" / "config.json").read_text())
        shape = (config["num_hidden_layers"], config["hidden_size"])
        assert shape == (last[name]["layers"], last[name]["width"])


def test_growing_a_model_changes_no_logit():
    torch.manual_seed(0)
    small = build_model(layers=2)
    large = grow(small, layers=6, seed=0)
    token_ids = torch.arange(40).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(small(token_ids).logits, large(token_ids).logits)


def test_a_grown_models_copies_have_weights_of_the_same_size():
    torch.manual_seed(0)
    small = build_model(layers=1)
    first, second = grow(small, layers=2, seed=0).model.layers
    before = first.state_dict()
    for name, weight in second.state_dict().items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert not weight.any()
        elif weight.dim() > 1:
            assert not torch.equal(weight, before[name])
            assert float(weight.std() / before[name].std()) == pytest.approx(1, abs=0.02)
        else:
            assert torch.equal(weight, before[name])
