"""EAGLE-3 heads in the layouts in which they are published."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import suppress

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.torch_backend.adapters.eagle_shape import EagleShape
from paceline_engine.torch_backend.adapters.files import load_adapter
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.tiny_adapters import random_adapter, write_adapter

SPEC = SessionSpec(200)
PROMPT = [5, 6, 7, 8, 9]
TOKEN_IDS = range(2, 302, 3)
CHAIN = tuple((0,) * depth for depth in range(1, 5))


@pytest.fixture(scope="module")
def model(tiny_pair):
    return AutoModelForCausalLM.from_pretrained(tiny_pair.target)


def config_of(model):
    """As EAGLE's authors write it."""
    own = model.config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": own.hidden_size,
        "intermediate_size": own.intermediate_size,
        "num_attention_heads": own.num_attention_heads,
        "num_key_value_heads": own.num_key_value_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": own.rms_norm_eps,
        "rope_theta": own.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "vocab_size": own.vocab_size,
        "draft_vocab_size": len(TOKEN_IDS),
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }


def speculators_config(model):
    """As the speculators library writes it: ids are those of inputs."""
    sizes = config_of(model)
    del sizes["architectures"], sizes["eagle_config"], sizes["draft_vocab_size"]
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": len(TOKEN_IDS),
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "transformer_layer_config": sizes,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny/target"}},
    }


def lay_out(directory, head, config, *, rename=lambda name: name, **more):
    directory.mkdir()
    state = {rename(name): each for name, each in head.state_dict().items()}
    can_guess = torch.zeros(head.vocabulary_size, dtype=torch.bool)
    can_guess[head.draft_token_ids] = True
    state = {**state, "t2d": can_guess, **more}
    save_file({name: each for name, each in state.items() if each is not None},
              directory / "model.safetensors")  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def proposals(tiny_pair, adapter, **how):
    backend = TransformersBackend(str(tiny_pair.target), adapter=str(adapter), **how)
    text = ModelText(backend, SPEC)
    return [text.judge([*PROMPT, *range(n)], propose=True).proposal for n in range(4)]


LAYOUTS = {
    "eagle": (config_of, lambda name: name, {"own_head": True}),
    "speculators": (
        speculators_config,
        lambda name: name.replace("midlayer.", "layers.0."),
        {"own_head": True, "norm_before_residual": True, "feature_norms": "together"},
    ),
    "older norms": (
        config_of,
        lambda name: (
            name.replace("fc_norm.0", "aux_norm_low")
            .replace("fc_norm.1", "aux_norm_mid")
            .replace("fc_norm.2", "aux_norm_high")
        ),
        {"own_head": True, "own_embedding": True, "feature_norms": "each"},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_head_guesses_as_the_same_head_with_a_card(layout, tiny_pair, model, tmp_path):
    make_config, rename, shape = LAYOUTS[layout]
    shape = {"token_ids": TOKEN_IDS, **shape, "feature_layers": (1, 2, 3)}
    head = random_adapter("eagle", model, reach=4, **shape)
    ours = write_adapter(
        tmp_path / "ours", tiny_pair.target, kind="eagle", tree=CHAIN, reach=4, shape=shape
    )
    published = lay_out(tmp_path / "published", head, make_config(model), rename=rename)
    expected = proposals(tiny_pair, ours)
    assert proposals(tiny_pair, published) == expected
    assert len(expected[0]) == 4
    fewer = proposals(tiny_pair, published, guesses=2)
    assert [each.token_ids for each in fewer] == [each.token_ids[:2] for each in expected]


def test_facts_that_are_left_out_are_as_the_layouts_server_takes_them(tiny_pair, model, tmp_path):
    head = random_adapter("eagle", model, token_ids=TOKEN_IDS, own_head=True)
    config = config_of(model) | {"eagle_config": None}
    config["rope_scaling"] = {"type": "linear", "factor": 2.0}
    backend = TransformersBackend(
        str(tiny_pair.target), adapter=str(lay_out(tmp_path / "eagle", head, config))
    )
    shape = backend.own_guesses.drafter._head.shape
    like = EagleShape.like(model.config, draft_vocabulary=1)
    assert (shape.feature_layers, shape.norm_before_residual) == (like.feature_layers, False)
    assert shape.rope["factor"] == 2.0
    config = speculators_config(model)
    del config["norm_before_residual"]
    backend = TransformersBackend(
        str(tiny_pair.target), adapter=str(lay_out(tmp_path / "speculators", head, config))
    )
    assert backend.own_guesses.drafter._head.shape.norm_before_residual


def test_what_cannot_be_read_is_refused_in_one_line(tiny_pair, model, tmp_path):
    head = random_adapter("eagle", model, token_ids=TOKEN_IDS, own_head=True)
    number = iter(range(100))

    def refusal(change=None, **more):
        config = config_of(model) | (change or {})
        directory = lay_out(tmp_path / str(next(number)), head, config, **more)
        with pytest.raises(ModelLoadError) as caught:
            TransformersBackend(str(tiny_pair.target), adapter=str(directory))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "for another model: its width is 64" in refusal({"hidden_size": 64})
    assert "for another model: its vocabulary is 128256" in refusal({"vocab_size": 128256})
    assert "of no EAGLE-3 head" in refusal({"architectures": ["LlamaForCausalLM"]})
    assert "only heads of one layer" in refusal({"num_hidden_layers": 2})
    assert "num_attention_heads 0" in refusal({"num_attention_heads": 0})
    assert "dynamic" in refusal({"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    assert "reads what enters layer 4" in refusal({"eagle_config": ids})
    assert "foreign midlayer.mood" in refusal(**{"midlayer.mood": torch.ones(1)})
    assert "lacks fc.weight" in refusal(**{"fc.weight": None})
    assert "lacks lm_head.weight" in refusal(**{"lm_head.weight": None})
    assert "lacks d2t" in refusal(d2t=None)
    assert "different draft vocabularies" in refusal(t2d=torch.ones(320, dtype=torch.bool))
    assert "of another shape" in refusal(d2t=torch.zeros(7, dtype=torch.int64))
    norm = head.midlayer.input_layernorm.weight.clone()
    assert "under two names" in refusal(**{"layers.0.input_layernorm.weight": norm})
    assert "lacks input_norm.weight" in refusal({"norm_before_fc": True})
    assert "three layers" in refusal({"num_aux_hidden_states": 5})
    assert "of no EAGLE-3 head" in refusal({"speculators_model_type": "dflash"})
    switched = {"eagle_aux_hidden_state_layer_ids": [True, 1, 2]}
    assert "are no layers" in refusal({"eagle_config": switched})
    wrong = torch.full_like(model.lm_head.weight[: len(TOKEN_IDS)], torch.nan)
    assert "no numbers" in refusal(**{"lm_head.weight": wrong})


WRONG = (None, True, -1, 0, 1.5, 1e300, 10**400, "x", [], [{}], {}, {"rope_type": []})


@pytest.mark.parametrize("make_config", [config_of, speculators_config])
def test_a_value_of_another_kind_is_refused_or_read(make_config, model, tmp_path):
    head = random_adapter("eagle", model, token_ids=TOKEN_IDS, own_head=True)
    config = make_config(model)
    directory = lay_out(tmp_path / "head", head, config)

    def is_refused(changed):
        (directory / "config.json").write_text(json.dumps(changed))
        with suppress(ModelLoadError):
            load_adapter(directory, model=model, fingerprint="")
            return False
        return True

    tried = []
    for holder in ((), ("eagle_config",), ("transformer_layer_config",), ("speculators_config",)):
        inner = config if not holder else config.get(holder[0], {})
        for key in {**inner, "rope_parameters": 0, "head_dim": 0, "hidden_act": 0}:
            for wrong in WRONG:
                changed = {**inner, key: wrong}
                tried.append(is_refused({**config, holder[0]: changed} if holder else changed))
    assert len(tried) > 200
    assert 0 < sum(tried) < len(tried)
    assert not is_refused(config)


@pytest.mark.parametrize("name", ["lm_head.weight", "d2t", "t2d", "fc.weight"])
@pytest.mark.parametrize(
    "wrong", [torch.tensor(3), torch.ones(3), torch.ones(0, 2), torch.ones(2, 2, 2)]
)
def test_a_weight_of_another_kind_is_refused_in_one_line(name, wrong, model, tmp_path):
    head = random_adapter("eagle", model, token_ids=TOKEN_IDS, own_head=True)
    directory = lay_out(tmp_path / "head", head, config_of(model), **{name: wrong})
    with pytest.raises(ModelLoadError) as caught:
        load_adapter(directory, model=model, fingerprint="")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("fc.weight", each) for each in ("int8", "int32", "bool", "float8_e4m3fn", "complex64")),
        *(("d2t", each) for each in ("float32", "bool", "float8_e4m3fn", "uint64")),
        *(("t2d", each) for each in ("float32", "float8_e4m3fn")),
    ],
)
def test_numbers_of_another_kind_are_refused_in_one_line(name, kind, model, tmp_path):
    """Weights in few bits are nothing without their scales; a head of them would only err."""
    head = random_adapter("eagle", model, token_ids=TOKEN_IDS, own_head=True)
    right = {**head.state_dict(), "t2d": torch.ones(len(TOKEN_IDS))}[name]
    wrong = right.to(getattr(torch, kind))
    directory = lay_out(tmp_path / "head", head, config_of(model), **{name: wrong})
    with pytest.raises(ModelLoadError, match=f"{name} has .*{kind}, and needs") as caught:
        load_adapter(directory, model=model, fingerprint="")
    assert "\n" not in str(caught.value)


def test_a_pickle_is_refused_with_the_command_that_converts_it(
    tiny_pair, model, tmp_path, monkeypatch
):
    head = random_adapter("eagle", model, token_ids=TOKEN_IDS, own_head=True)
    pickled = lay_out(tmp_path / "a pickle", head, config_of(model))
    (pickled / "model.safetensors").unlink()
    torch.save(head.state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="pickled weights, which can run code") as caught:
        TransformersBackend(str(tiny_pair.target), adapter=str(pickled))
    what = shlex.split(str(caught.value).partition("convert them: ")[2])
    assert what[:2] == ["python", "-c"]
    monkeypatch.setattr(sys, "argv", ["-c", *what[3:]])
    exec(what[2], {})
    assert proposals(tiny_pair, pickled)[0]
