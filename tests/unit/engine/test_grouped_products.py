"""Products of weights in groups: a file's own numbers, and a row's bits whatever is beside it."""

from __future__ import annotations

import os
from shutil import which

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from paceline_engine.model_files.files import find_model_files
from paceline_engine.model_files.gguf_file import GgufFile
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.torch_backend import compiled_steps, compiler
from paceline_engine.torch_backend.compiled_products import FewProduct, FewRows, use_few_rows
from paceline_engine.torch_backend.compiled_steps import compile_steps
from paceline_engine.torch_backend.compiler import has_tiles
from paceline_engine.torch_backend.grouped_linear import GROUP, GroupProduct, takes_groups
from paceline_engine.torch_backend.int8_linear import Int8Product, has_vnni
from paceline_engine.torch_backend.invariant import InvariantRows
from paceline_engine.torch_backend.model_loading import load_model
from paceline_engine.torch_backend.stored_weights import stored_weights
from paceline_engine.torch_backend.transformers import TransformersBackend
from paceline_engine.torch_backend.weight_grids import Grid
from support.device import on_a_cpu
from support.draft_vocabularies import narrowed
from support.gguf_files import GgufParts, write_gguf
from support.tiny_models import build_tokenizer
from unit.engine.test_compiled_products import numbers
from unit.engine.test_compiled_steps import (
    BIASED,
    LENGTH,
    SIZES,
    Computed,
    check_rows_are_alone,
    logprobs,
)
from unit.engine.test_quantised_folders import tokenizer, written  # noqa: F401 - fixtures

# Both sides of a panel of 16 outputs; one group, and an odd number of them.
SHAPES = [(1, 32), (16, 96), (37, 64), (130, 160), (576, 1536)]
MOST_ROWS = 40
ROWS_IN_TILES = 20  # of which 16 are multiplied in a tile, where there are tiles
NEEDS_PRODUCTS = True
# So that blocks of 256 numbers divide all widths.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}

pytestmark = pytest.mark.skipif(
    not has_vnni() or torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="the processor has no AVX-512 with VNNI",
)


def compiled(product, steps):
    assert use_few_rows([product], steps, large={}) == 1
    return product


def in_groups(weight, bits=4, *, has_halves=True):
    """A weight whose groups have such scales, and the grid of its numbers."""
    outputs, inputs = weight.shape
    whole = (weight * 1000).long() % (1 << bits)
    scales = numbers(outputs, inputs // GROUP, seed=3).half().float()
    least = numbers(outputs, inputs // GROUP, seed=4).half().float()
    if not has_halves:
        scales, least = scales * 1.001, least * 1.001
    found = whole.view(outputs, -1, GROUP) * scales[..., None] + least[..., None]
    return found.view(outputs, inputs), Grid(bits, scales, least), whole


def rounded(hidden):
    """Rows as they are rounded: whole numbers, and the scales of groups."""
    groups = hidden.view(len(hidden), -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return (groups * (127 / largest)).round(), largest * (1 / 127)


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_halves", [True, False])
def test_a_product_is_what_its_formula_says(shape, bits, has_halves, steps, threads):
    weight, grid, whole = in_groups(numbers(*shape), bits, has_halves=has_halves)
    bias = numbers(shape[0], seed=1)
    product = compiled(GroupProduct(weight, bias, grid), steps)
    assert (product.bits, product.has_halves) == (bits, has_halves)
    found, scales, least = product.numbers()
    assert torch.equal(found, whole)
    assert torch.equal(scales, grid.scales)
    assert torch.equal(least, grid.least)
    assert torch.equal(product.weight(), weight)
    hidden = numbers(MOST_ROWS, shape[1], seed=2)
    rows, row_scales = rounded(hidden)
    exact = (rows * row_scales.double()).view(hidden.shape)
    expected = exact @ weight.double().t() + bias
    # Of as many roundings of float32 as a sum has groups, each of at most the sum of all sizes.
    most = (exact.abs() @ (2 * weight.double().abs() + grid.least.abs().max()).t()) + bias.abs()
    error = (product(hidden) - expected).abs() / most
    assert float(error.max()) <= 4 * (shape[1] // GROUP + 1) * 2**-24


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_rows_bits_depend_on_this_row_alone(shape, bits, steps):
    product = compiled(GroupProduct(numbers(*shape), numbers(shape[0], seed=1), bits=bits), steps)
    hidden = numbers(150, shape[1], seed=2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = product(hidden)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(product(hidden), whole)
            for rows in range(1, MOST_ROWS + 1):
                assert torch.equal(product(hidden[:rows]), whole[:rows]), rows
                assert torch.equal(product(hidden[-rows:]), whole[-rows:]), rows
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
@pytest.mark.parametrize("bits", [4, 8])
def test_a_processor_without_tiles_computes_the_same_bits(bits, steps, monkeypatch):
    product = compiled(GroupProduct(numbers(130, 160), None, bits=bits), steps)
    hidden = numbers(150, 160, seed=2)
    expected = product(hidden)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    without = compile_steps(products=True)
    assert torch.equal(compiled(product, without)(hidden), expected)


def old_compiler(folder, *, lacks):
    """Write a compiler that takes an option, and whose assembler does not know the instructions."""
    checks = 'case "$*" in *-fsyntax-only*) exit 0;; esac'
    fails = f"case \"$*\" in *{lacks}*) echo 'Error: no such instruction' >&2; exit 1;; esac"
    for name in ("old-cc", "cc"):
        (folder / name).write_text(f'#!/bin/sh\n{checks}\n{fails}\nexec {which("cc")} "$@"\n')
        (folder / name).chmod(0o755)


@torch.inference_mode()
@pytest.mark.skipif(not has_tiles(), reason="the processor has no tiles, or may not use them")
def test_an_assembler_without_tiles_gives_the_same_bits_and_is_told_once(
    steps, tmp_path, monkeypatch, caplog
):
    product = compiled(GroupProduct(numbers(130, 160), None), steps)
    hidden = numbers(150, 160, seed=2)
    expected = product(hidden)
    old_compiler(tmp_path, lacks="-mamx")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with caplog.at_level("INFO"):
        without = compile_steps(["old-cc"], products=True)
    assert torch.equal(compiled(product, without)(hidden), expected)
    (told,) = caplog.messages
    assert "without AMX" in told
    assert "no such instruction" in told


def test_tiles_for_other_numbers_than_whole_ones_are_not_used(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_int8": False})
    assert not has_tiles()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_int8": True})
    assert has_tiles()


@on_a_cpu
def test_an_assembler_without_vnni_compiles_the_steps_alone(
    model, steps, tmp_path, monkeypatch, caplog
):
    del steps
    model.save_pretrained(tmp_path / "model")
    build_tokenizer(SIZES["vocab_size"]).save(str(tmp_path / "model" / "tokenizer.json"))
    old_compiler(tmp_path, lacks="-mavx512vnni")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with caplog.at_level("INFO"):
        TransformersBackend(str(tmp_path / "model"), weights="int8")
    assert "its products are not compiled: " in caplog.text
    assert "without AMX" not in caplog.text
    assert "what it computes between products is compiled" in caplog.text
    with pytest.raises(ModelLoadError, match="no such instruction"):
        TransformersBackend(str(tmp_path / "model"), weights="int4")


@torch.inference_mode()
@pytest.mark.parametrize("bits", [4, 8])
def test_other_weights_are_rounded_from_their_least_number_to_their_largest(bits, steps):
    weight = numbers(70, 128)
    weight[3], weight[4, 32:64] = 0, 0.7
    product = compiled(GroupProduct(weight, None, bits=bits), steps)
    groups = weight.view(70, -1, GROUP)
    steps_of = (groups.amax(-1) - groups.amin(-1))[..., None] / ((1 << bits) - 1)
    # Half a step, and what scales and least numbers are rounded by: 2^-11 of each.
    bound = steps_of / 2 + 2**-11 * groups.abs().amax(-1)[..., None] * 3
    assert bool(((product.weight() - weight).view_as(groups).abs() <= bound).all())
    assert torch.equal(product(numbers(3, 128))[:, 3], torch.zeros(3))
    hidden = numbers(9, 128, seed=1)
    exact = functional.linear(hidden, weight)
    assert float((product(hidden) - exact).norm() / exact.norm()) < (0.1 if bits == 4 else 0.01)


@torch.inference_mode()
def test_rows_of_zeros_rows_that_lie_apart_and_none_are_numbers(steps):
    product = compiled(GroupProduct(numbers(20, 64), None), steps)
    for rows in (2, ROWS_IN_TILES):
        assert torch.equal(product(torch.zeros(rows, 64)), torch.zeros(rows, 20))
    hidden = numbers(64, 5).t()
    assert torch.equal(product(hidden), product(hidden.contiguous()))
    assert product(torch.empty(0, 64)).shape == (0, 20)
    assert torch.equal(product.of_any_rows(hidden[None])[0], product(hidden))


@torch.inference_mode()
@pytest.mark.parametrize("rows", [9, ROWS_IN_TILES])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none_in_its_row(value, rows, steps):
    product = compiled(GroupProduct(numbers(20, 96), None), steps)
    hidden = numbers(rows, 96, seed=1)
    expected = product(hidden)
    hidden[4, 50] = value
    actual = product(hidden)
    assert not actual[4].isfinite().any()
    others = [row for row in range(rows) if row != 4]
    assert torch.equal(actual[others], expected[others])


@pytest.mark.parametrize("count", [1, 5, 16, 66])
@pytest.mark.parametrize("row", [0, -1])
def test_code_that_is_off_by_the_least_is_refused(count, row, steps, monkeypatch):
    own = FewProduct.__call__

    def off(self, hidden):
        found = own(self, hidden)
        if len(hidden) == count:
            found[row, -1] = found[row, -1].nextafter(torch.tensor(torch.inf))
        return found

    monkeypatch.setattr(FewProduct, "__call__", off)
    with pytest.raises(ModelLoadError, match="computes something else"):
        use_few_rows([GroupProduct(numbers(70, 96), None)], steps, large={})


def test_threads_that_nobody_knows_are_refused(steps, monkeypatch):
    del steps
    monkeypatch.setattr(compiled_steps, "_OPENMP", ("no_function_of_this_name",))
    with pytest.raises(ModelLoadError, match="unknown OpenMP"):
        use_few_rows([GroupProduct(numbers(64, 64), None)], compile_steps(products=True), large={})


@torch.inference_mode()
def test_many_rows_leave_the_interpreters_lock_to_others(steps, monkeypatch):
    product, taken = compiled(GroupProduct(numbers(960, 576), None), steps), []
    own = FewRows.library
    monkeypatch.setattr(FewRows, "library", lambda *args: taken.append(own(*args)) or taken[-1])
    product(numbers(1, 576))
    product(numbers(1000, 576))
    assert taken == [*steps.libraries]


def test_a_weight_takes_five_bits_or_nine_and_is_held_once():
    product = GroupProduct(numbers(64, 64), None)
    kept = [each for each in vars(product).values() if isinstance(each, torch.Tensor)]
    assert kept == [product.packed]
    assert product.packed.nbytes == 64 * 64 * 5 // 8
    assert GroupProduct(numbers(64, 64), None, bits=8).packed.nbytes == 64 * 64 * 9 // 8


def test_which_weights_can_be_in_groups():
    of_64, of_48 = (Grid(4, torch.ones(8, n), torch.zeros(8, n)) for n in (3, 4))
    assert takes_groups(torch.Size([8, 192]))
    assert takes_groups(torch.Size([8, 192]), of_64)
    assert not takes_groups(torch.Size([8, 192]), of_48)
    assert not takes_groups(torch.Size([8, 48]))


# Threads divide the rows of each layer alike, whatever its settings are.
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("threads", "settings"),
    [
        (1, BIASED),
        (2, {}),
        (2, {"num_key_value_heads": 3}),
        pytest.param(1, {}, marks=pytest.mark.long),
        pytest.param(1, {"num_key_value_heads": 3}, marks=pytest.mark.long),
        pytest.param(2, BIASED, marks=pytest.mark.long),
    ],
    indirect=["threads"],
    ids=str,
)
def test_layers_have_the_bits_of_the_operators_and_of_their_rows_alone(settings, steps):
    model = Computed(settings, kind="int4")
    assert use_few_rows(model.products, steps, large=model.large) == len(model.products)
    whole = model.logits([[LENGTH]], rows=InvariantRows)
    for compiled_too in (False, True):
        if compiled_too:
            assert model.decoder.use_steps(steps)
            assert model.decoder.runs
        check_rows_are_alone(model, whole, sizes=(1, 2, 5, 7, 20, 35, 70))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **WIDE}))


def served(path):
    backend = TransformersBackend(str(path), weights="int4", invariant=True)
    assert backend.description.dtype == "int4"
    assert backend.description.is_invariant
    return backend


def products_of(backend):
    """The products of a backend's model by the library's names."""
    layers = backend.decoder.layers
    return {
        f"model.layers.{index}.{name}.weight": layer.products[which]
        for index, layer in enumerate(layers)
        for which, name in ((1, "self_attn.o_proj"), (3, "mlp.down_proj"))
    }


@pytest.mark.parametrize(
    ("kind", "bits", "has_halves"),
    [
        ("Q4_0", 4, True),
        ("Q4_1", 4, True),
        ("Q4_K", 4, False),
        ("Q5_0", 8, True),
        ("Q5_1", 8, True),
        ("Q5_K", 8, False),
        ("Q8_0", 8, True),
    ],
)
def test_a_gguf_files_numbers_are_kept(kind, bits, has_halves, model, steps, tmp_path):
    """Bit for bit, also where rows are put in another order."""
    del steps
    parts = GgufParts(kind=kind)
    path = write_gguf(tmp_path / "model.gguf", model, build_tokenizer(SIZES["vocab_size"]), parts)
    found = products_of(served(path))
    assert len(found) == 2 * SIZES["num_hidden_layers"]
    for name, product in found.items():
        assert (product.bits, product.has_halves) == (bits, has_halves)
        assert torch.equal(product.weight(), parts.numbers[name])
    loaded = load_model(find_model_files(str(path)), dtype="float32", keeps_grids=True)
    for name, module in loaded.named_modules():
        if type(module) is nn.Linear:
            again = GroupProduct(module.weight.detach(), None, module.stored_as.grid).weight()
            assert torch.equal(again, parts.numbers[f"{name}.weight"])


def test_a_tied_head_has_the_embeddings_numbers(steps, tmp_path):
    del steps
    tied = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    parts = GgufParts(kind="Q8_0")
    path = write_gguf(tmp_path / "model.gguf", tied, build_tokenizer(SIZES["vocab_size"]), parts)
    head, *_ = served(path).decoder.replace_products(tied, lambda product, _: product)
    assert head.bits == 8
    assert torch.equal(head.weight(), parts.numbers["lm_head.weight"])


@pytest.mark.parametrize(
    "layout",
    [
        *("w4a16", "w4a16 with zero points", "gptq", "awq", "gptq, second format"),
        *("w8a8", "w8a8, one scale", "w8a16", "w8a16 with zero points", "gptq in eight bits"),
    ],
)
def test_a_quantised_folders_numbers_are_kept(layout, written, steps):  # noqa: F811 - a fixture
    compared = 0
    folder = str(written(layout)[0])
    files = find_model_files(folder)
    with torch.inference_mode():
        for _, weight, stored in stored_weights(files, files.quantisation, dtype=torch.float32):
            if stored is None or not takes_groups(weight.shape, stored.grid):
                continue
            product = compiled(GroupProduct(weight, None, stored.grid), steps)
            assert product.bits == stored.grid.bits
            torch.testing.assert_close(product.weight(), weight, rtol=0, atol=1e-6)
            compared += 1
    assert compared
    backend = TransformersBackend(folder, weights="int4")
    assert backend.description.dtype == "int4"


def test_a_model_in_floating_point_gets_four_bits_and_its_head_eight(steps):
    del steps
    model = Computed(kind="int4")
    head, *others = model.products
    assert head.bits == 8
    assert {each.bits for each in others} == {4}


def test_widths_that_groups_do_not_divide_get_eight_bits():
    model = Computed({"intermediate_size": 144}, kind="int4")
    kinds = [type(each) for each in model.decoder.layers[0].products]
    assert kinds == [GroupProduct, GroupProduct, GroupProduct, Int8Product]


@on_a_cpu
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "bfloat16"}, "leave --dtype alone"),
        ({"compiled": False}, "leave out --no-compile-steps"),
        ({"invariant": True, "threads": 3}, "leave --device and --threads alone"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_in_four_bits_is_refused(options, reason, tiny_pair):
    with pytest.raises(ModelLoadError, match=reason):
        TransformersBackend(str(tiny_pair.target), weights="int4", **options)


@on_a_cpu
def test_what_a_machine_lacks_for_four_bits_is_named(tiny_pair, monkeypatch):
    def refusal():
        with pytest.raises(ModelLoadError) as caught:
            TransformersBackend(str(tiny_pair.target), weights="int4")
        return str(caught.value)

    with monkeypatch.context() as patch:
        patch.setenv("PATH", os.devnull)
        assert "cannot be: there is no C compiler (cc, gcc, clang). Mend this" in refusal()
    with monkeypatch.context() as patch:
        patch.setattr("paceline_engine.torch_backend.grouped_linear.has_vnni", lambda: False)
        assert "AVX-512 and VNNI" in refusal()
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_FLAGS", ("--no-such-option",))
        assert "cannot be: " in refusal()
    monkeypatch.setattr(
        "paceline_engine.torch_backend.transformers.usable_device",
        lambda *_, **__: torch.device("cuda"),
    )
    assert "computes on a CPU" in refusal()


def test_a_model_in_four_bits_is_close_to_the_model_and_another_one(tiny_pair, steps):
    del steps
    plain = TransformersBackend(str(tiny_pair.target))
    four = served(tiny_pair.target)
    assert four.description.fingerprint != plain.description.fingerprint
    assert logprobs(four)[0] != logprobs(plain)[0]


def test_the_librarys_modules_compute_in_four_bits_too(model, steps, tmp_path, monkeypatch):
    del steps
    path = tmp_path / "model.gguf"
    write_gguf(path, model, build_tokenizer(SIZES["vocab_size"]), GgufParts(kind="Q4_1"))
    expected = logprobs(served(path))
    monkeypatch.setattr("paceline_engine.torch_backend.decoders.can_fuse", lambda _: False)
    backend = TransformersBackend(str(path), weights="int4")
    assert logprobs(backend) != logprobs(TransformersBackend(str(path)))
    assert logprobs(backend) == pytest.approx(expected, abs=0.05)


def test_a_narrow_head_is_in_groups_too(tiny_pair, steps, tmp_path):
    del steps
    scored = [*range(0, 300, 3)]
    folder = narrowed(tiny_pair.drafter, tmp_path / "narrow", token_ids=scored)
    text = ModelText(TransformersBackend(str(folder), weights="int4"), SessionSpec(64))
    drafted = text.draft_chain([5, 6, 7], count=8)
    assert len(drafted) == 8
    assert {*drafted} <= {*scored}


def test_groups_are_read_from_the_files_own_scales(model, tmp_path):
    parts = GgufParts(kind="Q4_1")
    path = write_gguf(tmp_path / "model.gguf", model, build_tokenizer(320), parts)
    file = GgufFile.read(path)
    numbers_, groups = file.weights_in_groups("blk.0.ffn_down.weight")
    least = numbers_.reshape(256, -1, GROUP).min(-1)
    assert groups.bits == 4
    assert abs(groups.least - least).max() < 1e-3
    assert file.weights_in_groups("output_norm.weight")[1] is None
