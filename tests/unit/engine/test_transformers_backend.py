from __future__ import annotations

import json
import math
import shutil
from array import array
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from paceline.errors import OverloadedError
from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import NOTHING
from paceline_contract.sampling import SamplingParameters
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.backend import (
    DeviceLostError,
    ForwardInterrupted,
    ModelLoadError,
)
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Item, Judge
from paceline_engine.torch_backend.cuda_graphs import CapturedForwards
from paceline_engine.torch_backend.device import hardware_of, on_device
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.library import LibraryDecoder
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.transformers import TransformersBackend
from support import kernels_on_cpu
from support.device import on_a_cpu
from unit.engine.conftest import NEVER, StopAtLayer, continuation, path, scores_after

PROMPT = [5, 6, 7, 8, 9, 10, 11]
SPEC = SessionSpec(512)
SAMPLED = SessionSpec(512, SamplingParameters(temperature=0.8, top_p=0.95), seed=3)


def not_fused(patch) -> None:
    patch.setattr("paceline_engine.torch_backend.decoders.can_fuse", lambda _: False)


def not_together(patch) -> None:
    """Have the library compute a model, one text at a time."""

    def refuse(_):
        raise ValueError("not through the interface")

    not_fused(patch)
    patch.setattr("paceline_engine.torch_backend.decoders.LibraryDecoder", refuse)


WAYS = {
    "fused": (FusedLlama, lambda _: None),
    "library": (LibraryDecoder, not_fused),
    "library, without logits_to_keep": (LibraryDecoder, not_fused),
    "library, one text at a time": (type(None), not_together),
}


@pytest.fixture(scope="module", params=WAYS)
def either(request, tiny_pair):
    """The target, computed in each way that models are."""
    kind, patch_for = WAYS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch_for(patch)
        backend = TransformersBackend(str(tiny_pair.target))
    assert type(backend.decoder) is kind
    assert backend.description.shares_forwards == (kind is not type(None))
    if kind is LibraryDecoder:
        assert backend.decoder._scores_some_rows
        backend.decoder._scores_some_rows = request.param == "library"
    return backend


def state_length(cache) -> int:
    """How many tokens there are keys and values for."""
    if isinstance(cache, KeyValues):
        return cache.length
    return max((layer.get_seq_length() for layer in cache.state.layers), default=0)


def test_only_the_rows_that_are_asked_for_are_scored(tiny_pair, monkeypatch):
    not_fused(monkeypatch)
    backend, scored = TransformersBackend(str(tiny_pair.target)), []
    backend.model.lm_head.register_forward_pre_hook(
        lambda _, arguments: scored.append(arguments[0].shape[-2])
    )
    ModelText(backend, SPEC).judge(PROMPT, [1, 2])
    assert scored == [3]


def test_a_text_that_grows_token_by_token_moves_its_keys_a_few_times_only(target):
    model, capacities = ModelText(target, SPEC), set()
    for length in range(1, 400):
        model.draft([7] * length)
        capacities.add(model.cache.capacity)
    assert len(capacities) <= 4, "64 tokens, doubled up to 512"


def text(*token_ids: int) -> array[int]:
    return array("I", token_ids)


@on_a_cpu
def test_the_description_is_the_models(target, tiny_pair):
    description = target.description
    assert description.name == "target"
    assert (description.vocabulary_size, description.layer_count) == (300, 4)
    assert (description.context_length, description.eos_token_ids) == (512, (0,))
    assert description.cancels_between_layers
    assert description.hardware == hardware_of(torch.device("cpu"), threads=1)
    tokenizer = Tokenizer.from_file(str(tiny_pair.target / "tokenizer.json"))
    assert Tokenizer.from_str(target.tokenizer.decode()).to_str() == tokenizer.to_str()


@on_a_cpu
@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_a_tokens_memory_is_that_of_its_keys_and_values(tiny_pair, dtype, item_bytes):
    memory = TransformersBackend(str(tiny_pair.target), dtype=dtype).token_memory()
    # Keys and values of four layers, with one head of 16 each.
    assert memory.bytes_per_token == 2 * 4 * 1 * 16 * item_bytes
    assert memory.free_bytes > 0
    assert memory.token_count == int(memory.free_bytes * 0.5) // memory.bytes_per_token


@pytest.mark.parametrize("reserved", [20, 100, 300])
def test_a_session_never_takes_more_memory_than_it_reserved(target, reserved):
    model = ModelText(target, SessionSpec(reserved))
    bytes_per_token = target.token_memory().bytes_per_token
    for length in range(1, reserved + 1):
        model.draft(range(length))
        assert length <= model.cache.byte_count / bytes_per_token <= reserved


def test_memory_is_measured_also_after_a_forward_was_given_up(either):
    with pytest.raises(ForwardInterrupted):
        ModelText(either, SPEC, interrupt=StopAtLayer(2)).draft(PROMPT)
    assert either.token_memory().bytes_per_token


@on_a_cpu
def test_captured_forwards_cannot_all_be_given_up(tiny_pair, monkeypatch):
    def capture(_, decoder, shape, *, device, beside):
        assert device.type == "cpu"
        return CapturedForwards(decoder, shape, kernels_on_cpu)

    monkeypatch.setattr("paceline_engine.torch_backend.computed_model.capture_forwards", capture)
    backend = TransformersBackend(str(tiny_pair.target), capture=True)
    assert not backend.description.cancels_between_layers


def test_drafter_and_target_share_a_tokenizer_and_nothing_else(target, drafter):
    assert target.description.tokenizer_fingerprint == drafter.description.tokenizer_fingerprint
    assert target.description.fingerprint != drafter.description.fingerprint


def test_chunks_give_the_logits_of_one_forward(either):
    tokens = list(range(20, 60))
    whole = scores_after(either, either.new_cache(SPEC), text(20), tokens[1:])
    cache, rows = either.new_cache(SPEC), []
    for start, end in [(0, 1), (1, 9), (9, 10), (10, 33), (33, 40)]:
        prefix, block = text(*tokens[: start + 1]), tokens[start + 1 : end]
        rows.append(scores_after(either, cache, prefix, block))
    assert [len(each) for each in rows] == [1, 8, 1, 23, 7]
    # fp32 rounding, on logits of size 10.
    assert torch.allclose(torch.cat(rows), whole, atol=1e-4)


@on_a_cpu
def test_logits_are_those_of_the_bare_model(either, target):
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        expected = target.model(ids).logits[0, -1, :300]
    ours = scores_after(either, either.new_cache(SPEC), text(*PROMPT))
    assert torch.allclose(ours[0], expected, atol=1e-5)


def test_a_token_beyond_the_tokenizer_is_never_chosen(tiny_pair, tmp_path):
    backend = TransformersBackend(str(tiny_pair.target))
    assert backend.model.lm_head.weight.shape[0] == 320
    with torch.inference_mode():
        backend.model.lm_head.weight[300:] = backend.model.lm_head.weight[:20] * 10
    for spec in (SPEC, SAMPLED):
        assert max(continuation(ModelText(backend, spec), PROMPT, 40)) < 300


@pytest.mark.parametrize("spec", [SPEC, SAMPLED])
def test_a_block_is_judged_as_plain_decoding_would(either, spec):
    oracle = continuation(ModelText(either, spec), PROMPT, 12)
    model, done = ModelText(either, spec), 0
    for wrong_at in (3, 0, 2, 5):
        block = oracle[done : done + 4]
        if wrong_at < 4:
            block[wrong_at] = (block[wrong_at] + 1) % 300
        accepted = min(wrong_at, len(block))
        judged = model.judge(PROMPT + oracle[:done], block)
        assert judged.accepted_path == path(accepted)
        if done + accepted < 12:
            assert judged.next_token == oracle[done + accepted]
        done = min(done + accepted + 1, 8)


@on_a_cpu
def test_log_probabilities_belong_to_the_decided_tokens(target):
    oracle = continuation(ModelText(target, SAMPLED), PROMPT, 3)
    judged = ModelText(target, SAMPLED).judge(PROMPT, [*oracle[:2], 299], logprobs=True)
    with torch.inference_mode():
        rows = target.model(torch.tensor([PROMPT + oracle[:2]])).logits[0, -3:].double()
    expected = rows[:, :300].log_softmax(-1)[range(3), oracle].tolist()
    assert judged.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_an_interrupted_forward_runs_no_further_layer_and_harms_nothing(either, layer):
    oracle = continuation(ModelText(either, SPEC), PROMPT, 6)
    model = ModelText(either, SPEC)
    model.judge(PROMPT + oracle[:2], oracle[2:4])
    held = model.cache.token_ids
    layers_before = either.layers_run
    model.interrupt = StopAtLayer(layer)
    with pytest.raises(ForwardInterrupted):
        model.judge(PROMPT + oracle[:3], [1, 2, 3])
    assert either.layers_run - layers_before == layer
    # What is still common stays.
    assert model.cache.token_ids == held[: len(PROMPT) + 2]
    model.interrupt = NEVER
    assert model.judge(PROMPT + oracle[:3], oracle[3:5]).accepted_path == path(2)


def test_an_interrupted_first_forward_leaves_an_empty_cache(either):
    model = ModelText(either, SPEC, interrupt=StopAtLayer(2))
    with pytest.raises(ForwardInterrupted):
        model.draft(PROMPT)
    assert model.cache.length == 0
    model.interrupt = NEVER
    oracle = continuation(ModelText(either, SPEC), PROMPT, 5)
    assert continuation(model, PROMPT, 5) == oracle


def test_a_forward_without_memory_says_so_and_leaves_nothing_half_done(either):
    oracle = continuation(ModelText(either, SPEC), PROMPT, 4)
    model = ModelText(either, SPEC)
    model.judge(PROMPT, oracle[:2])

    def run_out(*_):
        raise torch.OutOfMemoryError("out of memory")

    hook = either._layers[1].register_forward_hook(run_out)
    try:
        with pytest.raises(OverloadedError) as caught:
            model.judge(PROMPT + oracle[:2], oracle[2:3])
    finally:
        hook.remove()
    assert caught.value.retry_after_seconds
    assert (model.cache.length, state_length(model.cache)) == (0, 0)
    again = model.judge(PROMPT + oracle[:2], oracle[2:3])
    assert (again.accepted_path, again.next_token) == (path(1), oracle[3])


@pytest.mark.parametrize("where", ["accept_exact", "choose_tokens", "draw_draft"])
def test_a_device_that_fails_late_is_lost_all_the_same(target, monkeypatch, where):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(f"paceline_engine.deciding.decisions.{where}", fail)
    rule = VerificationRule.REJECTION if where == "draw_draft" else VerificationRule.EXACT
    model = ModelText(target, SessionSpec(512, rule=rule))
    judging = partial(model.judge, PROMPT)
    drafting = partial(model.draft, PROMPT)
    with pytest.raises(DeviceLostError):
        (judging if where == "accept_exact" else drafting)()


@pytest.mark.parametrize(
    "words",
    [
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
        "CUDA out of memory. Tried to allocate 20.00 MiB.",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_device_without_memory_is_not_lost(words):
    with pytest.raises(OverloadedError), on_device():
        raise RuntimeError(words)


def test_kernels_that_are_planned_for_each_length_are_left_out(tiny_pair):
    torch.backends.cuda.enable_cudnn_sdp(True)
    TransformersBackend(str(tiny_pair.target))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_what_the_cache_still_has_is_computed_once(either):
    model = ModelText(either, SPEC)
    oracle = continuation(ModelText(either, SPEC), PROMPT, 8)
    model.judge(PROMPT, oracle[:4])
    assert model.row_count == len(PROMPT) + 4
    follow = model.judge(PROMPT + oracle[:5], oracle[5:7])
    assert model.row_count == 3
    assert model.judge(PROMPT + oracle[:5], oracle[5:7]) == follow
    assert model.row_count == 3
    model.judge([*PROMPT, 1, 2])
    assert model.row_count == 2


def test_on_an_accelerator_a_part_of_a_prompt_ends_when_it_is_computed(tiny_pair, monkeypatch):
    backend, spec, waits = TransformersBackend(str(tiny_pair.target)), SessionSpec(40), []
    stream = SimpleNamespace(synchronize=lambda: waits.append(backend.layers_run))
    accelerator = SimpleNamespace(current_stream=lambda device: {backend.device: stream}[device])
    monkeypatch.setattr(torch, "get_device_module", lambda _: accelerator)
    backend.device = torch.device("cuda:1")
    item = Item(backend.new_cache(spec), spec, prefix=array("I", range(20)), task=Judge(NOTHING))
    (part,) = backend.run([item], NEVER, row_limit=8)
    assert (part.row_count, waits) == (8, [4])
    (whole,) = backend.run([item], NEVER)  # the host reads what it decides by, and so waits
    assert (whole.row_count, waits) == (12, [4])


def test_a_sliding_window_model_can_be_rolled_back(tiny_pair, tmp_path):
    config = MistralConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    backend = save_and_load(MistralForCausalLM(config), tiny_pair, tmp_path)
    oracle = continuation(ModelText(backend, SPEC), list(range(30)), 10)
    model = ModelText(backend, SPEC)
    model.judge(list(range(30)), [*oracle[:2], 7, 7, 7, 7, 7, 7])
    assert model.judge(list(range(30)), oracle).accepted_path == path(10)


def bloom(**settings: int) -> BloomForCausalLM:
    config = BloomConfig(
        vocab_size=300, hidden_size=32, n_layer=2, n_head=2, initializer_range=0.3, **settings
    )
    torch.manual_seed(0)
    return BloomForCausalLM(config)


def mpt(**settings: int) -> MptForCausalLM:
    config = MptConfig(
        vocab_size=300, d_model=32, n_layers=2, n_heads=2, initializer_range=0.3, **settings
    )
    torch.manual_seed(0)
    return MptForCausalLM(config)


@pytest.mark.parametrize(("family", "name"), [(bloom, "seq_length"), (mpt, "max_seq_len")])
def test_families_name_their_context_length_differently(tiny_pair, tmp_path, family, name):
    backend = save_and_load(family(**{name: 77}), tiny_pair, tmp_path)
    assert backend.description.context_length == 77
    spec = SessionSpec(77)
    oracle = continuation(ModelText(backend, spec), PROMPT, 6)
    model = ModelText(backend, spec)
    assert model.judge(PROMPT, [*oracle[:2], 299 - oracle[2]]).accepted_path == path(2)
    assert model.judge(PROMPT, oracle).accepted_path == path(6)


def test_a_model_without_a_context_length_is_told_where_to_say_it(tiny_pair, tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json .* add max_position_embeddings to it"):
        save_and_load(bloom(), tiny_pair, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 88}))
    assert TransformersBackend(str(tmp_path)).description.context_length == 88


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"dtype": "int8"}, "int8"), ({"device": "cuda:99"}, "cuda:99"), ({"device": "x"}, "x")],
)
def test_a_setting_that_cannot_be_met_is_one_clear_line(tiny_pair, settings, word):
    with pytest.raises(ModelLoadError, match=word) as caught:
        TransformersBackend(str(tiny_pair.target), **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"model_type": "unheard of"},
        {"eos_token_id": "x"},
        {"eos_token_id": -5},
        {"eos_token_id": [0, True]},
        {"max_position_embeddings": 2**40},
        {"max_position_embeddings": "many"},
        {"num_hidden_layers": 100_000},
        {"num_hidden_layers": -1},
        {"hidden_size": "wide"},
        {"vocab_size": -3},
    ],
    ids=str,
)
def test_nonsense_in_a_configuration_is_one_line_that_names_it(tiny_pair, tmp_path, nonsense):
    directory = shutil.copytree(tiny_pair.target, tmp_path / "odd")
    (directory / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **nonsense}))
    with pytest.raises(ModelLoadError) as caught:
        TransformersBackend(str(directory))
    assert "\n" not in str(caught.value)
    (value,) = nonsense.values()
    assert "odd" in str(caught.value)
    assert isinstance(value, list) or str(value) in str(caught.value)


def test_an_end_beyond_the_vocabulary_is_left_out_and_said(tiny_pair, tmp_path, caplog):
    directory = shutil.copytree(tiny_pair.target, tmp_path / "odd")
    (directory / "generation_config.json").write_text('{"eos_token_id": [0, 299, 300, 128009]}')
    assert TransformersBackend(str(directory)).description.eos_token_ids == (0, 299)
    assert "beyond its vocabulary of 300" in caplog.text


@pytest.mark.parametrize("content", ["{", "[]", '{"added_tokens": [{}]}'])
def test_a_broken_tokenizer_is_one_line_that_names_it(tiny_pair, tmp_path, content):
    directory = shutil.copytree(tiny_pair.target, tmp_path / "odd")
    (directory / "tokenizer.json").write_text(content)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ModelLoadError, match=r"'odd': tokenizer\.json cannot be used") as caught:
        TransformersBackend(str(directory))
    assert "\n" not in str(caught.value)


def test_weights_that_are_no_numbers_are_refused(tiny_pair, tmp_path):
    directory = shutil.copytree(tiny_pair.target, tmp_path / "broken")
    path = next(directory.glob("*.safetensors"))
    tensors = load_file(path)
    name, tensor = next((name, each) for name, each in tensors.items() if each.dim() > 1)
    tensor[0, 0] = math.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="no numbers") as caught:
        TransformersBackend(str(directory))
    assert name.removeprefix("model.") in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(name), "its files lack "),
        (lambda tensors, name: tensors.update({name: tensors[name][:-1]}), "of another shape"),
    ],
    ids=["missing", "of another shape"],
)
def test_weights_are_never_made_up(tiny_pair, tmp_path, change, message):
    """The library would fill in random ones: two servers of one model would not agree."""
    directory = shutil.copytree(tiny_pair.target, tmp_path / "broken")
    path = next(directory.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    change(tensors, name)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=message) as caught:
        TransformersBackend(str(directory))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def save_and_load(model, tiny_pair, directory) -> TransformersBackend:
    model.save_pretrained(directory)
    shutil.copy(tiny_pair.target / "tokenizer.json", directory)
    return TransformersBackend(str(directory))
