"""Compiled steps give the bits of torch's operators, or are not used."""

from __future__ import annotations

import ctypes
import os
from array import array
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Item, Judge
from paceline_engine.torch_backend import llama as llama_module
from paceline_engine.torch_backend.compiled_attention import agreeing_counts
from paceline_engine.torch_backend.compiled_steps import MOST_ROWS, Steps, compile_steps
from paceline_engine.torch_backend.compiler import StepsUnavailableError
from paceline_engine.torch_backend.decoders import take_sample
from paceline_engine.torch_backend.int8_linear import Int8Product
from paceline_engine.torch_backend.invariant import TILE, InvariantRows
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import Slabs
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.shared_rows import SharedRows
from paceline_engine.torch_backend.transformers import TransformersBackend
from paceline_engine.torch_backend.whole_products import replace_products
from support.tiny_models import build_tokenizer
from unit.engine.conftest import NEVER, chain, continuation

SIZES = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
BIASED = {"attention_bias": True, "mlp_bias": True}
_CPU = Path("/proc/cpuinfo")
MKL_ADDS_ALIKE = _CPU.exists() and "GenuineIntel" in _CPU.read_text()
"""Whether torch's attention adds as compiled attention does: on other processors MKL may not."""
FUNCTIONS = (
    *("norm_rows", "gate_rows", "turn_rows", "round_heads", "add_rows", "use_threads"),
    "attend_where_they_lie",
)
# Both sides of the numbers of rows at which something changes.
LENGTH = 140  # of a text that is computed in pieces
PIECES = ([1, 2, 3, 4, 5, 9, 15, 16, 17, 33, 64, 65], [7, 1, 2, 4, 5, 1, 1, 1, 64, 1, 66, 2])


def text(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SIZES["vocab_size"], (length,), generator=generator).tolist()


class AttendedByTorch(SharedRows):
    """Rows of which compiled code computes what is around attention."""

    spans = None


class Computed:
    """A model of random weights, by operators at first, and texts in any pieces."""

    def __init__(self, settings=None, *, kind="plain", make=LlamaForCausalLM, config=LlamaConfig):
        torch.manual_seed(3)
        model = make(config(**{**SIZES, **(settings or {})})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        with torch.inference_mode():
            self.shape = take_sample(model).shape
            self.decoder = FusedLlama(model, packs=kind == "packed")
            if kind in {"int8", "int4"}:
                self.products, self.large = replace_products(
                    "a model", model, self.decoder, kind=kind
                )

    @property
    def is_compiled(self):
        return all(layer.compiled is not None for layer in self.decoder.layers)

    @torch.inference_mode()
    def logits(self, pieces, *, rows=AttendedByTorch, prepare=lambda _: None):
        """Compute texts side by side, in such pieces."""
        slabs = Slabs(self.shape, tile=TILE)
        texts = [text(seed, sum(own)) for seed, own in enumerate(pieces)]
        caches = [KeyValues(slabs, reserve_length=len(own)) for own in texts]
        found = []
        for counts in zip(*pieces, strict=True):
            parts = [
                array("I", own[cache.length : cache.length + count])
                for own, cache, count in zip(texts, caches, counts, strict=True)
            ]
            for cache, count in zip(caches, counts, strict=True):
                cache.make_room(count)
            forward = rows(caches, parts, counts)
            prepare(forward)
            found.append(self.decoder(forward)[: sum(counts)])
            for cache, part in zip(caches, parts, strict=True):
                cache.extend(part)
        return torch.cat(found)


@pytest.mark.parametrize("kind", ["plain", "packed", "int8"])
@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, AttendedByTorch),
        (BIASED, InvariantRows),
        ({**BIASED, "num_key_value_heads": 3}, AttendedByTorch),
        ({"num_key_value_heads": 3}, InvariantRows),
    ],
    ids=str,
)
def test_logits_have_the_bits_of_the_operators(kind, settings, rows, steps):
    model = Computed(settings, kind=kind)
    expected = model.logits(PIECES, rows=rows)
    assert model.decoder.use_steps(steps)
    assert model.is_compiled
    assert torch.equal(model.logits(PIECES, rows=rows), expected)


def of_one_sign(config):
    """Build a model some of whose products have sums above 2^24 in eight bits."""
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.mlp.down_proj.weight, 0.005, 0.01)
    return model


def test_where_sums_are_rounded_steps_round_as_operators_do(steps):
    model = Computed({"intermediate_size": 1536}, kind="int8", make=of_one_sign)
    expected = model.logits(PIECES)
    assert model.decoder.use_steps(steps)
    assert torch.equal(model.logits(PIECES), expected)


def check_rows_are_alone(model, whole, *, sizes):
    """Check the logits of a text of `LENGTH` in pieces, alone and beside another text."""
    for size in sizes:
        pieces = [[size] * (LENGTH // size)]
        assert torch.equal(model.logits(pieces, rows=InvariantRows), whole), size
        beside = [*pieces, [3] * (LENGTH // size)]
        together = model.logits(beside, rows=InvariantRows)
        own = [part[:size] for part in torch.split(together, size + 3)]
        assert torch.equal(torch.cat(own), whole), size


@pytest.mark.usefixtures("threads")
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(steps):
    model = Computed(kind="int8")
    assert model.decoder.use_steps(steps)
    whole = model.logits([[LENGTH]], rows=InvariantRows)
    check_rows_are_alone(model, whole, sizes=(1, 2, 4, 5, 7, 20, 70))


def test_a_forward_of_more_rows_than_steps_have_room_for_has_the_same_bits(steps, monkeypatch):
    model, counts = Computed(kind="int8"), []
    assert model.decoder.use_steps(steps)
    for layer in model.decoder.layers:

        def counted(hidden, *rest, own=layer.compiled):
            counts.append(len(hidden))
            return own(hidden, *rest)

        layer.compiled = counted
    expected = model.logits([[70, 1, 8, 7]])
    assert {*counts} == {70, 1, 8, 7}
    counts.clear()
    monkeypatch.setattr(llama_module, "MOST_ROWS", 7)
    assert torch.equal(model.logits([[70, 1, 8, 7]]), expected)
    assert {*counts} == {1, 7}
    assert len(steps.scales) >= MOST_ROWS


@pytest.mark.parametrize("step", ["norm", "gate", "turn", "round_heads", "add"])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_step_that_is_off_by_the_least_is_not_used(step, rows, steps, monkeypatch):
    own = getattr(Steps, step)

    def off(self, *arguments, **options):
        result = own(self, *arguments, **options)
        if rows in result.shape[:2]:
            last = result.flatten()[-1:].clone()
            higher = last + 1 if last.dtype == torch.uint8 else last.nextafter(last + 1)
            result[(..., *[-1] * result.dim())] = higher[0]
        return result

    model = Computed(kind="int8")
    monkeypatch.setattr(Steps, step, off)
    assert not model.decoder.use_steps(steps)
    assert not model.is_compiled
    monkeypatch.undo()
    assert model.decoder.use_steps(steps)


def test_a_scale_that_is_off_is_not_used(steps, monkeypatch):
    own = Steps.round_heads

    def off(self, seen):
        result = own(self, seen)
        self.scales[0] *= 1.001
        return result

    model = Computed(kind="int8")
    monkeypatch.setattr(Steps, "round_heads", off)
    assert not model.decoder.use_steps(steps)


@pytest.mark.parametrize(
    "made",
    [
        lambda: Computed({"hidden_act": "gelu"}),
        lambda: Computed({"intermediate_size": 152}),
        lambda: Computed({"head_dim": 48}),
        lambda: Computed(make=Qwen3ForCausalLM, config=Qwen3Config),
    ],
    ids=["another activation", "another width", "heads of another width", "norms of heads"],
)
def test_what_steps_do_not_compute_is_left_to_operators(made, steps):
    model = made()
    expected = model.logits(PIECES)
    assert not model.decoder.use_steps(steps)
    assert not model.is_compiled
    assert torch.equal(model.logits(PIECES), expected)


@pytest.mark.parametrize(
    "settings", [{"intermediate_size": 152}, {"head_dim": 48}, {"hidden_size": 120}], ids=str
)
def test_widths_that_steps_cannot_read_never_come_to_them(settings):
    assert Computed().decoder.can_use_steps
    assert not Computed(settings).decoder.can_use_steps


def test_low_rank_weights_see_a_products_inputs_as_they_are(steps):
    class Seen:
        def __init__(self):
            self.inputs = []

        def add(self, layer, which, *, inputs, product):
            assert inputs.dtype == torch.float32
            self.inputs.append((layer, which, len(inputs)))
            product += 1

        def take(self, hidden):
            pass

    model, seen = Computed(kind="int8"), (Seen(), Seen())

    def prepare(rows, *, streams):
        rows.streams = streams

    expected = model.logits([[6, 1]], prepare=lambda rows: prepare(rows, streams=seen[0]))
    assert model.decoder.use_steps(steps)
    actual = model.logits([[6, 1]], prepare=lambda rows: prepare(rows, streams=seen[1]))
    assert torch.equal(actual, expected)
    assert len(seen[1].inputs) == 2 * 4 * SIZES["num_hidden_layers"]
    assert seen[0].inputs == seen[1].inputs


def test_a_lora_adapter_is_added_to_each_product(steps):
    class Added:
        def __init__(self):
            self.keys = []

        def add(self, key, *, inputs, product):
            assert inputs.dtype == torch.float32
            self.keys.append(key)
            product += 1

    model, added = Computed(kind="int8"), (Added(), Added())

    def prepare(rows, *, lora):
        rows.lora = lora

    alone = model.logits([[6, 1]])
    expected = model.logits([[6, 1]], prepare=lambda rows: prepare(rows, lora=added[0]))
    assert model.decoder.use_steps(steps)
    actual = model.logits([[6, 1]], prepare=lambda rows: prepare(rows, lora=added[1]))
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, alone)
    assert len(added[1].keys) == 2 * 4 * SIZES["num_hidden_layers"]
    assert added[0].keys == added[1].keys


@pytest.mark.parametrize("compiled", [False, True])
def test_few_rows_in_eight_bits_are_not_filled_up(compiled, steps, monkeypatch):
    model = Computed(kind="int8")
    assert not compiled or model.decoder.use_steps(steps)
    compute, counts = Int8Product.of_whole_numbers, []

    def counted(product, rows):
        counts.append(len(rows))
        return compute(product, rows)

    monkeypatch.setattr(Int8Product, "of_whole_numbers", counted)
    for count in (1, 2, 3):
        model.logits([[count]])
        assert {*counts} == {count}
        counts.clear()


@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_what_is_no_number_stays_none(kind, steps):
    model = Computed(kind=kind)
    assert model.decoder.use_steps(steps)
    with torch.inference_mode():
        model.decoder.layers[1].parts().norms[0].weight[5] = torch.nan
    assert model.logits([[3, 1]]).isnan().all()


def test_without_a_compiler_there_are_no_steps():
    with pytest.raises(StepsUnavailableError, match="no C compiler"):
        compile_steps(["no-compiler-of-this-name"])


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'out of luck' >&2; exit 1", "out of luck"),
        ("shift; while [ $# -gt 1 ]; do shift; done; exit 0", "compiled_attention.so"),
        ("sleep 1000 & wait", "timed out"),
    ],
    ids=["it fails", "it makes nothing", "it hangs, and what it started"],
)
def test_a_compiler_that_does_not_work_is_told(script, reason, tmp_path, steps, monkeypatch):
    compiler = tmp_path / "broken-cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(StepsUnavailableError, match=reason):
        compile_steps(["broken-cc"], seconds=1)


@pytest.fixture
def compiler_of(tmp_path, monkeypatch):
    """Return a function that makes a compiler which compiles a source of its own, not ours."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def make(source):
        (tmp_path / "own.c").write_text(source)
        skip, compile_it = 'while [ "$1" != -o ]; do shift; done', "exec cc -shared -fPIC"
        compiler = tmp_path / "own-cc"
        compiler.write_text(f"#!/bin/sh\n{skip}\n{compile_it} {tmp_path}/own.c -o $2\n")
        compiler.chmod(0o755)
        return ["own-cc"]

    return make


def test_a_library_without_its_functions_is_told(steps, compiler_of):
    del steps
    with pytest.raises(StepsUnavailableError, match="norm_rows"):
        compile_steps(compiler_of(""))


def test_functions_that_write_nothing_are_not_used(steps, compiler_of):
    silent = compile_steps(compiler_of("".join(f"void {it}() {{}}\n" for it in FUNCTIONS)))
    model = Computed()
    expected = model.logits(PIECES)
    assert not model.decoder.use_steps(silent)
    assert not model.is_compiled
    assert torch.equal(model.logits(PIECES), expected)
    attention = model.decoder.layers[0].parts().attention
    assert not agreeing_counts(silent, attention, group=3, width=32)
    if MKL_ADDS_ALIKE:
        assert agreeing_counts(steps, attention, group=3, width=32)


def test_threads_are_those_of_the_openmp_that_is_loaded_for_all(steps, compiler_of, monkeypatch):
    """As torch's own calls are looked up, whatever torch's library leads to besides."""
    del steps
    counting = """
        static int calls;
        int so_many_calls(void) { return calls; }
        int omp_get_thread_num(void) { return 0; }
        int omp_get_num_threads(void) { return 1; }
        void GOMP_parallel(void (*run)(void *), void *task, unsigned count, unsigned flags) {
            calls++;
            run(task);
        }
    """
    source = counting + "".join(f"void {it}() {{}}\n" for it in FUNCTIONS)
    loaded_for_all = compile_steps(compiler_of(source)).libraries[1]
    load = ctypes.CDLL

    def loaded(name, *more, **others):
        return loaded_for_all if name is None else load(name, *more, **others)

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", loaded)
        found = compile_steps()
    assert found.has_threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = Computed()
    assert model.decoder.use_steps(found)
    model.logits([[100, 9]], rows=SharedRows)
    assert loaded_for_all.so_many_calls() > 0


def test_without_room_for_files_there_are_no_steps(steps, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nothing"))
    with pytest.raises(StepsUnavailableError, match="nothing"):
        compile_steps()


def test_steps_with_other_bits_are_not_used_and_the_log_says_so(
    steps, monkeypatch, tmp_path, caplog
):
    del steps
    monkeypatch.setattr("paceline_engine.torch_backend.llama.agree", lambda *_: False)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    build_tokenizer(SIZES["vocab_size"]).save(str(tmp_path / "tokenizer.json"))
    TransformersBackend(str(tmp_path))
    assert "other bits than torch's operators" in caplog.text


def test_nothing_is_compiled_for_a_model_that_it_does_not_fit(tmp_path, monkeypatch, caplog):
    """As the tiny models of most tests: a load would take half a second longer for nothing."""
    monkeypatch.setattr(
        "paceline_engine.torch_backend.decoders.compile_steps", lambda: pytest.fail("compiled")
    )
    LlamaForCausalLM(LlamaConfig(**SIZES, dtype="bfloat16")).save_pretrained(tmp_path)
    build_tokenizer(SIZES["vocab_size"]).save(str(tmp_path / "tokenizer.json"))
    with caplog.at_level("INFO"):
        TransformersBackend(str(tmp_path), dtype="bfloat16")
    assert "is compiled" not in caplog.text


def test_a_processor_without_wide_vectors_has_no_steps(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with pytest.raises(StepsUnavailableError, match="AVX-512"):
        compile_steps()


@pytest.mark.parametrize("invariant", [False, True])
def test_a_server_computes_the_same_with_a_compiler_without_one_and_told_not_to(
    invariant, steps, caplog, monkeypatch, tmp_path
):
    """To the last bit where bits count, and but for rounding in attention where they do not."""
    del steps
    directory = str(tmp_path)
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(directory)
    build_tokenizer(SIZES["vocab_size"]).save(str(tmp_path / "tokenizer.json"))
    with caplog.at_level("INFO"):
        compiled = TransformersBackend(directory, invariant=invariant)
        assert "between products is compiled" in caplog.text
        caplog.clear()
        told_not_to = TransformersBackend(directory, invariant=invariant, compiled=False)
        assert "compiled" not in caplog.text
        monkeypatch.setenv("PATH", str(tmp_path))
        without = TransformersBackend(directory, invariant=invariant)
        assert "nothing is compiled, which would be faster: there is no C compiler" in caplog.text
    assert compiled.description.fingerprint == without.description.fingerprint
    said = [logprobs(each) for each in (compiled, told_not_to, without)]
    assert len(said[0]) == 5
    assert said[1] == said[2]
    assert said[0] == (said[1] if invariant else pytest.approx(said[1], rel=1e-5))


def logprobs(backend):
    """Return what a verdict says of a proposal of four tokens that it accepts."""
    spec = SessionSpec(64)
    block = continuation(ModelText(backend, spec), text(1, 20), 4)
    task = Judge(chain(block), logprobs=True, top_logprobs=0)
    item = Item(backend.new_cache(spec), spec, prefix=array("I", text(1, 20)), task=task)
    (outcome,) = backend.run([item], NEVER)
    return list(outcome.judgement.logprobs)
