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
from torch.nn import functional

from paceline_engine.backends.shared_rows import ForwardRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_engine.backends.attention import Attention
    from paceline_engine.backends.key_values import KeyValues
    from paceline_engine.backends.llama import FusedLlama

__all__ = ["CapturedStep"]

_WARM_UPS = 3


class CapturedStep(ForwardRows):
    """A forward of one row for one text.

    Elsewhere than on CUDA it is computed anew each time, over whole buffers all the same.

    Invariants:
        The logits are those of the decoder itself, apart from rounding
        (tests/unit/engine/test_captured.py).
    """

    def __init__(self, decoder: FusedLlama, text: KeyValues) -> None:
        """Record it.

        Args:
            text: With fixed buffers, and room for a row. What they hold at the length is
                overwritten.

        Raises:
            RuntimeError: It cannot be recorded here.
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
        self._replay = _recorded(self._run, device)

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
