"""The step that CUDA records, computed anew on a CPU: same shapes, same addresses, same logits."""

from __future__ import annotations

import gc
import math
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
from paceline_engine.torch_backend.cuda_graphs import CapturedStep, CapturedSteps
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.shared_rows import SharedRows
from paceline_engine.torch_backend.transformers import TransformersBackend
from unit.engine.conftest import NEVER, continuation, path

PROMPT = [5, 6, 7, 8, 9, 10, 11]
SPEC = SessionSpec(64)
CPU = torch.device("cpu")


def capturing_backend(tiny_pair) -> TransformersBackend:
    """A model whose steps are recorded, though this is a CPU."""
    backend = TransformersBackend(str(tiny_pair.target))
    backend.steps = CapturedSteps(backend.decoder, CPU)
    return backend


@pytest.fixture(scope="module")
def capturing(tiny_pair):
    return capturing_backend(tiny_pair)


@pytest.fixture
def decoder(target):
    target.interrupt = NEVER  # whoever had the model before may have left another one
    assert isinstance(target.decoder, FusedLlama)
    return target.decoder


def as_it_is(run):
    return run


def fixed_text(decoder, capacity: int) -> KeyValues:
    layer = decoder.layers[0]
    shape = KeyValueShape(
        len(decoder.layers), layer._kv_heads, layer._width, layer._width, torch.float32, CPU
    )
    return KeyValues(Slabs(shape), reserve_length=capacity, is_fixed=True)


def forward(decoder, text: KeyValues, token_ids: list[int]) -> torch.Tensor:
    text.make_room(len(token_ids))
    logits = decoder(SharedRows([text], [token_ids], [1]))
    text.extend(array("I", token_ids))
    return logits


@torch.inference_mode()
def test_a_step_in_fixed_buffers_gives_the_decoders_logits(decoder):
    fixed, plain = (fixed_text(decoder, 40) for _ in range(2))
    for text in (fixed, plain):
        forward(decoder, text, PROMPT)
    step = CapturedStep(decoder, fixed, record=as_it_is)
    for token_id in (3, 99, 250, 7):
        expected = forward(decoder, plain, [token_id])
        assert torch.allclose(step(token_id, position=fixed.length), expected, atol=1e-4)
        fixed.extend(array("I", [token_id]))


@torch.inference_mode()
def test_a_step_works_in_the_same_memory_every_time(decoder):
    text = fixed_text(decoder, 40)
    forward(decoder, text, PROMPT)
    step, place = CapturedStep(decoder, text, record=as_it_is), text.keys.data_ptr()
    for position in range(len(PROMPT), 40):
        step(position, position=position)
        assert text.keys[0, 0, 0, position].any()
    assert (text.keys.data_ptr(), text.capacity) == (place, 40)


@torch.inference_mode()
def test_what_a_step_reads_stays_when_a_longer_text_has_longer_tables(capturing):
    decoder = capturing.decoder
    text = fixed_text(decoder, 40)
    text.make_room(1)
    step = CapturedStep(decoder, text, record=as_it_is)
    read = [StorageWeakRef(each.untyped_storage()) for each in decoder.rotations(40)]
    decoder.rotations(100_000)
    assert step.longest == 40
    assert not any(each.expired() for each in read)


def test_plain_decoding_is_the_same(capturing, target):
    oracle = continuation(ModelText(target, SPEC), PROMPT, 20)
    model = ModelText(capturing, SPEC)
    assert continuation(model, PROMPT, 20) == oracle
    assert model.cache.step is not None


def test_blocks_and_steps_take_turns_on_one_text(capturing, target):
    oracle = continuation(ModelText(target, SPEC), PROMPT, 12)
    model = ModelText(capturing, SPEC)
    for done, block in ((0, []), (1, [1, 1]), (1, []), (2, oracle[2:5]), (6, []), (7, [])):
        judged = model.judge(PROMPT + oracle[:done], block)
        accepted = 3 if done == 2 else 0
        assert judged.accepted_path == path(accepted)
        assert judged.next_token == oracle[done + accepted]
    assert model.cache.step is not None


def test_a_text_that_begins_anew_goes_on_in_the_same_buffers(capturing, target):
    model = ModelText(capturing, SPEC)
    first = continuation(model, PROMPT, 4)
    step = model.cache.step
    other = [100, 101, 102]
    assert continuation(model, other, 4) == continuation(ModelText(target, SPEC), other, 4)
    assert model.cache.step is step
    assert continuation(model, PROMPT, 4) == first


def test_a_text_that_outgrows_its_buffers_is_captured_anew(capturing, target):
    oracle = continuation(ModelText(target, SPEC), PROMPT, 40)
    model = ModelText(capturing, SessionSpec(16, limit_length=64))
    assert continuation(model, PROMPT, 4) == oracle[:4]
    step = model.cache.step
    model.cache.reserve(32)
    assert continuation(model, PROMPT, 9) == oracle[:9]
    assert model.cache.step is step  # there was room still
    model.cache.reserve(64)
    assert continuation(model, PROMPT, 40) == oracle
    assert model.cache.step is not step
    assert model.cache.capacity == 64


def test_of_a_text_whose_session_is_over_only_what_can_be_copied_is_left(capturing, target):
    model = ModelText(capturing, SPEC)
    first = continuation(model, PROMPT, 4)
    model.cache.end()
    assert model.cache.step is None
    other = ModelText(capturing, SPEC)
    other.cache.begin_like(model.cache)
    longer = [*PROMPT, *first[:3]]
    assert other.cache.missing_length(array("I", longer)) == 1
    assert continuation(other, longer, 8) == continuation(ModelText(target, SPEC), longer, 8)
    assert other.cache.step is not None


@pytest.mark.parametrize("failure", ["raises", "is off"])
def test_what_cannot_be_captured_is_computed(tiny_pair, target, monkeypatch, caplog, failure):
    class Broken(CapturedStep):
        def __call__(self, token_id, *, position):
            if failure == "raises":
                raise RuntimeError("not permitted while capturing")
            return super().__call__(token_id, position=position) * 1.01

    monkeypatch.setattr("paceline_engine.torch_backend.cuda_graphs.CapturedStep", Broken)
    backend = capturing_backend(tiny_pair)
    # As it is called by --model-name, once it is loaded.
    backend.description = replace(backend.description, name="ours")
    oracle = continuation(ModelText(target, SPEC), PROMPT, 8)
    assert continuation(ModelText(backend, SPEC), PROMPT, 8) == oracle
    assert not backend.captures
    assert "model ours: forwards are not captured" in caplog.text


def test_a_session_that_ends_while_its_step_is_recorded_keeps_no_recording(capturing, monkeypatch):
    model = ModelText(capturing, SPEC)

    class Ending(CapturedStep):
        def __call__(self, token_id, *, position):
            model.cache.end()
            return super().__call__(token_id, position=position)

    monkeypatch.setattr("paceline_engine.torch_backend.cuda_graphs.CapturedStep", Ending)
    continuation(model, PROMPT, 2)
    assert model.cache.has_ended
    assert model.cache.step is None


def test_a_text_without_numbers_says_nothing_about_recordings(tiny_pair, target):
    backend = capturing_backend(tiny_pair)
    broken = ModelText(backend, SPEC)
    continuation(broken, PROMPT, 1)
    with torch.inference_mode():
        broken.cache.keys.fill_(math.nan)
    with pytest.raises(InternalError):
        continuation(broken, [*PROMPT, 5], 2)
    assert backend.captures
    oracle = continuation(ModelText(target, SPEC), PROMPT, 8)
    other = ModelText(backend, SPEC)
    assert continuation(other, PROMPT, 8) == oracle
    assert other.cache.step is not None


def test_a_model_whose_capturing_was_given_up_says_that_it_stops_between_layers(
    tiny_pair, monkeypatch
):
    def fail(*_, **__):
        raise RuntimeError("not permitted while capturing")

    monkeypatch.setattr("paceline_engine.torch_backend.cuda_graphs.CapturedStep", fail)
    backend = capturing_backend(tiny_pair)
    backend.description = replace(backend.description, cancels_between_layers=False)
    stack = StackBackend([backend, TransformersBackend(str(tiny_pair.drafter))], matrix=None)
    stack.description = replace(stack.description, name="ours")
    assert not stack.description.cancels_between_layers
    continuation(ModelText(backend, SPEC), PROMPT, 8)
    assert backend.description.cancels_between_layers
    assert stack.description.cancels_between_layers
    assert stack.description.name == "ours"


def test_a_step_whose_row_was_no_number_harms_none_after_it_is_taken_back(capturing, target):
    model = ModelText(capturing, SPEC)
    for length in range(3):  # the second and the third are replayed
        model.judge(PROMPT + [5, 6][:length])
    text = model.cache
    assert text.step is not None
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
def test_for_want_of_memory_a_step_is_computed_and_later_ones_are_captured(
    tiny_pair, target, monkeypatch, shortage
):
    attempts = []

    class Hungry(CapturedStep):
        def __init__(self, *given, **options):
            attempts.append(backend.layers_run)
            if len(attempts) == 1:
                raise shortage
            super().__init__(*given, **options)

    monkeypatch.setattr("paceline_engine.torch_backend.cuda_graphs.CapturedStep", Hungry)
    monkeypatch.setattr("paceline_engine.torch_backend.cuda_graphs._STEPS_WITHOUT_MEMORY", 5)
    backend = capturing_backend(tiny_pair)
    model = ModelText(backend, SPEC)
    assert continuation(model, PROMPT, 12) == continuation(ModelText(target, SPEC), PROMPT, 12)
    assert backend.captures
    assert model.cache.step is not None
    assert len(attempts) == 2
    assert attempts[1] - attempts[0] > 5 * 4


def test_what_is_computed_only_to_be_recorded_does_not_count(capturing):
    model, counts = ModelText(capturing, SPEC), []
    for length in range(4):
        before = capturing.layers_run
        model.judge(PROMPT + [5, 6, 7][:length])
        counts.append(capturing.layers_run - before)
    assert model.cache.step is not None
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


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_all_recordings_of_a_model_compute_in_the_same_memory(cuda):
    recorder = CapturedSteps(None, torch.device("cuda"))
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


def test_a_recording_that_fails_leaves_the_stream_as_it_was(cuda):
    recorder, calls = CapturedSteps(None, torch.device("cuda")), []

    def run():
        calls.append(cuda.current)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.zeros(1)

    with pytest.raises(torch.OutOfMemoryError):
        recorder.recorded(run)
    assert cuda.current is cuda.before
    assert len(calls) == 4


@pytest.mark.parametrize("fails_at", [1, 3, 4])
@pytest.mark.parametrize("error", [ForwardInterrupted, torch.OutOfMemoryError])
def test_what_a_recording_began_is_over_before_the_next_forward_begins(cuda, error, fails_at):
    """What it writes to the text's next row would else come after what is decided there."""
    recorder, calls = CapturedSteps(None, torch.device("cuda")), []

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


def test_nothing_is_captured_on_a_cpu(tiny_pair, caplog):
    backend = TransformersBackend(str(tiny_pair.target), capture=True)
    assert not backend.captures
    assert "cannot be captured on cpu" in caplog.text
