"""A file's whole numbers with `--weights int4`: they are kept, or what becomes of them is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from paceline_engine.model_files.files import find_model_files
from paceline_engine.torch_backend.draft_head import DraftHead
from paceline_engine.torch_backend.grouped_linear import GROUP, GroupProduct, rounding
from paceline_engine.torch_backend.int8_linear import Int8Product
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.model_loading import load_model
from paceline_engine.torch_backend.w4a16_linear import W4A16Product
from paceline_engine.torch_backend.weight_grids import Grid
from paceline_engine.torch_backend.whole_products import replace_products
from support.gguf_files import GgufParts, write_gguf
from support.tiny_models import build_tokenizer
from unit.engine.test_compiled_products import numbers
from unit.engine.test_quantised_folders import tokenizer, written  # noqa: F401 - fixtures

# So that blocks of 256 numbers divide all widths.
SIZES = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.1,
}
QKV, OUT, GATE_UP, DOWN = range(4)
LINEARS_OF_LAYER = 7


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@pytest.fixture
def of_kinds(model, tmp_path):
    """Give a function that writes the model as a GGUF file and loads it; see `GgufParts`."""

    def make(kind, **kinds):
        parts = GgufParts(kind=kind, kinds=kinds)
        path = write_gguf(tmp_path / "model.gguf", model, build_tokenizer(320), parts)
        return load(path), parts.numbers

    return make


def load(path, **options):
    files = find_model_files(str(path))
    return load_model(files, **{"dtype": "float32", "keeps_grids": True, **options})


@torch.inference_mode()
def computed_by(loaded, *, kind="int4"):
    """Return the head, and each layer's products, with a model's numbers."""
    decoder = FusedLlama(loaded, packs=False)
    (head, *_), _ = replace_products("a model", loaded, decoder, kind=kind)
    return head, [layer.products for layer in decoder.layers]


def rows_of(product, linears):
    """The weights that a product holds, one module's after the other's."""
    return torch.split(product.weight(), [each.out_features for each in linears])


def is_rounded_to_eight_bits(actual, weight):
    """Whether a weight differs from another one, and by about half a step of 255 in each group."""
    groups = weight.view(len(weight), -1, GROUP)
    steps = (groups.amax(-1) - groups.amin(-1)) / 255
    most = steps / 2 + 2**-9 * groups.abs().amax(-1)
    off = (actual - weight).abs().view_as(groups)
    return bool(off.any()) and bool((off <= most[..., None]).all())


def test_weights_of_unlike_kinds_side_by_side_keep_their_numbers(of_kinds, caplog):
    kinds = {"q_proj": "Q5_0", "k_proj": "Q8_0", "v_proj": "Q4_1", "gate_proj": "Q4_K"}
    loaded, stored = of_kinds("Q5_1", **kinds)
    with caplog.at_level("INFO"):
        head, layers = computed_by(loaded)
    assert torch.equal(head.weight(), stored["lm_head.weight"])
    for index, (layer, products) in enumerate(zip(loaded.model.layers, layers, strict=True)):
        sides = {
            QKV: ("self_attn", "q_proj", "k_proj", "v_proj"),
            OUT: ("self_attn", "o_proj"),
            GATE_UP: ("mlp", "gate_proj", "up_proj"),
            DOWN: ("mlp", "down_proj"),
        }
        for which, (part, *names) in sides.items():
            linears = [getattr(getattr(layer, part), name) for name in names]
            for name, own in zip(names, rows_of(products[which], linears), strict=True):
                assert torch.equal(own, stored[f"model.layers.{index}.{part}.{name}.weight"]), name
    assert "15 of its quantised weights are computed with its files' numbers" in caplog.text
    assert "rounded again" not in caplog.text


def test_what_no_product_computes_is_rounded_again_alone_and_told(of_kinds, caplog):
    """As in a file of Q4_K_M: q and k keep their numbers beside a v in Q6_K."""
    loaded, stored = of_kinds("Q4_K", v_proj="Q6_K", down_proj="F16")
    with caplog.at_level("INFO"):
        _, layers = computed_by(loaded)
    for index, products in enumerate(layers):
        attention = loaded.model.layers[index].self_attn
        name = f"model.layers.{index}.self_attn"
        q, k, v = rows_of(products[QKV], [attention.q_proj, attention.k_proj, attention.v_proj])
        assert torch.equal(q, stored[f"{name}.q_proj.weight"])
        assert torch.equal(k, stored[f"{name}.k_proj.weight"])
        assert is_rounded_to_eight_bits(v, stored[f"{name}.v_proj.weight"])
        down = stored[f"model.layers.{index}.mlp.down_proj.weight"]
        assert is_rounded_to_eight_bits(products[DOWN].weight(), down)
        assert [each.bits for each in products] == [8, 4, 4, 8]
    assert "11 of its quantised weights are computed with its files' numbers" in caplog.text
    assert "rounded again, to eight bits: 2 (Q6_K)" in caplog.text


def test_a_file_that_no_product_computes_is_not_rounded_to_four_bits(of_kinds, caplog):
    loaded, stored = of_kinds("Q6_K")
    with caplog.at_level("INFO"):
        head, layers = computed_by(loaded)
    assert is_rounded_to_eight_bits(head.weight(), stored["lm_head.weight"])
    assert {each.bits for products in layers for each in products} == {8}
    assert "rounded again, to eight bits: 15 (Q6_K)" in caplog.text


def test_a_model_in_floating_point_has_nothing_to_tell(of_kinds, caplog):
    loaded, _ = of_kinds("F16")
    with caplog.at_level("INFO"):
        head, layers = computed_by(loaded)
    assert head.bits == 8
    assert {each.bits for products in layers for each in products} == {4}
    assert "quantised weights" not in caplog.text


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("gptq in another order", "in 4 bits, inputs in an order of their own"),
        ("w4a16 in another order", "in 4 bits, inputs in an order of their own"),
        ("w8a16 in another order", "in 8 bits, inputs in an order of their own"),
        ("w4a16 in groups of 16", "in 4 bits, groups of 16, not a multiple of 32"),
        ("fp8 in blocks", "in floating point of 8 bits"),
    ],
)  # fmt: skip
def test_a_folder_whose_groups_no_product_has_is_not_rounded_to_four_bits(
    layout, words, written, caplog  # noqa: F811 - a fixture
):  # fmt: skip
    loaded = load(written(layout)[0])
    before = loaded.model.layers[1].mlp.down_proj.weight.detach().clone()
    with caplog.at_level("INFO"):
        _, layers = computed_by(loaded)
    assert {each.bits for products in layers for each in products} == {8}
    assert is_rounded_to_eight_bits(layers[1][DOWN].weight(), before)
    assert "rounded again, to eight bits: 14 (" in caplog.text
    assert f" {words})" in caplog.text


def test_w8a8_keeps_its_numbers_in_groups(written, caplog):  # noqa: F811 - a fixture
    folder, _, weights = written("w8a8")
    with caplog.at_level("INFO"):
        _, layers = computed_by(load(folder))
    for index, products in enumerate(layers):
        stored = weights[f"model.layers.{index}.mlp.down_proj"]
        torch.testing.assert_close(
            products[DOWN].weight(),
            stored.numbers,
            rtol=0,
            atol=float(stored.numbers.max()) * 2**-21,
        )
        assert torch.equal(products[DOWN].numbers()[0].int() - 128, stored.whole.int())
    assert "14 of its quantised weights are computed with its files' numbers" in caplog.text


def test_a_narrow_head_keeps_the_numbers_of_its_tokens(of_kinds):
    loaded, stored = of_kinds("Q4_1", lm_head="Q8_0")
    scored = [*range(1, 300, 3)]
    DraftHead(loaded, scored, vocabulary_size=320, name="a model")
    head, _ = computed_by(loaded)
    assert torch.equal(head.weight(), stored["lm_head.weight"][scored])


@pytest.mark.parametrize("change", ["a number", "another grid"])
def test_a_grid_that_does_not_give_its_weight_back_is_not_used(change, of_kinds, caplog):
    loaded, stored = of_kinds("Q4_1")
    first, second = (layer.mlp.down_proj for layer in loaded.model.layers)
    if change == "a number":
        with torch.no_grad():
            first.weight[-1, -1] += 0.4 * float(first.stored_as.grid.scales[-1, -1])
    else:
        first.stored_as = second.stored_as
    before = first.weight.detach().clone()
    with caplog.at_level("INFO"):
        _, layers = computed_by(loaded)
    assert is_rounded_to_eight_bits(layers[0][DOWN].weight(), before)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(layers[1][DOWN].weight(), stored[name])
    assert "14 of its quantised weights" in caplog.text
    assert "eight bits: 1 (Q4_1, whose scales do not give the weight)" in caplog.text


@pytest.mark.parametrize(
    ("layout", "kind", "dtype", "made"),
    [
        ("w8a8", "w8a8", "float32", Int8Product),
        ("awq", "w4a16", "bfloat16", W4A16Product),
        ("w8a8", "int8", "float32", Int8Product),
    ],
)
def test_other_products_do_not_use_such_a_grid_either(
    layout, kind, dtype, made, written  # noqa: F811 - a fixture
):  # fmt: skip
    loaded = load(written(layout)[0], dtype=dtype)
    first, second = (layer.mlp.down_proj for layer in loaded.model.layers)
    first.stored_as = second.stored_as
    of_another = second.stored_as.grid.scales[:, 0]
    before = first.weight.detach().clone()
    _, layers = computed_by(loaded, kind=kind)
    assert isinstance(layers[1][DOWN], made)
    if kind == "int8":
        assert torch.equal(layers[1][DOWN].scales, of_another)
        assert (layers[0][DOWN].weight() - before).abs().max() <= before.abs().max() / 250
    else:
        assert not isinstance(layers[0][DOWN], made)
        assert torch.equal(layers[0][DOWN].weight(), before)


@pytest.mark.parametrize("layout", ["w8a16 with zero points", "gptq in eight bits"])
def test_eight_bits_of_a_file_that_are_not_signed_are_rounded_again_with_weights_int8(
    layout, written  # noqa: F811 - a fixture
):  # fmt: skip
    """These products know no zero points."""
    loaded = load(written(layout)[0])
    before = loaded.model.layers[0].mlp.down_proj.weight.detach().clone()
    _, layers = computed_by(loaded, kind="int8")
    off = (layers[0][DOWN].weight() - before).abs()
    assert bool((off <= before.abs().amax(1, keepdim=True) / 250).all())


@pytest.mark.parametrize("row", [0, 300, 2999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grid_is_tried_with_every_row_and_number(row, dtype):
    """Of a weight that is read in several parts."""
    outputs, inputs = 3000, 256
    whole = (numbers(outputs, inputs) * 1000).long() % 16
    scales = numbers(outputs, 2, seed=1).half().float().abs() + 0.01
    grid = Grid(4, scales, -8 * scales)
    weight = (whole.view(outputs, 2, -1) * scales[..., None] - 8 * scales[..., None]).flatten(1)
    weight = weight.to(dtype)
    assert grid.gives_back(weight)
    assert torch.equal(grid.nearest(weight), whole.to(torch.uint8))
    for off in (weight[row, -1] + 0.3 * scales[row, -1], torch.nan, torch.inf):
        broken = weight.clone()
        broken[row, -1] = off
        assert not grid.gives_back(broken)
    assert not grid.gives_back(weight[:-1])
    assert not grid.gives_back(weight[:, :-1])


def test_loaders_that_do_not_ask_for_grids_keep_none(model, written, tmp_path):  # noqa: F811
    parts = GgufParts(kind="Q4_1")
    path = write_gguf(tmp_path / "model.gguf", model, build_tokenizer(320), parts)
    for each in (path, written("gptq")[0]):
        kept = [
            [hasattr(it, "stored_as") for it in load(each, **options).modules() if is_linear(it)]
            for options in ({"keeps_grids": False}, {})
        ]
        assert not any(kept[0])
        assert sum(kept[1]) >= 2 * LINEARS_OF_LAYER


def is_linear(module):
    return type(module) is nn.Linear


@torch.inference_mode()
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e-4, 1.0, 1e5, 1e38])
def test_weights_of_any_size_are_rounded_by_half_a_step(bits, size):
    """Numbers of 16 bits end at 65504, and have few digits below 6e-5."""
    weight = numbers(40, 128)
    weight /= weight.abs().max()
    product = GroupProduct(weight * size, None, bits=bits)
    groups = weight.view(40, -1, GROUP)
    steps = (groups.amax(-1) - groups.amin(-1)) / ((1 << bits) - 1)
    most = 0.75 * steps + 2**-9 * groups.abs().amax(-1)
    error = ((product.weight() / size) - weight).abs().view_as(groups)
    assert bool((error <= most[..., None]).all())
    if size != 1e-4:
        assert product.has_halves == (size == 1.0)


def test_a_few_tiny_groups_leave_a_weight_its_short_scales():
    weight = numbers(40, 128)
    weight[3, 32:64] *= 1e-12
    weight[5] = 0
    grid = rounding(weight, bits=4)
    assert torch.equal(grid.scales.half().float(), grid.scales)
