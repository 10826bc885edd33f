"""Forwards of one row on CUDA, recorded once and replayed.

A small model's kernels take less time than launching them. A recording is launched as one, but
does the same to the same addresses each time: so the token and its position are read from the
device, keys and values lie in buffers that stay, and attention looks at whole buffers. Where they
have moved, because more memory was reserved, it is recorded anew.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_engine.backends.key_values import KeyValueLayer
    from paceline_engine.backends.llama import FusedLlama

__all__ = ["CapturedStep"]

_WARM_UPS = 3


class CapturedStep:
    """A forward of one row for one text.

    Elsewhere than on CUDA it is computed anew each time, over whole buffers all the same.

    Invariants:
        The logits are those of the decoder itself, apart from rounding
        (tests/unit/engine/test_captured.py).
    """

    def __init__(self, decoder: FusedLlama, layers: Sequence[KeyValueLayer]) -> None:
        """Record it.

        Args:
            layers: The text's, with fixed buffers. What they hold at the length is overwritten.

        Raises:
            RuntimeError: It cannot be recorded here.
        """
        assert layers[0].keys is not None
        capacity, device = layers[0].keys.shape[-2], layers[0].keys.device
        self._decoder = decoder
        self._layers = layers
        self._token_id = torch.zeros(1, dtype=torch.int64, device=device)
        self._position = torch.full_like(self._token_id, layers[0].length)
        self._columns = torch.arange(capacity, device=device)
        # Held, because a recording holds addresses only.
        self._buffers = [(layer.keys, layer.values) for layer in layers]
        self._rotations = decoder.rotations(capacity)
        self._replay = _recorded(self._run, device)

    @property
    def is_current(self) -> bool:
        """Whether the text's buffers are still those that it was recorded with."""
        return all(
            layer.keys is keys and layer.values is values
            for layer, (keys, values) in zip(self._layers, self._buffers, strict=True)
        )

    def __call__(self, token_id: int) -> Tensor:
        """Append a token, and return the logits after it: (1, V), valid until the next call."""
        position = self._layers[0].length
        self._token_id.fill_(token_id)
        self._position.fill_(position)
        logits = self._replay()
        for layer in self._layers:
            layer.length = position + 1
        return logits

    def update(self, keys: Tensor, values: Tensor, layer_index: int, /) -> tuple[Tensor, Tensor]:
        """Write a row in its place, and return all of the buffers."""
        layer = self._layers[layer_index]
        assert layer.keys is not None
        assert layer.values is not None
        return (
            layer.keys.index_copy_(-2, self._position, keys),
            layer.values.index_copy_(-2, self._position, values),
        )

    def _run(self) -> Tensor:
        cosines, sines = (table.index_select(0, self._position) for table in self._rotations)
        unseen = self._columns > self._position
        mask = cosines.new_zeros(len(unseen)).masked_fill_(unseen, -math.inf)[None]
        return self._decoder.run(self._token_id, (cosines, sines), mask, self, rows=1)


def _recorded(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    if device.type != "cuda":
        return run
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            # What the first calls do on the side, such as choosing kernels, cannot be recorded.
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = run()

    def replay() -> Tensor:
        with torch.cuda.device(device):
            graph.replay()
        return logits

    return replay
