"""Quantised Hugging Face folders compute what their numbers stand for, or are refused."""

from __future__ import annotations

import json
from array import array

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from paceline_engine.model_files.files import find_model_files
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.torch_backend.int8_linear import Int8Product
from paceline_engine.torch_backend.model_loading import load_model
from paceline_engine.torch_backend.shared_rows import SharedRows
from paceline_engine.torch_backend.stored_weights import stored_weights
from paceline_engine.torch_backend.transformers import TransformersBackend
from paceline_engine.torch_backend.w4a16_linear import W4A16Product
from paceline_engine.torch_backend.whole_products import replace_products
from support.device import on_a_cpu
from support.lora_folders import merge, write_lora
from support.quantised_folders import GROUP, LAYOUTS, SIZES, write_folder
from support.tiny_models import build_tokenizer

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
COUNTS = [1, 2, 3, 4, 5, 8, 13, 40]
needs_vnni = pytest.mark.skipif(
    not torch.cpu._is_vnni_supported(), reason="this processor has no exact products in eight bits"
)


def only_cpu(*values):
    """A row about weights that only a CPU keeps in few bits."""
    return pytest.param(*values, marks=(on_a_cpu, needs_vnni))


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(300)


@pytest.fixture
def written(tokenizer, tmp_path):
    """Give a function that writes a model in a layout, and returns both folders and the weights."""

    def write(layout, model_class=LlamaForCausalLM, config=None):
        torch.manual_seed(5)
        model = model_class(config or LlamaConfig(**SIZES, attention_bias=True))
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.data.normal_(std=0.1)
        weights = write_folder(model, tokenizer, tmp_path, LAYOUTS[layout])
        return tmp_path / "quantised", tmp_path / "plain", weights

    return write


def load(folder, dtype="float32", *, keeps_grids=False):
    return load_model(find_model_files(str(folder)), dtype=dtype, keeps_grids=keeps_grids)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_the_numbers_that_it_stands_for(layout, written):
    quantised, plain, _ = written(layout)
    for dtype in ("float32", "bfloat16"):
        expected, actual = load(plain, dtype).state_dict(), load(quantised, dtype).state_dict()
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_experts_are_read_too(written):
    config = Qwen3MoeConfig(**SIZES, **EXPERTS)
    quantised, plain, _ = written("fp8 in blocks", Qwen3MoeForCausalLM, config)
    tokens = torch.arange(2, 60, 2)[None]
    with torch.inference_mode():
        assert torch.equal(load(quantised)(tokens).logits, load(plain)(tokens).logits)


def logits_of(backend, token_ids, *, lora=""):
    cache = backend.new_cache(SessionSpec(128))
    cache.make_room(len(token_ids))
    part = array("I", token_ids)
    rows = SharedRows([cache], [part], [len(part)], together=False)
    if lora:
        rows.lora = backend.lora.rows([(lora, len(part))])
    return backend.decoder(rows).float().cpu()


@pytest.mark.parametrize(
    ("layout", "dtype", "computed_in", "word"),
    [
        only_cpu("w8a8", "float32", "w8a8", "14 of its weights are computed in eight bits"),
        ("w8a8", "bfloat16", "bfloat16", "are dequantised to bfloat16"),
        ("w8a16", "float32", "float32", "are dequantised to float32"),
        only_cpu("awq", "bfloat16", "w4a16", "14 of its weights are computed in four bits"),
        only_cpu(
            "gptq", "float32", "float32", "with --dtype bfloat16 weights in four bits stay so"
        ),
        ("gptq in another order", "bfloat16", "bfloat16", "are dequantised to bfloat16"),
        ("fp8 in blocks", "float32", "float32", "its weights of fp8 are dequantised to float32"),
    ],
)
def test_a_server_computes_as_the_files_say_and_tells_it(
    layout, dtype, computed_in, word, written, caplog
):
    quantised, plain, _ = written(layout)
    with caplog.at_level("INFO"):
        backend = TransformersBackend(str(quantised), dtype=dtype)
    assert backend.description.dtype == computed_in
    assert word in caplog.text
    twin = TransformersBackend(str(plain), dtype=dtype)
    assert backend.description.fingerprint != twin.description.fingerprint
    tokens = torch.arange(3, 120, 3)
    with torch.inference_mode():
        expected = load(plain)(tokens[None]).logits[0]
        actual = logits_of(backend, tokens.tolist())
    # bfloat16 and rows in eight bits have about as many digits.
    limit = 1e-5 if computed_in == "float32" else 0.05
    assert float((actual - expected).norm() / expected.norm()) < limit


@pytest.mark.parametrize(
    ("layout", "dtype", "kind"),
    [
        ("fp8 in blocks", "float32", "float32"),
        ("gptq", "float32", "float32"),
        only_cpu("w8a8", "float32", "w8a8"),
        only_cpu("awq", "bfloat16", "w4a16"),
    ],
)
def test_a_lora_adapter_adds_to_the_numbers_that_weights_stand_for(
    layout, dtype, kind, written, tmp_path
):
    quantised, plain, _ = written(layout)
    lora = write_lora(tmp_path / "lora", plain, strength=0.3)
    backend = TransformersBackend(str(quantised), dtype=dtype, lora=[f"a={lora}"])
    assert backend.description.dtype == kind
    tokens = torch.arange(3, 120, 3)
    with torch.inference_mode():
        without = load(plain)(tokens[None]).logits[0]
        expected = load(merge(plain, lora, tmp_path / "merged"))(tokens[None]).logits[0]
        actual = logits_of(backend, tokens.tolist(), lora="a")
    limit = 1e-5 if kind == "float32" else 0.05
    assert float((without - expected).norm() / expected.norm()) > 5 * limit
    assert float((actual - expected).norm() / expected.norm()) < limit


@needs_vnni
@pytest.mark.parametrize(
    ("layout", "dtype", "kind"), [("w8a8", "float32", "w8a8"), ("awq", "bfloat16", "w4a16")]
)
def test_whole_numbers_can_be_served_invariantly(layout, dtype, kind, written):
    """The proof at load would refuse them."""
    backend = TransformersBackend(str(written(layout)[0]), dtype=dtype, invariant=True)
    assert (backend.description.dtype, backend.description.is_invariant) == (kind, True)


@needs_vnni
@torch.inference_mode()
def test_products_in_eight_bits_have_the_whole_numbers_of_the_file(written):
    quantised, _, weights = written("w8a8")
    model = load(quantised, keeps_grids=True)
    products, _ = replace_products("a model", model, None, kind="w8a8")
    assert not any(hasattr(each, "stored_as") for each in model.modules())
    whole = [each for each in products if isinstance(each, Int8Product)]
    assert len(whole) == len(weights)
    for product, weight in zip(whole, in_order(weights, load(quantised)), strict=True):
        assert torch.equal(product.whole_weight(), weight.whole)
        assert torch.equal(product.scales, weight.parts["weight_scale"][:, 0])


def in_order(weights, model):
    return [weights[name] for name, _ in model.named_modules() if name in weights]


@torch.inference_mode()
@pytest.mark.parametrize("layout", ["w4a16", "w4a16 with zero points", "gptq", "awq"])
def test_a_product_in_four_bits_is_that_of_its_numbers_for_any_rows(layout, written):
    """Within the rounding of scales to bfloat16; and a row has its bits, whatever is beside it."""
    files = find_model_files(str(written(layout)[0]))
    hidden = torch.randn(COUNTS[-1], 128, generator=torch.Generator().manual_seed(1))
    hidden = hidden.to(torch.bfloat16)
    compared = 0
    for _, numbers, stored in stored_weights(files, files.quantisation, dtype=torch.float32):
        if stored is None or numbers.shape[1] != 128:
            continue
        grid = stored.grid
        product = W4A16Product(numbers.to(torch.bfloat16), None, grid)
        levels = (grid.least / grid.scales + 8).abs().max() + 8
        steps = grid.scales.repeat_interleave(32, 1) * levels
        assert bool(((product.weight().float() - numbers).abs() <= steps * 2**-7).all())
        expected = functional.linear(hidden.float(), numbers)
        whole = product(hidden)
        assert float((whole.float() - expected).norm() / expected.norm()) < 0.01
        for count in COUNTS:
            assert torch.equal(product(hidden[:count]), whole[:count])
            assert torch.equal(product(hidden[-count:]), whole[-count:])
        compared += 1
    assert compared == 12


def test_four_bits_whose_rows_depend_on_others_are_dequantised(written, monkeypatch):
    product = W4A16Product.__call__

    def summed(self, hidden):
        return product(self, hidden) + hidden.sum()

    monkeypatch.setattr(W4A16Product, "__call__", summed)
    backend = TransformersBackend(str(written("awq")[0]), dtype="bfloat16")
    assert backend.description.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, r"dequantize\(\), or give --backend vllm"),
        ({"quant_method": "torchao"}, "torchao.*llm-compressor.*--backend vllm"),
        ({"quant_method": "hqq"}, "hqq.*not read, but compressed-tensors, gptq, awq, fp8"),
        ({"quant_method": "gptq", "bits": 3}, "gptq in 3 bits"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin' are not read",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "gptq"}, "quantization_config that is not usable: 'bits'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "a block of 0 rows"),
        ({**LAYOUTS["w4a16"].config, "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({**LAYOUTS["w4a16"].config, "transform_config": {"R1": {}}}, "transform_config"),
        ({**LAYOUTS["w4a16"].config, "sparsity_config": {"format": "2:4"}}, "sparsity_config"),
        (["no object"], "not usable"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_read_is_refused_before_the_weights_are(config, reason, tmp_path):
    """Also where weights are pickled, or not there: the advice is of the quantisation."""
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=reason):
        TransformersBackend(str(tmp_path))


@pytest.mark.parametrize("layout", ["gptq", "gptq in another order", "awq", "w4a16"])
def test_groups_of_another_size_than_the_scales_have_are_refused(layout, written):
    """Such a config.json is of other weights."""
    folder = written(layout)[0]
    config = json.loads((folder / "config.json").read_text())
    told = config["quantization_config"]
    groups = [it["weights"] for it in told.get("config_groups", {}).values()]
    for each in groups or [told]:
        each["group_size"] = GROUP
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(config))
    load(folder)
    for each in groups or [told]:
        each["group_size"] = 2 * GROUP
    config_file.write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"scales for the \d+ .* config.json says .*64"):
        load(folder)


def test_what_this_engine_does_not_read_another_can_find(written):
    folder = written("w8a8")[0]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt"}
    (folder / "config.json").write_text(json.dumps(config))
    files = find_model_files(str(folder))
    with pytest.raises(ModelLoadError, match="modelopt"):
        load_model(files, dtype="float32")


def test_a_hubs_model_is_refused_before_its_weights_are_fetched(tmp_path, monkeypatch):
    config = {"quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = []

    def snapshot_download(model, *, revision, allow_patterns):
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ModelLoadError, match="bitsandbytes"):
        TransformersBackend("somebody/model")
    assert "config.json" in asked
    assert "model.safetensors" not in asked


@pytest.mark.parametrize(
    ("layout", "part", "change", "reason"),
    [
        ("awq", "scales", lambda scales: scales[:3], "q_proj cannot be dequantised"),
        ("awq", "qzeros", None, "q_proj cannot be .* which no layout of awq has"),
        ("awq", "scales", lambda scales: scales * float("nan"), "weights that are no numbers"),
        ("fp8 in blocks", "weight_scale_inv", None, "q_proj cannot be .* have no scales"),
    ],
)
def test_broken_parts_are_refused_by_name(layout, part, change, reason, written):
    folder = written(layout)[0]
    rewrite(folder, f"model.layers.0.self_attn.q_proj.{part}", change)
    with pytest.raises(ModelLoadError, match=reason):
        load(folder)


def rewrite(folder, name, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    found = tensors.pop(name)
    if change is not None:
        tensors[name] = change(found).contiguous()
    save_file(tensors, folder / "model.safetensors")
