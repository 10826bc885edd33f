"""Published heads are adopted in the reading that guesses best."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline_engine.model_files.files import find_model_files
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend.adapters.card import model_fingerprint
from paceline_engine.torch_backend.adapters.files import load_adapter
from paceline_engine.torch_backend.model_loading import load_model
from paceline_training import measurement
from paceline_training.adopted import adopt_head
from paceline_training.run import AdapterSizes, TextPlan, run_training
from paceline_training.training import TrainingPlan
from support.tiny_adapters import write_adapter
from support.tiny_models import tiny_pair

__all__ = ["tiny_pair"]


@pytest.fixture
def short(monkeypatch):
    """Few and short continuations: they are what it measures on."""
    torch.set_num_threads(1)
    monkeypatch.setattr(measurement, "_PROMPT_COUNT", 8)
    monkeypatch.setattr(measurement, "_CONTINUATION_LENGTH", 24)


def test_the_reading_is_found_in_which_the_head_was_trained(tiny_pair, tmp_path, short):
    files = find_model_files(str(tiny_pair.target))
    texts = torch.randint(300, (8, 8), generator=torch.Generator().manual_seed(2))
    model = load_model(files, dtype="float32")
    learnt = measurement.continuations_of(model, texts).token_ids  # what the model goes on with
    run_training(
        files,
        sizes=AdapterSizes(
            kind="eagle",
            reach=2,
            layers=0,
            rank=0,
            exit_rank=0,
            tree_nodes=2,
            draft_vocabulary=320,
        ),
        text=TextPlan(streams=[learnt], validation=texts, window=28, batch=8, seed=1),
        plan=TrainingPlan(
            steps=60, rate=1e-2, decay="cosine", warm_up_share=0.1, labels="model", report_steps=99
        ),
        out=tmp_path / "head",
        checkpoint=tmp_path / "checkpoint.pt",
        device="cpu",
        tell=lambda _: None,
    )
    fingerprint = model_fingerprint(files)
    right = load_adapter(tmp_path / "head", model=model, fingerprint=fingerprint)
    layers = tuple(layer + 1 for layer in right.card.eagle.feature_layers)
    wrong = replace(right.card.eagle, feature_layers=layers, norm_before_residual=True)
    replace(right.card, eagle=wrong).write(tmp_path / "head")
    lines = []
    card = adopt_head(
        files,
        tmp_path / "head",
        validation=texts,
        reach=2,
        out=tmp_path / "adopted",
        device="cpu",
        tell=lines.append,
    )
    assert card.eagle == right.card.eagle
    assert len(lines) == 8  # no layer is beyond the last one
    adopted = load_adapter(tmp_path / "adopted", model=model, fingerprint=fingerprint)
    assert adopted.card == card
    assert card.training["hit_rates"][0][0] > 0.4
    assert card.tree == ((0,), (0, 0))


def test_a_head_that_guesses_badly_in_every_reading_is_refused(tiny_pair, tmp_path, short):
    files = find_model_files(str(tiny_pair.target))
    head = write_adapter(tmp_path / "head", tiny_pair.target, kind="eagle", tree=((0,),))
    texts = torch.randint(300, (8, 8), generator=torch.Generator().manual_seed(2))
    where = {"validation": texts, "reach": 2, "device": "cpu", "tell": lambda _: None}
    with pytest.raises(ModelLoadError, match="probably for another model"):
        adopt_head(files, head, out=tmp_path / "out", **where)
    medusa = write_adapter(tmp_path / "medusa", tiny_pair.target, kind="medusa", tree=((0,),))
    with pytest.raises(ModelLoadError, match="no EAGLE head"):
        adopt_head(files, medusa, out=tmp_path / "out", **where)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "other", [{"token_ids": range(20)}, {"feature_layers": (0, 1, 2)}, {"own_head": True}], ids=str
)
def test_training_goes_on_only_with_a_head_that_is_computed_alike(
    other, tiny_pair, tmp_path, short
):
    files = find_model_files(str(tiny_pair.target))
    shape = {"token_ids": range(40), **other}
    begun = write_adapter(
        tmp_path / "begun", tiny_pair.target, kind="eagle", tree=((0,),), reach=2, shape=shape
    )
    texts = torch.randint(300, (8, 8), generator=torch.Generator().manual_seed(2))
    with pytest.raises(ModelLoadError, match="an EAGLE head of other sizes, or computed in") as why:
        run_training(
            files,
            sizes=AdapterSizes(
                kind="eagle",
                reach=2,
                layers=0,
                rank=0,
                exit_rank=0,
                tree_nodes=2,
                draft_vocabulary=40,
            ),
            text=TextPlan(streams=[texts], validation=texts, window=8, batch=8, seed=1),
            plan=TrainingPlan(
                steps=1, rate=0, decay="cosine", warm_up_share=0, labels="model", report_steps=9
            ),
            out=tmp_path / "head",
            checkpoint=tmp_path / "checkpoint.pt",
            device="cpu",
            tell=lambda _: None,
            go_on_from=begun,
        )
    assert "\n" not in str(why.value)
