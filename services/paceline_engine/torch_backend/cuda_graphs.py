"""Forwards of one row on CUDA, recorded once and replayed.

A small model's kernels take less time than their launches. A recording is launched as a whole, but
it does the same to the same addresses each time. Therefore the token and its position are read from
the device, keys and values lie in buffers that stay, and attention looks at whole buffers. When the
buffers have moved, because more memory was reserved, the step is recorded anew.
"""

from __future__ import annotations

import logging
import math
import warnings
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from paceline_engine.torch_backend.decoders import agree
from paceline_engine.torch_backend.device import lacks_memory
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.shared_rows import ForwardRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_engine.torch_backend.attention import Attention
    from paceline_engine.torch_backend.decoders import Decoder
    from paceline_engine.torch_backend.key_values import KeyValues

_log = logging.getLogger(__name__)

_WARM_UPS = 3
# After a recording for which there was no memory. Each attempt costs as much as several steps.
_STEPS_WITHOUT_MEMORY = 64

_Result = TypeVar("_Result")
_Recorder: TypeAlias = "Callable[[Callable[[], Tensor]], Callable[[], Tensor]]"


class CapturedStep(ForwardRows):
    """A forward of one row for one sequence.

    On another device than CUDA it is computed anew each time, also over whole buffers.

    Invariants:
        The logits are the decoder's own, apart from rounding
        (tests/unit/engine/test_captured.py).
    """

    def __init__(self, decoder: FusedLlama, text: KeyValues, *, record: _Recorder) -> None:
        """Record it.

        Args:
            text: With fixed buffers, and room for a row. Recording overwrites the buffers' row
                at the sequence's length.
            record: Makes a recording of a function (`CapturedSteps.recorded`).

        Raises:
            RuntimeError: It cannot be recorded here; or there is no memory for it
                (`device.lacks_memory`).
        """
        # Held, because a recording holds addresses only.
        self._keys, self._values = text.keys, text.values
        device = self._keys.device
        self._decoder = decoder
        self.token_ids = torch.zeros(1, dtype=torch.int64, device=device)
        self.positions = torch.full_like(self.token_ids, text.length)
        self.longest = text.capacity
        self.scored = slice(0, 1)
        self._columns = torch.arange(text.capacity, device=device)
        self._mask = torch.empty(())
        # Computed now, because a recording must not make a table longer; and held, because the
        # decoder replaces its table when a sequence gets longer.
        self._rotations = decoder.rotations(text.capacity)
        self._replay = record(self._run)

    def __call__(self, token_id: int, *, position: int) -> Tensor:
        """Compute a row, and return the logits after it: (1, V), valid until the next call."""
        self.token_ids.fill_(token_id)
        self.positions.fill_(position)
        return self._replay()

    def attend(
        self, layer: int, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """Write the row in its place, and look at all that is before it in the buffers."""
        keys = self._keys[layer].index_copy_(-2, self.positions, keys[None])
        values = self._values[layer].index_copy_(-2, self.positions, values[None])
        grouped = queries.reshape(1, keys.shape[1], -1, queries.shape[-1])
        seen = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=self._mask, scale=how.scale
        )
        return seen.reshape(queries.shape[0], 1, -1)

    def _run(self) -> Tensor:
        unseen = self._columns > self.positions
        mask = self._keys.new_zeros(len(unseen)).masked_fill_(unseen, -math.inf)
        self._mask = mask[None]
        return self._decoder(self)


class CapturedSteps:
    """Records the steps of a model's sequences, and has the memory in which recordings compute.

    A sequence's step is recorded beside the first row that is computed.

    All recordings share the memory for intermediate results: they run one after the other on one
    thread, and only logits outlive a forward. Each recording has logits of its own.

    Attributes:
        work: Whether steps can be captured; False for good once that has failed.
    """

    def __init__(self, decoder: FusedLlama, device: torch.device) -> None:
        """Build it without memory: the first recording takes that."""
        self.work = True
        self._decoder = decoder
        self._device = device
        self._unrecorded_left = 0
        self._stream: torch.cuda.Stream | None = None

    def record(self, text: KeyValues, token_id: int, *, expected: Tensor, name: str) -> bool:
        """Record a sequence's step; return whether its row lies in its place, as computed before.

        Args:
            expected: The logits after the row, as computed.
            name: The model's name, for the log.
        """
        if self._unrecorded_left:
            self._unrecorded_left -= 1
            return True
        if not bool(expected.isfinite().all()):
            return True  # nothing can be compared with it, which says nothing about recordings
        try:
            step = CapturedStep(self._decoder, text, record=self.recorded)
            if agree(expected, step(token_id, position=text.length), dtype=text.keys.dtype):
                text.keep_step(step)
                return True
            reason = "they are off"
        except RuntimeError as error:
            if lacks_memory(error):
                self._unrecorded_left = _STEPS_WITHOUT_MEMORY
                return False
            reason = str(error)
        _log.warning("model %s: forwards are not captured: %s", name, reason)
        self.work = False
        return False

    def recorded(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a recording of a function; on another device than CUDA the function itself.

        Raises:
            RuntimeError: It cannot be recorded here, or there is no memory for it.
        """
        if self._device.type != "cuda":
            return run
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = self._take_memory()
            graph, logits = self._record_on(self._stream, run)

        def replay() -> Tensor:
            with torch.cuda.device(self._device):
                graph.replay()
            return logits

        return replay

    def _take_memory(self) -> torch.cuda.Stream:
        """Begin the memory pool, and return the stream on which recordings are made."""
        self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Once no graph uses a pool, as after the last session, torch may refuse it to the next one.
        # So an empty graph always uses this one; torch warns that it is empty.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._empty_graph, _ = self._capture(lambda: None, stream=stream)
        return stream

    def _record_on(
        self, stream: torch.cuda.Stream, run: Callable[[], Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Return a graph to replay, and where its result will lie."""
        before = torch.cuda.current_stream()
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                # The first calls also do things that cannot be recorded, such as choosing kernels.
                for _ in range(_WARM_UPS):
                    run()
            return self._capture(run, stream=stream)
        finally:
            # Also after a failure half way: the calls so far write to the sequence's next row.
            before.wait_stream(stream)

    def _capture(
        self, run: Callable[[], _Result], *, stream: torch.cuda.Stream
    ) -> tuple[torch.cuda.CUDAGraph, _Result]:
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        )
        # A capture that fails does not go back to the stream before it by itself.
        with torch.cuda.stream(stream), capture:
            result = run()
        return graph, result


def capture_steps(
    name: str, decoder: Decoder | None, *, device: torch.device
) -> CapturedSteps | None:
    """Return what records a model's steps; None, with a warning, if they cannot be recorded.

    Args:
        name: The model's name, for the log.
    """
    if device.type == "cuda" and isinstance(decoder, FusedLlama):
        return CapturedSteps(decoder, device)
    _log.warning("model %s: its forwards cannot be captured on %s", name, device)
    return None
