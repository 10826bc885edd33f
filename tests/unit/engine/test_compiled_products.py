"""Compiled products of few rows have oneDNN's bits, or are not used."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.backend import ForwardInterrupted
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.torch_backend import compiled_layers, compiled_steps
from paceline_engine.torch_backend.compiled_layers import LayerRun
from paceline_engine.torch_backend.compiled_products import (
    FewLayer,
    FewProduct,
    FewRows,
    few_row_products,
    use_few_rows,
)
from paceline_engine.torch_backend.compiled_steps import compile_steps
from paceline_engine.torch_backend.int8_linear import (
    FEW_ROWS,
    INT8_BLOCKS,
    Int8Product,
    check_exact,
    has_vnni,
    large_product,
)
from paceline_engine.torch_backend.invariant import InvariantRows
from paceline_engine.torch_backend.shared_rows import SharedRows
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.tiny_models import build_tokenizer
from unit.engine.test_compiled_steps import (
    BIASED,
    MKL_ADDS_ALIKE,
    SIZES,
    AttendedByTorch,
    Computed,
    logprobs,
)

# Both sides of a block of 64 outputs and 64 inputs, of a vector of 16, and of few rows.
SHAPES = [(48, 48), (1, 16), (64, 64), (70, 96), (129, 160), (576, 1536)]
PIECES = (
    [1, 2, 3, 4, 5, 6, 7, 12, 13, FEW_ROWS, FEW_ROWS + 1],
    [9, 1, 2, 1, 1, 1, 1, 2, 1, 3, 1],
)

pytestmark = pytest.mark.skipif(not has_vnni(), reason="the processor has no VNNI")


NEEDS_PRODUCTS = True


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def use(products, steps):
    """Let products compute few rows in compiled code, as at load; return how many do."""
    return use_few_rows(products, steps, large=check_exact(products))


def compiled(product, steps):
    assert use([product], steps) == 1
    assert isinstance(product.few, FewProduct)
    return product


@torch.inference_mode()
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_has_the_bits_of_onednn_for_each_number_of_rows(shape, has_bias, steps):
    product = compiled(
        Int8Product(numbers(*shape), numbers(shape[0], seed=1) if has_bias else None), steps
    )
    hidden = numbers(FEW_ROWS, shape[1], seed=2) * torch.logspace(-4, 4, FEW_ROWS)[:, None]
    hidden[1] = 0
    expected = product.by_onednn(hidden)
    for count in range(FEW_ROWS + 1):
        assert torch.equal(product(hidden[:count]), expected[:count])
        assert torch.equal(product(hidden[FEW_ROWS - count :]), expected[FEW_ROWS - count :])


@torch.inference_mode()
@pytest.mark.parametrize("inputs", [64, 512])
@pytest.mark.parametrize("number", [127, -127, -128])
@pytest.mark.parametrize("sign", [1, -1])
def test_no_sum_stops_at_a_largest_number(inputs, number, sign, steps):
    """Two products of 255 and 127 are beyond 16 bits."""
    weight = torch.full((64, inputs), float(number))
    product = compiled(Int8Product(weight, None, torch.ones(64, 1)), steps)
    hidden = torch.full((7, inputs), 127.0 * sign)
    assert torch.equal(product(hidden), torch.full((7, 64), 127.0 * sign * number * inputs))


@torch.inference_mode()
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("shape", [(64, 1536), (576, 2048), (96, 8192)], ids=str)
def test_sums_beyond_what_floats_have_are_rounded_alike_with_any_number_of_rows(
    shape, is_compiled, steps
):
    """As weights of one sign have them: some of oneDNN's code rounds their parts."""
    weight = 127.0 - numbers(*shape).abs().mul(10).round().clamp(max=40)
    product = Int8Product(weight, None, torch.ones(shape[0], 1))
    check_exact([product])
    if is_compiled:
        product = compiled(product, steps)
    hidden = numbers(64, shape[1], seed=1)
    whole = product(hidden)
    for count in range(1, 64):
        assert torch.equal(product(hidden[:count]), whole[:count])


@torch.inference_mode()
def test_rows_are_filled_up_only_where_sums_may_be_rounded():
    for is_exact, total in ((True, (1 << 24) // 255), (False, (1 << 24) // 255 + 1)):
        weight = torch.full((1, 1536), float(total // 1536))
        weight[0, : total % 1536] += 1
        for sign in (1, -1):
            product = Int8Product(sign * weight, None, torch.ones(1, 1))
            check_exact([product])
            alike = large_product(product.shape).blocks
            assert product.blocks == (INT8_BLOCKS if is_exact else alike)


@torch.inference_mode()
def test_what_is_no_number_stays_in_its_row(steps):
    product = compiled(Int8Product(numbers(70, 96), None), steps)
    hidden = numbers(9, 96, seed=1)
    expected = product(hidden)
    hidden[4, 17] = torch.nan
    actual = product(hidden)
    assert actual[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(actual[others], expected[others])


@torch.inference_mode()
def test_rows_may_lie_apart(steps):
    product = compiled(Int8Product(numbers(70, 96), None), steps)
    hidden = numbers(96, 5).t()
    assert torch.equal(product(hidden), product.by_onednn(hidden))
    assert torch.equal(product.of_any_rows(hidden[None])[0], product.by_onednn(hidden))


@torch.inference_mode()
def test_more_rows_are_computed_by_onednn(steps, monkeypatch):
    product = compiled(Int8Product(numbers(70, 96), None), steps)
    monkeypatch.setattr(product, "few", lambda hidden: pytest.fail(f"{len(hidden)} rows"))
    hidden = numbers(FEW_ROWS + 1, 96)
    assert torch.equal(product(hidden), product.by_onednn(hidden))
    with pytest.raises(pytest.fail.Exception):
        product(hidden[1:])


@pytest.mark.parametrize("shape", [(48, 40), (37, 33), (64, 8)], ids=str)
def test_widths_that_vectors_do_not_divide_are_left_to_onednn(shape):
    assert few_row_products([Int8Product(numbers(*shape), None)]) == []


def test_a_weight_that_torch_does_not_show_is_left_to_onednn(monkeypatch):
    product = Int8Product(numbers(64, 64), None)
    assert few_row_products([product]) == [product]
    monkeypatch.setattr(Int8Product, "packed_bytes", 64 * 64 - 1)
    assert few_row_products([product]) == []


@torch.inference_mode()
def test_each_weight_that_lies_in_another_way_is_left_to_onednn(steps, monkeypatch):
    """Also the second of a shape, of which one weight was proved."""
    products = [Int8Product(numbers(70, 96, seed=seed), None) for seed in range(3)]
    first, own = products[0].packed_at, Int8Product.packed_at.fget
    monkeypatch.setattr(
        Int8Product,
        "packed_at",
        property(lambda self: first if self is products[1] else own(self)),
    )
    assert use(products, steps) == 2
    assert [each.few is not None for each in products] == [True, False, True]
    hidden = numbers(3, 96)
    assert torch.equal(products[1](hidden), products[1].by_onednn(hidden))


@pytest.mark.parametrize("count", [1, 5, 12, FEW_ROWS])
def test_a_product_that_is_off_by_the_least_is_not_used(count, steps, monkeypatch):
    own = FewProduct.__call__

    def off(self, hidden):
        found = own(self, hidden)
        if len(hidden) == count:
            found[-1, -1] = found[-1, -1].nextafter(torch.tensor(torch.inf))
        return found

    monkeypatch.setattr(FewProduct, "__call__", off)
    assert use([Int8Product(numbers(70, 96), None)], steps) == 0


def test_with_threads_that_nobody_knows_onednn_computes(steps, monkeypatch, caplog):
    del steps
    monkeypatch.setattr(compiled_steps, "_OPENMP", ("no_function_of_this_name",))
    product = Int8Product(numbers(64, 64), None)
    assert use([product], compile_steps(products=True)) == 0
    assert product.few is None
    assert "unknown OpenMP" in caplog.text


@dataclass
class Few:
    """What a layer's products are to a run of layers: their size."""

    byte_count: int
    at: int = 0
    few: object = None


def test_layers_of_unlike_size_are_divided_so_that_no_run_reads_more_than_a_millisecond_takes(
    monkeypatch,
):
    """A layer that is larger than that is a run of its own."""
    monkeypatch.setattr(compiled_layers, "_RUN_BYTES", 10)
    attention = SimpleNamespace(at=0, heads=1, width=32)

    def depths(*sizes):
        layers = [
            SimpleNamespace(
                few=Few(each), can_attend=True, attention=attention, agreeing_counts=frozenset()
            )
            for each in sizes
        ]
        return [run.depth for run in compiled_layers.runs_of(layers)]

    assert depths(4, 4, 2, 1, 9, 9, 1) == [3, 2, 2]
    assert depths(4, 4, 3) == [2, 1]
    assert depths(30, 1, 30, 30) == [1, 1, 1, 1]
    assert depths(1, 9, 1, 1, 1, 7, 1) == [2, 4, 1]
    assert depths() == []


@torch.inference_mode()
@pytest.mark.usefixtures("threads")
def test_no_thread_computes_while_nobody_asks(steps):
    product = compiled(Int8Product(numbers(960, 576), None), steps)
    for _ in range(20):
        product(numbers(1, 576))
    time.sleep(0.3)  # torch's threads look out for work that long, as after its own operators
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def few_rows_of(model, steps):
    """Let a model in eight bits compute few rows in compiled code."""
    products = [each for layer in model.decoder.layers for each in layer.products]
    assert use(few_row_products(products), steps) == len(products)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("settings", [{}, BIASED, {"num_key_value_heads": 3}], ids=str)
@pytest.mark.parametrize("rows", [AttendedByTorch, InvariantRows])
def test_logits_have_the_bits_of_the_operators(settings, rows, steps):
    model = Computed(settings, kind="int8")
    expected = model.logits(PIECES, rows=rows)
    few_rows_of(model, steps)
    assert torch.equal(model.logits(PIECES, rows=rows), expected)
    assert model.decoder.use_steps(steps)
    assert torch.equal(model.logits(PIECES, rows=rows), expected)


@pytest.mark.usefixtures("threads")
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(steps):
    model = Computed(kind="int8")
    few_rows_of(model, steps)
    assert model.decoder.use_steps(steps)
    length = 140
    whole = model.logits([[length]], rows=InvariantRows)
    for size in (1, 2, 5, 7, 20, 35, 70):
        pieces = [[size] * (length // size)]
        assert torch.equal(model.logits(pieces, rows=InvariantRows), whole), size
        beside = [*pieces, [3] * (length // size)]
        together = model.logits(beside, rows=InvariantRows)
        own = [part[:size] for part in torch.split(together, size + 3)]
        assert torch.equal(torch.cat(own), whole), size


@pytest.fixture
def calls(monkeypatch):
    """The calls of compiled code that compute few rows: of one layer, or of so many."""
    found, own_run = [], LayerRun.forward
    for name in ("before", "after"):
        own = getattr(FewLayer, name)

        def told(*arguments, own=own, name=name):
            found.append(name)
            return own(*arguments)

        monkeypatch.setattr(FewLayer, name, told)

    def told_run(run, *arguments):
        found.append(run.depth)
        return own_run(run, *arguments)

    monkeypatch.setattr(LayerRun, "forward", told_run)
    return found


def let_all_agree(monkeypatch):
    """Take compiled attention for torch's, whose bits it has not on each processor."""
    counts = frozenset(range(4, 65, 4))
    monkeypatch.setattr(compiled_layers, "agreeing_counts", lambda *_, **__: counts)


def all_compiled(steps):
    model = Computed(kind="int8")
    few_rows_of(model, steps)
    assert model.decoder.use_steps(steps)
    return model


@pytest.mark.parametrize("rows", [SharedRows, InvariantRows])
@pytest.mark.parametrize(("bytes_of_layers", "depths"), [(3, [3]), (2.5, [2, 1]), (0.5, [1, 1, 1])])
def test_layers_of_few_rows_are_computed_in_calls_of_a_millisecond(
    rows, bytes_of_layers, depths, steps, calls, monkeypatch
):
    model = Computed(kind="int8")
    expected = model.logits([[3, FEW_ROWS]], rows=rows)
    few_rows_of(model, steps)
    layer_bytes = sum(each.shape.numel() for each in model.decoder.layers[0].products)
    monkeypatch.setattr(compiled_layers, "_RUN_BYTES", int(bytes_of_layers * layer_bytes))
    if not MKL_ADDS_ALIKE:
        let_all_agree(monkeypatch)
    assert model.decoder.use_steps(steps)
    calls.clear()
    actual = model.logits([[3, FEW_ROWS]], rows=rows)
    assert calls == depths * 2
    if rows is InvariantRows and MKL_ADDS_ALIKE:
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0.1)
    calls.clear()
    model.logits([[FEW_ROWS + 1]], rows=rows)
    assert calls == []


def test_several_layers_leave_the_interpreters_lock_to_others(steps, monkeypatch):
    model, taken = all_compiled(steps), []
    holding, yielding = steps.libraries
    assert isinstance(holding, ctypes.PyDLL)
    assert not isinstance(yielding, ctypes.PyDLL)
    own = FewRows.yielding.fget
    monkeypatch.setattr(FewRows, "yielding", property(lambda few: taken.append(1) or own(few)))
    monkeypatch.setattr(FewRows, "library", lambda *_: pytest.fail("it may hold the lock"))
    model.logits([[3]], rows=SharedRows)
    assert taken == [1]
    assert own(model.decoder.layers[0].compiled.few.few) is yielding


def test_around_torchs_attention_a_layer_takes_two_calls(steps, calls):
    model = all_compiled(steps)
    calls.clear()
    model.logits([[3, FEW_ROWS]], rows=AttendedByTorch)
    assert calls == ["before", "after"] * SIZES["num_hidden_layers"] * 2


class Reader:
    """What reads rows between layers."""

    def __init__(self):
        self.seen = []

    def take(self, layer, hidden):
        self.seen.append((layer, hidden.clone()))


def test_what_reads_rows_between_layers_is_told_of_each(steps, calls):
    model, found = Computed(kind="int8"), []
    for compiled_too in (False, True):
        if compiled_too:
            few_rows_of(model, steps)
            assert model.decoder.use_steps(steps)
            calls.clear()
        reader = Reader()
        model.logits(
            [[3]],
            rows=InvariantRows,
            prepare=lambda rows, own=reader: setattr(rows, "features", own),
        )
        found.append(reader.seen)
    assert [layer for layer, _ in found[1]] == [0, 1, 2]
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(*found, strict=True))
    assert "before" in calls


class Added:
    """Low-rank weights, which need a product's inputs."""

    def __init__(self):
        self.count = 0

    def add(self, *_, inputs, product):
        assert len(inputs) == len(product)
        self.count += 1

    def take(self, hidden):
        pass


@pytest.mark.parametrize("name", ["lora", "streams"])
def test_rows_with_low_rank_weights_are_computed_by_operators(name, steps, calls):
    model, added = all_compiled(steps), Added()
    calls.clear()
    model.logits([[3]], rows=InvariantRows, prepare=lambda rows: setattr(rows, name, added))
    assert calls == []
    assert added.count == 4 * SIZES["num_hidden_layers"]


def test_where_bits_count_runs_compute_no_rows_that_do_not_agree(steps, calls, monkeypatch):
    model = Computed(kind="int8")
    expected = model.logits([[3, 9]], rows=InvariantRows)
    few_rows_of(model, steps)
    monkeypatch.setattr(compiled_layers, "agreeing_counts", lambda *_, **__: frozenset({4}))
    assert model.decoder.use_steps(steps)
    calls.clear()
    assert torch.equal(model.logits([[3, 9]], rows=InvariantRows), expected)
    assert calls == [3, *["before", "after"] * SIZES["num_hidden_layers"]]


@pytest.mark.parametrize(("agreeing", "told"), [({16, 4, 12}, "4, 12, 16"), ((), "none")])
def test_the_log_says_with_which_numbers_of_rows_compiled_attention_has_torchs_bits(
    saved, steps, caplog, monkeypatch, agreeing, told
):
    del steps
    monkeypatch.setattr(compiled_layers, "agreeing_counts", lambda *_, **__: frozenset(agreeing))
    with caplog.at_level("INFO"):
        TransformersBackend(str(saved), weights="int8")
    expected = f"its bits are torch's for these numbers of rows: {told}"
    assert any(each.endswith(expected) for each in caplog.messages)


def test_rows_of_long_sequences_go_layer_by_layer(steps, calls, monkeypatch):
    model = all_compiled(steps)
    calls.clear()
    keys_of_the_second_forward = 2 * (3 + 2)
    numbers_of_a_key = SIZES["num_attention_heads"] * SIZES["head_dim"]
    enough = SIZES["num_hidden_layers"] * numbers_of_a_key * keys_of_the_second_forward
    for limit, expected in ((enough, [3]), (enough - 1, ["before", "after"] * 3)):
        monkeypatch.setattr(compiled_layers, "_RUN_ATTENDED", limit)
        model.logits([[3, 2]], rows=SharedRows)
        assert calls[-len(expected) :] == expected
        calls.clear()


@pytest.mark.parametrize(("read_at", "runs"), [(1, False), (3, True)])
def test_rows_are_kept_where_an_adapter_reads_them(read_at, runs, steps, calls, monkeypatch):
    if not MKL_ADDS_ALIKE:
        let_all_agree(monkeypatch)
    model, read = all_compiled(steps), []
    calls.clear()

    def prepare(rows):
        rows.read_at = read_at
        read.append(rows)

    model.logits([[3]], rows=InvariantRows, prepare=prepare)
    assert read[0].read.shape == (4, SIZES["hidden_size"])
    assert (calls == [3]) == runs


@pytest.mark.parametrize("name", ["before", "after"])
@pytest.mark.parametrize("rows", [1, FEW_ROWS])
def test_a_call_that_is_off_by_the_least_is_not_used(name, rows, steps, monkeypatch):
    own = getattr(FewLayer, name)

    def off(self, *arguments):
        found = own(self, *arguments)
        if rows in found.shape[:2]:
            last = found[..., -1, -1].flatten()[-1]
            found[..., -1, -1] = last.nextafter(last + 1)
        return found

    model = Computed(kind="int8")
    few_rows_of(model, steps)
    monkeypatch.setattr(FewLayer, name, off)
    assert not model.decoder.use_steps(steps)
    monkeypatch.undo()
    assert model.decoder.use_steps(steps)


def test_what_is_no_number_stays_none_in_a_layer(steps):
    model = Computed(kind="int8")
    few_rows_of(model, steps)
    assert model.decoder.use_steps(steps)
    with torch.inference_mode():
        model.decoder.layers[1].parts().norms[0].weight[5] = torch.nan
    assert model.logits([[3, 1]]).isnan().all()


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    build_tokenizer(SIZES["vocab_size"]).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_server_says_the_same_with_a_compiler_without_one_and_told_not_to(
    saved, steps, caplog, monkeypatch
):
    del steps
    with caplog.at_level("INFO"):
        every = TransformersBackend(str(saved), weights="int8", invariant=True)
        assert "few rows of 13 of 13 products are compiled" in caplog.text
        assert "between products is compiled" in caplog.text
        caplog.clear()
        told_not_to = TransformersBackend(
            str(saved), weights="int8", invariant=True, compiled=False
        )
        assert "compiled" not in caplog.text
        monkeypatch.setenv("PATH", os.devnull)
        without = TransformersBackend(str(saved), weights="int8", invariant=True)
        assert "there is no C compiler" in caplog.text
    assert every.description.fingerprint == without.description.fingerprint
    said = [logprobs(each) for each in (every, told_not_to, without)]
    assert len(said[0]) == 5
    assert said[0] == said[1] == said[2]


def test_a_forward_in_long_calls_can_be_given_up_and_counts_all_layers(saved, steps, monkeypatch):
    del steps
    monkeypatch.setattr(compiled_layers, "_RUN_BYTES", 1)
    backend = TransformersBackend(str(saved), weights="int8")
    text = ModelText(backend, SessionSpec(64))
    text.judge([1, 2, 3])
    assert backend.layers_run == SIZES["num_hidden_layers"]
    own = LayerRun.forward

    def interrupting(run, *arguments):
        text.interrupt.set()
        return own(run, *arguments)

    monkeypatch.setattr(LayerRun, "forward", interrupting)
    with pytest.raises(ForwardInterrupted):
        text.judge([1, 2, 3, 4])
    assert backend.layers_run == SIZES["num_hidden_layers"] + 1
    monkeypatch.undo()
    whole = TransformersBackend(str(saved), weights="int8")
    ModelText(whole, SessionSpec(64)).judge([1, 2, 3])
    assert whole.layers_run == SIZES["num_hidden_layers"]


def test_a_processor_without_vnni_compiles_steps_alone(saved, steps, caplog, monkeypatch):
    del steps
    monkeypatch.setattr("paceline_engine.torch_backend.decoders.has_vnni", lambda: False)
    with caplog.at_level("INFO"):
        TransformersBackend(str(saved), weights="int8")
    assert "few rows" not in caplog.text
    assert "between products is compiled" in caplog.text


def test_the_librarys_modules_compute_few_rows_so_too(saved, steps, caplog, monkeypatch):
    del steps
    expected = logprobs(TransformersBackend(str(saved), weights="int8", compiled=False))
    monkeypatch.setattr("paceline_engine.torch_backend.decoders.can_fuse", lambda _: False)
    library = logprobs(TransformersBackend(str(saved), weights="int8", compiled=False))
    with caplog.at_level("INFO"):
        backend = TransformersBackend(str(saved), weights="int8")
    assert "few rows of 22 of 22 products are compiled" in caplog.text
    assert logprobs(backend) == library
    assert library == pytest.approx(expected, abs=0.05)
