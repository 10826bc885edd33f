"""Forwards of one row on CUDA, recorded once and replayed.

A small model's kernels take less time than launching them. A recording is launched as one, but
does the same to the same addresses each time: so the token and its position are read from the
device, keys and values lie in buffers that stay, and attention looks at whole buffers. Where they
have moved, because more memory was reserved, it is recorded anew.
"""

from __future__ import annotations

import logging
import math
import warnings
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from paceline_engine.torch_backend.decoders import agree
from paceline_engine.torch_backend.device import lacks_memory
from paceline_engine.torch_backend.shared_rows import ForwardRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_engine.torch_backend.attention import Attention
    from paceline_engine.torch_backend.key_values import KeyValues
    from paceline_engine.torch_backend.llama import FusedLlama

_log = logging.getLogger(__name__)

_WARM_UPS = 3
# Where there was no memory for a recording, each new attempt costs as much as several steps.
_STEPS_WITHOUT_MEMORY = 64

_Result = TypeVar("_Result")


class CapturedStep(ForwardRows):
    """A forward of one row for one text.

    Elsewhere than on CUDA it is computed anew each time, over whole buffers all the same.

    Invariants:
        The logits are those of the decoder itself, apart from rounding
        (tests/unit/engine/test_captured.py).
    """

    def __init__(self, decoder: FusedLlama, text: KeyValues, recorder: Recorder) -> None:
        """Record it.

        Args:
            text: With fixed buffers, and room for a row. What they hold at the length is
                overwritten.
            recorder: The decoder's.

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
        # Computed now, because a recording must not make a table longer; and held, because for a
        # longer text the decoder replaces it.
        self._rotations = decoder.rotations(text.capacity)
        self._replay = recorder.record(self._run)

    def __call__(self, token_id: int, *, position: int) -> Tensor:
        """Compute a row, and return the logits after it: (1, V), valid until the next call."""
        self.token_ids.fill_(token_id)
        self.positions.fill_(position)
        return self._replay()

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, how: Attention
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
    """The steps of a model's texts: each is recorded beside the first row that is computed.

    Attributes:
        work: Whether they can be captured; no longer once that has failed.
    """

    def __init__(self, decoder: FusedLlama, device: torch.device) -> None:
        """Build it without any."""
        self.work = True
        self._decoder = decoder
        self._recorder = Recorder(device)
        self._unrecorded_left = 0

    def record(self, text: KeyValues, token_id: int, *, expected: Tensor, name: str) -> bool:
        """Record a text's step; return whether its row lies in its place, as computed before.

        Args:
            expected: The logits after the row, as computed.
            name: What the model is called, for the log.
        """
        if self._unrecorded_left:
            self._unrecorded_left -= 1
            return True
        try:
            step = CapturedStep(self._decoder, text, self._recorder)
            if agree(expected, step(token_id, position=text.length)):
                text.step = step
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


class Recorder:
    """Records forwards of a model, and has memory that they all compute in.

    They take turns on one thread, and of a forward that is over only the logits are read: so what
    one computes on the way can lie where another one's lay. Each one's logits have a place of
    their own.
    """

    def __init__(self, device: torch.device) -> None:
        """Build it without memory: that comes with the first recording."""
        self._device = device
        self._pool: _Pool | None = None

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return what does the same on the same memory each time; elsewhere than on CUDA itself.

        Raises:
            RuntimeError: It cannot be recorded here, or there is no memory for it.
        """
        if self._device.type != "cuda":
            return run
        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = _Pool()
            graph, logits = self._pool.record(run)

        def replay() -> Tensor:
            with torch.cuda.device(self._device):
                graph.replay()
            return logits

        return replay


class _Pool:
    """Memory of a CUDA device for recordings, and the stream on which they are made."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Once no graph uses a pool, as after the last session, torch may refuse it to the next one.
        # So an empty graph always uses this one; torch warns that it is empty.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._graph = self._capture(lambda: None)[0]

    def record(self, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Return what to replay, and where its result will lie."""
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                # What the first calls do on the side, such as choosing kernels, cannot be recorded.
                for _ in range(_WARM_UPS):
                    run()
            return self._capture(run)
        finally:
            # Also if it was given up half way: what it has begun writes to the text's next row.
            before.wait_stream(self._stream)

    def _capture(self, run: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result]:
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(
            graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local"
        )
        # A capture that fails does not go back to the stream before it by itself.
        with torch.cuda.stream(self._stream), capture:
            result = run()
        return graph, result
