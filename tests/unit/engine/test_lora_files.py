"""LoRA adapters that are damaged, for another model, or need what is not known are refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ModelMismatchError
from paceline_contract.limits import MOST_LORA_ADAPTERS
from paceline_engine.model_files.lora_folder import read_lora_folders
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.torch_backend.lora_rows import Factors
from paceline_engine.torch_backend.memory import FreeMemory
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.families import build_family
from support.lora_folders import write_lora
from unit.engine.conftest import call_on, running

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tiny_pair, tmp_path):
    return write_lora(tmp_path / "lora", tiny_pair.target, modules=r".*layers\.0.*(q|up)_proj")


def refusal(model, *lora, **settings):
    with pytest.raises(ModelLoadError) as caught:
        TransformersBackend(str(model), lora=lora, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def say(folder, **said):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | said))


def change(folder, edit):
    path = folder / "adapter_model.safetensors"
    state = load_file(path)
    edit(state)
    save_file(state, path)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["experts.down"]}, "target_parameters"),
        ({"use_what_comes_next": True}, "use_what_comes_next"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"r": 0}, "r 0, not in [1, 1024]"),
        ({"r": True}, "r True, not in [1, 1024]"),
        ({"lora_alpha": "16"}, "lora_alpha '16'"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
        ({"use_rslora": 1}, "use_rslora 1, not true or false"),
        ({"use_rslora": "true"}, "use_rslora 'true', not true or false"),
        ({"rank_pattern": {"q_proj": 5000}}, "rank_pattern has a rank"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern has what is no scale"),
        ({"alpha_pattern": {"(a+)+": 3}}, "alpha_pattern has regular expressions"),
        ({"rank_pattern": {"q_proj": 5}}, "is [4, 32], and with this model and rank 5 it is"),
    ],
)
def test_what_a_configuration_asks_for_and_is_not_known_is_refused_by_name(
    tiny_pair, folder, said, words
):
    say(folder, **said)
    told = refusal(tiny_pair.target, f"a={folder}")
    assert "LoRA adapter 'a'" in told
    assert words in told


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda it: it.pop(f"{Q_PROJ}.lora_A.weight"), "one of two factors is missing of"),
        (
            lambda it: it.update({f"{Q_PROJ}.lora_magnitude_vector": torch.ones(3)}),
            "are no factors of LoRA",
        ),
        (
            lambda it: it.update({f"{Q_PROJ}.lora_A.weight": torch.ones(4, 31)}),
            "lora_A of model.layers.0.self_attn.q_proj is [4, 31]",
        ),
        (
            lambda it: it.update({f"{Q_PROJ}.lora_B.weight": torch.full((32, 4), torch.inf)}),
            "has weights that are no numbers",
        ),
        (
            lambda it: it.update({f"{Q_PROJ}.lora_B.weight": torch.ones(32, 4, dtype=torch.int8)}),
            "is of torch.int8, not of float16, bfloat16, float32, float64",
        ),
        (
            lambda it: it.update(
                {f"{Q_PROJ}.lora_B.weight": torch.ones(32, 4).to(torch.float8_e4m3fn)}
            ),
            "is of torch.float8_e4m3fn, not of",
        ),
        (
            lambda it: it.update({f"{Q_PROJ}.lora_B.weight": torch.full((32, 4), 3e38)}),
            "or with scale 2 too large for torch.float32",
        ),
        (
            lambda it: it.update(
                {f"{Q_PROJ}.lora_A.weight": torch.full((4, 32), 1e39, dtype=torch.float64)}
            ),
            "too large for torch.float32",
        ),
        (
            lambda it: it.update({f"{'evil' * 99}\n\x1b[2J.lora_A.weight": torch.ones(4, 4)}),
            "are no factors of LoRA: 'evilevil",
        ),
        (lambda it: it.clear(), "is empty"),
        (
            lambda it: it.update(
                {f"base_model.model.lm_head.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}
            ),
            "adapters of lm_head are not supported",
        ),
        (
            lambda it: it.update(
                {f"base_model.model.model.norm.lora_{half}.weight": torch.ones(4) for half in "AB"}
            ),
            "model.norm is no linear module",
        ),
        (
            lambda it: it.update(
                {
                    f"base_model.model.model.layers.9.mlp.up_proj.lora_{half}.weight": torch.ones(4)
                    for half in "AB"
                }
            ),
            "is for another model: this one has no model.layers.9.mlp.up_proj",
        ),
    ],
)
def test_weights_that_are_not_the_models_are_refused_by_name(tiny_pair, folder, edit, words):
    change(folder, edit)
    assert words in refusal(tiny_pair.target, f"a={folder}")


def test_weights_are_refused_that_do_not_fit_into_the_models_dtype(tiny_pair, folder):
    def grow(state):
        state[f"{Q_PROJ}.lora_A.weight"] = torch.full((4, 32), 7e4)

    change(folder, grow)
    assert TransformersBackend(str(tiny_pair.target), lora=[f"a={folder}"])
    told = refusal(tiny_pair.target, f"a={folder}", dtype="float16")
    assert "too large for torch.float16" in told


@pytest.mark.parametrize("key", ["peft_type", "bias", "init_lora_weights", "r", "lora_alpha"])
@pytest.mark.parametrize("value", ["evil\n\x1b" * 9999, [1] * 9999], ids=["text", "list"])
def test_what_a_configuration_says_makes_no_long_message(tiny_pair, folder, key, value):
    say(folder, **{key: value})
    told = refusal(tiny_pair.target, f"a={folder}")
    assert key in told
    assert told.isprintable()
    assert len(told) < 400


def test_an_option_with_an_odd_name_is_shown_on_one_line(tiny_pair, folder):
    say(folder, **{"evil\n\x1b" * 99: 1})
    assert refusal(tiny_pair.target, f"a={folder}").isprintable()


def test_an_adapter_that_does_not_fit_into_memory_is_refused(tiny_pair, folder, monkeypatch):
    found = []

    def free(device):
        return FreeMemory(found.pop(0), 1.0)

    monkeypatch.setattr("paceline_engine.torch_backend.lora_files.free_memory", free)
    size = (folder / "adapter_model.safetensors").stat().st_size
    found[:] = [2 * size - 2]
    assert f"has more than {size - 1} bytes" in refusal(tiny_pair.target, f"a={folder}")
    numbers = 4 * (32 + 32 + 32 + 64)
    found[:] = [2 * size, 16 * numbers - 1]
    assert f"take {16 * numbers} bytes" in refusal(tiny_pair.target, f"a={folder}")
    found[:] = [2 * size, 16 * numbers]
    assert TransformersBackend(str(tiny_pair.target), lora=[f"a={folder}"]).lora


def test_an_adapter_of_another_model_is_refused(tiny_pair, tmp_path):
    other = build_family("opt", tmp_path / "other")
    lora = write_lora(tmp_path / "lora", other)
    assert "is for another model" in refusal(tiny_pair.target, f"a={lora}")


def test_files_that_are_missing_pickled_cut_off_or_no_files_are_refused(tiny_pair, folder):
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-5])
    assert "cannot be loaded" in refusal(tiny_pair.target, f"a={folder}")
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "Git LFS" in refusal(tiny_pair.target, f"a={folder}")
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    assert "is pickled" in refusal(tiny_pair.target, f"a={folder}")
    os.mkfifo(weights)
    assert "not a regular file" in refusal(tiny_pair.target, f"a={folder}")
    (folder / "adapter_config.json").write_text("{")
    assert "not readable as JSON" in refusal(tiny_pair.target, f"a={folder}")
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json" in refusal(tiny_pair.target, f"a={folder}")


def test_names_are_checked_before_anything_is_read(folder):
    def told(*settings):
        with pytest.raises(ModelLoadError) as caught:
            read_lora_folders(settings)
        return str(caught.value)

    for odd in ("", "a", "=x", "a=", "a b=x", f"{'n' * 65}=x", "a/b=x"):
        assert "is not NAME=DIR" in told(odd)
    assert "two adapters are called 'a'" in told(f"a={folder}", f"a={folder}")
    many = [f"a{index}={folder}" for index in range(MOST_LORA_ADAPTERS + 1)]
    assert f"more than {MOST_LORA_ADAPTERS}" in told(*many)
    assert len(read_lora_folders(many[:-1])) == MOST_LORA_ADAPTERS


def test_factors_of_modules_that_compute_all_tokens_so_far_are_refused(tmp_path):
    model = build_family("deepseek-v3", tmp_path / "model")
    lora = write_lora(tmp_path / "a", model, modules=r".*self_attn\.(o|kv_b)_proj")
    assert "kv_b_proj computes other rows than the forward's" in refusal(model, f"a={lora}")
    lora = write_lora(tmp_path / "b", model, modules=r".*self_attn\.o_proj")
    assert TransformersBackend(str(model), lora=[f"b={lora}"]).lora


def test_factors_of_modules_that_a_forward_computes_twice_are_refused(tmp_path, monkeypatch):
    def twice(self, hidden):
        inner = self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden)
        return (self.down_proj(inner) + self.down_proj(inner)) / 2

    module = "transformers.models.gemma2.modeling_gemma2.Gemma2MLP.forward"
    monkeypatch.setattr(module, twice)
    model = build_family("gemma2", tmp_path / "model")
    lora = write_lora(tmp_path / "lora", model, modules=r".*layers\.0.*(up|down)_proj")
    told = refusal(model, f"a={lora}")
    assert "does not compute each row of model.layers.0.mlp.down_proj once" in told


@pytest.mark.parametrize("family", ["fused", "gemma2"])
def test_an_adapter_with_which_scores_are_no_numbers_is_refused(family, tiny_pair, tmp_path):
    model = tiny_pair.target if family == "fused" else build_family(family, tmp_path / "model")
    lora = write_lora(tmp_path / "lora", model, modules=r".*layers\.0.*v_proj", alpha=4)
    change(lora, lambda it: [each.copy_(torch.full_like(each, 1e37)) for each in it.values()])
    assert "the model's scores are no numbers" in refusal(model, f"a={lora}")


def test_models_that_keep_no_rows_of_several_sequences_take_no_adapter(folder, tmp_path):
    mamba = build_family("mamba", tmp_path / "mamba")
    assert "goes row by row: it takes no --lora" in refusal(mamba, f"a={folder}")
    bloom = build_family("bloom", tmp_path / "bloom")
    assert "takes no --lora" in refusal(bloom, f"a={folder}")


def test_a_target_that_drafts_for_itself_takes_no_adapter(tiny_pair, folder):
    told = refusal(tiny_pair.target, f"a={folder}", adapter=str(folder))
    assert told == "--lora and --adapter do not go together"


def test_with_invariance_an_adapter_whose_rows_change_one_another_is_refused(
    tiny_pair, folder, monkeypatch
):
    compute = Factors.of
    monkeypatch.setattr(
        Factors, "of", lambda self, inputs: compute(self, inputs) + 1e-5 * len(inputs)
    )
    assert "cannot be served with --invariant" in refusal(
        tiny_pair.target, f"a={folder}", invariant=True
    )


async def test_a_session_with_an_unknown_adapter_is_refused(tiny_pair, folder):
    backend = TransformersBackend(str(tiny_pair.target), lora=[f"a={folder}"])
    async with running(backend) as host:
        host.open_session(SessionSpec(40, lora="a"))
        with pytest.raises(ModelMismatchError, match="no LoRA adapter 'b'"):
            host.open_session(SessionSpec(40, lora="b"))


async def test_a_call_with_the_fingerprint_of_another_adapter_is_refused(tiny_pair, folder):
    backend = TransformersBackend(str(tiny_pair.target), lora=[f"a={folder}"])
    async with running(backend) as host:
        session_id = host.open_session(SessionSpec(40, lora="a")).session_id
        call = call_on(session_id, 1, base=[], append=[1, 2, 3])
        with pytest.raises(ModelMismatchError, match="opened with another LoRA adapter"):
            await host.verify(call)
        verdict = await host.verify(replace(call, lora="a"))
        assert verdict.prefix_length == 3
