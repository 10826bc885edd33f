"""Forwards that CUDA records, computed anew on a CPU: same tables, same addresses, same logits."""

from __future__ import annotations

import gc
import math
import random
import weakref
from array import array
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.errors import InternalError
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.stack_backend.stack import StackBackend
from paceline_engine.terms.backend import ForwardInterrupted
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item
from paceline_engine.torch_backend.cuda_graphs import CapturedForward, CapturedForwards, Size
from paceline_engine.torch_backend.kv_arena import KeyValueShape
from paceline_engine.torch_backend.transformers import TransformersBackend
from support import kernels_on_cpu
from support.device import DEVICE, on_a_cpu
from support.lora_folders import merge, write_lora
from unit.engine.conftest import NEVER, continuation, path

PROMPT = [5, 6, 7, 8, 9, 10, 11]
SPEC = SessionSpec(64)
CPU = torch.device("cpu")


def capturing_backend(tiny_pair, *lora) -> TransformersBackend:
    """A model whose forwards are recorded, even if this is a CPU."""
    if DEVICE != "cpu":
        return TransformersBackend(str(tiny_pair.target), capture=True, lora=lora)
    backend = TransformersBackend(str(tiny_pair.target), lora=lora)
    backend.captured = CapturedForwards(backend.decoder, backend._slabs.shape, kernels_on_cpu)
    return backend


@pytest.fixture(scope="module")
def capturing(tiny_pair):
    return capturing_backend(tiny_pair)


@pytest.fixture
def sizes(monkeypatch):
    """The sizes of recordings, as they are made."""
    made = []

    class Noted(CapturedForward):
        def __init__(self, decoder, size, **how):
            super().__init__(decoder, size, **how)
            made.append(size)

    monkeypatch.setattr("paceline_engine.torch_backend.cuda_graphs.CapturedForward", Noted)
    return made


def drafts(backend, prompts) -> list[Item]:
    return [
        Item(backend.new_cache(SPEC), SPEC, prefix=array("I", prompt), task=Draft())
        for prompt in prompts
    ]


def run_all(backend, items) -> list[int]:
    answers = backend.run(items, NEVER)
    return [answer.drafted.token_ids[0] for answer in answers]


def test_plain_decoding_is_the_same(tiny_pair, target, sizes):
    oracle = continuation(ModelText(target, SPEC), PROMPT, 20)
    assert continuation(ModelText(capturing_backend(tiny_pair), SPEC), PROMPT, 20) == oracle
    assert sizes == [Size(8, 1, 16), Size(1, 1, 1)]  # the prompt's seven rows, and one row


def test_blocks_and_steps_take_turns_on_one_text(capturing, target):
    oracle = continuation(ModelText(target, SPEC), PROMPT, 12)
    model = ModelText(capturing, SPEC)
    for done, block in ((0, []), (1, [1, 1]), (1, []), (2, oracle[2:5]), (6, []), (7, [])):
        judged = model.judge(PROMPT + oracle[:done], block)
        accepted = 3 if done == 2 else 0
        assert judged.accepted_path == path(accepted)
        assert judged.next_token == oracle[done + accepted]


def test_one_recording_serves_all_texts_of_a_size(tiny_pair, target, sizes):
    backend = capturing_backend(tiny_pair)
    prompts = [[3 * n + 1, 7, 9, 40 + n] for n in range(5)]
    items, expected = drafts(backend, prompts), drafts(target, prompts)
    assert run_all(backend, items) == run_all(target, expected)
    for _ in range(3):
        for each in (*items, *expected):
            each.prefix.append(6)
        assert run_all(backend, items[:3]) == run_all(target, expected[:3])
        assert run_all(backend, items[1:]) == run_all(target, expected[1:])
    # 20 rows of five prompts; then three, and four, of one row or of what each has missed.
    assert len(sizes) == len(set(sizes))
    assert Size(32, 8, 16) in sizes
    assert len(sizes) <= 5


def test_forwards_with_a_lora_adapter_are_computed_and_the_others_replayed(
    tiny_pair, target, sizes, tmp_path
):
    model = tiny_pair.target
    lora = write_lora(tmp_path / "lora", model)
    merged = TransformersBackend(str(merge(model, lora, tmp_path / "merged")))
    backend = capturing_backend(tiny_pair, f"a={lora}")
    with_it = replace(SPEC, lora="a")
    of_model = continuation(ModelText(target, SPEC), PROMPT, 12)
    of_merged = continuation(ModelText(merged, SPEC), PROMPT, 12)
    assert of_model != of_merged
    for _ in range(2):  # the second time sizes of both are recorded
        assert continuation(ModelText(backend, with_it), PROMPT, 12) == of_merged
        assert continuation(ModelText(backend, SPEC), PROMPT, 12) == of_model
    assert sizes == [Size(8, 1, 16), Size(1, 1, 1)]
    both = [
        Item(backend.new_cache(spec), spec, prefix=array("I", PROMPT), task=Draft())
        for spec in (SPEC, with_it)
    ]
    assert run_all(backend, both) == [of_model[0], of_merged[0]]


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_of_rows_is_what_it_is_uncaptured(capturing, target, seed):
    chance = random.Random(seed)
    prompts = [[chance.randrange(250) for _ in range(chance.randint(1, 30))] for _ in range(4)]
    ours, theirs = drafts(capturing, prompts), drafts(target, prompts)
    for _ in range(8):
        chosen = sorted(chance.sample(range(4), chance.randint(1, 4)))
        assert run_all(capturing, [ours[n] for n in chosen]) == run_all(
            target, [theirs[n] for n in chosen]
        )
        for n in chosen:
            new = [chance.randrange(250) for _ in range(chance.choice([1, 1, 2, 5]))]
            for each in (ours[n], theirs[n]):
                each.prefix.extend(new)


def test_trees_and_long_parts_of_prompts_are_computed(tiny_pair, target, sizes):
    backend = capturing_backend(tiny_pair)
    prompt = [n % 200 for n in range(40)]
    ours, theirs = ModelText(backend, SPEC), ModelText(target, SPEC)
    assert ours.judge(prompt).next_token == theirs.judge(prompt).next_token
    assert not sizes
    tree = {"parents": [0, 0, 1]}
    assert ours.judge([*prompt, 3], [5, 6, 7], **tree).next_token == (
        theirs.judge([*prompt, 3], [5, 6, 7], **tree).next_token
    )
    assert not sizes


def test_more_rows_than_any_recording_has_are_computed(tiny_pair, target, sizes):
    backend = capturing_backend(tiny_pair)
    prompts = [[n + place for place in range(16)] for n in range(5)]
    ours, theirs = drafts(backend, prompts), drafts(target, prompts)
    assert run_all(backend, ours) == run_all(target, theirs)
    assert not sizes


def test_a_text_longer_than_all_before_is_captured_anew(tiny_pair, target, sizes, monkeypatch):
    monkeypatch.setattr("paceline_engine.torch_backend.cuda_graphs._FIRST_POSITIONS", 16)
    backend = capturing_backend(tiny_pair)
    oracle = continuation(ModelText(target, SPEC), PROMPT, 40)
    assert continuation(ModelText(backend, SPEC), PROMPT, 40) == oracle
    assert sizes.count(Size(1, 1, 1)) == 3  # up to 16 tokens, 32 and 64


def test_what_a_recording_reads_stays_when_a_longer_text_has_longer_tables(capturing):
    continuation(ModelText(capturing, SPEC), PROMPT, 3)
    decoder = capturing.decoder
    read = [StorageWeakRef(each.untyped_storage()) for each in decoder.rotations(40)]
    decoder.rotations(100_000)
    assert not any(each.expired() for each in read)


@pytest.mark.parametrize("failure", ["raises", "is off"])
def test_what_cannot_be_captured_is_computed(tiny_pair, target, monkeypatch, caplog, failure):
    class Broken(CapturedForward):
        def __call__(self, texts, token_ids):
            if failure == "raises":
                raise RuntimeError("not permitted while capturing")
            for text in texts:  # as what it writes would be off, too
                text.states[0][0][..., text.start :, :] += 1
            return super().__call__(texts, token_ids) * 1.01

    monkeypatch.setattr("paceline_engine.torch_backend.cuda_graphs.CapturedForward", Broken)
    backend = capturing_backend(tiny_pair)
    # As it is called by --model-name, once it is loaded.
    backend.description = replace(backend.description, name="ours")
    oracle = continuation(ModelText(target, SPEC), PROMPT, 8)
    assert continuation(ModelText(backend, SPEC), PROMPT, 8) == oracle
    assert not backend.captures
    assert "model ours: forwards are not captured" in caplog.text


def test_a_text_without_numbers_says_nothing_about_recordings(tiny_pair, target, sizes):
    backend = capturing_backend(tiny_pair)
    broken = ModelText(backend, SPEC)
    long = [n % 200 for n in range(20)]
    broken.judge(long)
    with torch.inference_mode():
        broken.cache.keys.fill_(math.nan)
    with pytest.raises(InternalError):
        broken.judge([*long, 5])
    assert backend.captures
    assert not sizes
    assert continuation(ModelText(backend, SPEC), PROMPT, 8) == continuation(
        ModelText(target, SPEC), PROMPT, 8
    )
    assert sizes


def test_a_model_whose_capturing_was_given_up_says_that_it_stops_between_layers(
    tiny_pair, monkeypatch
):
    def fail(*_, **__):
        raise RuntimeError("not permitted while capturing")

    monkeypatch.setattr("paceline_engine.torch_backend.cuda_graphs.CapturedForward", fail)
    backend = capturing_backend(tiny_pair)
    backend.description = replace(backend.description, cancels_between_layers=False)
    stack = StackBackend([backend, TransformersBackend(str(tiny_pair.drafter))], matrix=None)
    stack.description = replace(stack.description, name="ours")
    assert not stack.description.cancels_between_layers
    continuation(ModelText(backend, SPEC), PROMPT, 8)
    assert backend.description.cancels_between_layers
    assert stack.description.cancels_between_layers
    assert stack.description.name == "ours"


def test_a_row_that_was_no_number_harms_none_after_it_is_taken_back(capturing, target):
    model = ModelText(capturing, SPEC)
    for length in range(3):
        model.judge(PROMPT + [5, 6][:length])
    text = model.cache
    with torch.inference_mode():
        text.keys[..., text.length - 1, :] = math.nan
        text.values[..., text.length - 1, :] = math.nan
    other = [*PROMPT, 7]
    expected = ModelText(target, SPEC).judge(other).next_token
    assert model.judge(other).next_token == expected


@pytest.mark.parametrize(
    "shortage",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_for_want_of_memory_a_forward_is_computed_and_later_ones_are_captured(
    tiny_pair, target, monkeypatch, shortage
):
    attempts = []

    class Hungry(CapturedForward):
        def __init__(self, *given, **options):
            attempts.append(backend.layers_run)
            if len(attempts) == 1:
                raise shortage
            super().__init__(*given, **options)

    monkeypatch.setattr("paceline_engine.torch_backend.cuda_graphs.CapturedForward", Hungry)
    monkeypatch.setattr("paceline_engine.torch_backend.cuda_graphs._FORWARDS_WITHOUT_MEMORY", 5)
    backend = capturing_backend(tiny_pair)
    model = ModelText(backend, SPEC)
    assert continuation(model, PROMPT, 12) == continuation(ModelText(target, SPEC), PROMPT, 12)
    assert backend.captures
    assert len(attempts) == 2
    assert attempts[1] - attempts[0] > 5 * 4


def test_what_is_computed_only_to_be_recorded_does_not_count(tiny_pair):
    backend = capturing_backend(tiny_pair)
    model, counts = ModelText(backend, SPEC), []
    for length in range(4):
        before = backend.layers_run
        model.judge(PROMPT + [5, 6, 7][:length])
        counts.append(backend.layers_run - before)
    assert counts == [4] * 4


class FakeGraph:
    def replay(self):
        pass


class FakeCuda:
    """What a recording needs of torch.cuda: it notes the pool, the stream and the graph of each."""

    def __init__(self) -> None:
        self.current = self.before = SimpleNamespace(wait_stream=self._join)
        self.joined = []
        self.pool_count = self.run_count = 0
        self.captures = []
        self.CUDAGraph = FakeGraph
        self.device = lambda _: nullcontext()
        self.current_stream = lambda: self.current
        self.Stream = lambda: SimpleNamespace(wait_stream=lambda _: None)

    def _join(self, stream):
        self.joined.append(stream)

    def graph_pool_handle(self):
        self.pool_count += 1
        return self.pool_count

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.current = stream
        self.captures.append((pool, stream, weakref.ref(graph)))
        yield  # as in torch, what fails leaves this stream


def recorder_on_cuda() -> CapturedForwards:
    shape = KeyValueShape(1, 1, 8, 8, torch.float32, torch.device("cuda"))
    return CapturedForwards(None, shape, kernels_on_cpu)


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


@on_a_cpu
def test_all_recordings_of_a_model_compute_in_the_same_memory(cuda):
    recorder = recorder_on_cuda()
    assert not cuda.captures, "nothing is taken before the first"
    runs = []

    def run(n):
        runs.append((n, cuda.current is not cuda.before))
        return torch.tensor([float(n)])

    replays = [recorder.recorded(lambda n=n: run(n)) for n in range(3)]
    assert [float(replay()) for replay in replays] == [0, 1, 2]
    assert runs == [(n, True) for n in range(3) for _ in range(4)]
    assert {(pool, id(stream)) for pool, stream, _ in cuda.captures} == {
        (1, id(cuda.captures[0][1]))
    }
    assert len(cuda.captures) == 4
    del replays
    gc.collect()
    alive = [graph() is not None for _, _, graph in cuda.captures]
    assert alive == [True, False, False, False], "one graph keeps the pool when no text does"


@on_a_cpu
def test_a_recording_that_fails_leaves_the_stream_as_it_was(cuda):
    recorder, calls = recorder_on_cuda(), []

    def run():
        calls.append(cuda.current)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.zeros(1)

    with pytest.raises(torch.OutOfMemoryError):
        recorder.recorded(run)
    assert cuda.current is cuda.before
    assert len(calls) == 4


@on_a_cpu
@pytest.mark.parametrize("fails_at", [1, 3, 4])
@pytest.mark.parametrize("error", [ForwardInterrupted, torch.OutOfMemoryError])
def test_what_a_recording_began_is_over_before_the_next_forward_begins(cuda, error, fails_at):
    """What it writes to the text's next row would else come after what is decided there."""
    recorder, calls = recorder_on_cuda(), []

    def run():
        calls.append(cuda.current)
        if len(calls) == fails_at:
            raise error
        return torch.zeros(1)

    with pytest.raises(error):
        recorder.recorded(run)
    assert cuda.joined == [calls[0]]
    recorder.recorded(lambda: torch.zeros(1))
    assert cuda.joined == [calls[0]] * 2


@on_a_cpu
def test_nothing_is_captured_on_a_cpu_and_nobody_is_told(tiny_pair, caplog):
    backend = TransformersBackend(str(tiny_pair.target), capture=True)
    assert not backend.captures
    assert "captured" not in caplog.text
