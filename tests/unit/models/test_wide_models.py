"""A wider target says what the bundled one says, and so do its adapters."""

import json
from pathlib import Path

import pytest
import torch

import widen
from growth import build_model
from paceline_engine.model_files.files import find_model_files
from paceline_engine.torch_backend.adapters.card import model_fingerprint
from paceline_engine.torch_backend.adapters.files import load_adapter
from paceline_engine.torch_backend.adapters.trunk import compute_trunk
from paceline_engine.torch_backend.model_loading import load_model
from paceline_local.bundled import find_models

MODELS = Path(__file__).parents[3] / "models"
TOKENS = torch.arange(100, 140)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide")
    widen.main(["--output", str(path)])
    return path


@pytest.fixture(scope="module")
def loaded(folder):
    """Both targets, with their fingerprints."""
    both = [find_model_files(str(each / "python-target")) for each in (MODELS, folder)]
    return [(load_model(files, dtype="float32"), model_fingerprint(files)) for files in both]


@pytest.mark.parametrize("factor", [4, 16])
def test_a_wider_model_says_the_same(factor):
    torch.manual_seed(0)
    narrow = build_model(layers=2, width=24)
    for name, weight in narrow.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(weight)
    wide = widen._widen(narrow, factor=factor)
    assert wide.config.hidden_size == factor * 24
    with torch.inference_mode():
        torch.testing.assert_close(wide(TOKENS).logits, narrow(TOKENS).logits)


@pytest.mark.long
def test_it_has_fifteen_times_the_weights_and_the_same_logits(loaded):
    (narrow, _), (wide, _) = loaded
    assert wide.num_parameters() > 15 * narrow.num_parameters()
    with torch.inference_mode():
        logits = [model(TOKENS).logits for model in (narrow, wide)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["medusa", "streams"])
def test_its_adapters_guess_what_the_bundled_ones_guess(loaded, folder, kind):
    guesses = []
    for models, (model, fingerprint) in zip((MODELS, folder), loaded, strict=True):
        directory = models / f"python-target-{kind}"
        adapter = load_adapter(directory, model=model, fingerprint=fingerprint).module
        with torch.inference_mode():
            trunk = compute_trunk(model, TOKENS, upper_layers=adapter.upper_layers)
            guesses.append(torch.stack([*adapter.draft_logits(model, trunk)]))
    torch.testing.assert_close(*guesses, rtol=1e-4, atol=1e-4)


def test_a_run_that_is_broken_off_leaves_nothing_that_counts_as_whole(tmp_path, monkeypatch):
    def breaks_off(_model, *, factor):
        raise KeyboardInterrupt

    (tmp_path / "prompts.jsonl").write_text("of the run before")
    monkeypatch.setattr(widen, "_widen", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        widen.main(["--output", str(tmp_path)])
    assert not (tmp_path / "prompts.jsonl").exists()
    assert not [*(tmp_path / "python-target").glob("*.safetensors")]


@pytest.mark.long
def test_the_folder_stands_for_the_bundled_models(folder):
    models = find_models(folder)
    assert models.tiny.is_dir()
    for each in (models.target, models.drafter, models.tiny):
        tokenizer = (each / "tokenizer.json").read_bytes()
        assert tokenizer == (MODELS / "python-target" / "tokenizer.json").read_bytes()
    assert [*map(json.loads, models.prompts.read_text().splitlines())]
