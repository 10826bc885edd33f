"""Thousands of texts at once, written without a word from the host.

The texts grow side by side, by one token each in a forward. So no text is padded, and a forward has
enough rows to be bound by arithmetic, not by reading weights. On a GPU a forward of 2,048 rows
takes some milliseconds, so the texts are led in tensors (`LedRows`), and all that a batch becomes
stays on the device. A position is one CUDA graph, which is replayed; the host only counts. The
graph of a position looks at whole buckets of positions, so there are few graphs. Without graphs the
same operations run one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from led_rows import LedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from led_rows import Script
    from side_by_side import SideBySide

_BUCKET = 64  # Positions.
DRAWN_FROM = 64  # The most probable tokens that a token is drawn from.


class DeviceTexts:
    """A target that writes batches of texts on its device.

    Letters: B texts, L positions, K stored tokens of a position.
    """

    def __init__(
        self, model: SideBySide, *, rows: int, length: int, kept: int, takes_graphs: bool = True
    ) -> None:
        """Make room for a batch, and its graphs if they are wanted and the device is a GPU."""
        self._model, self._length, self._kept = model, length, kept
        self._device = device = model.device
        self._led = LedRows(rows=rows, length=length, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._drawn = torch.zeros(rows, dtype=torch.int64, device=device)
        self._noise = torch.full((rows, DRAWN_FROM), 0.5, device=device)
        shape = (rows, length)
        self._batch = {
            "token_ids": torch.zeros(shape, dtype=torch.int32, device=device),
            "origins": torch.zeros(shape, dtype=torch.uint8, device=device),
            "best_ids": torch.zeros(*shape, kept, dtype=torch.int32, device=device),
            "best_log_probs": torch.zeros(*shape, kept, dtype=torch.float16, device=device),
        }
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if takes_graphs and device.type == "cuda":
            self._capture()

    @torch.no_grad()
    def write(self, scripts: Sequence[Script], *, generator: torch.Generator) -> dict[str, Tensor]:
        """Write a batch, and leave it on the device.

        Returns at once on a GPU, which then works through what it was told. The batch is a
        function of the scripts, the generator and the kind of device.

        Returns:
            token_ids and origins, (B, L) int32 and uint8; and of the token *after* each position
            the most probable ones, (B, L, K) int32, with their log probabilities, float16.
        """
        self._led.begin(scripts)
        self._position.zero_()
        self._drawn.zero_()
        for position in range(self._length):
            self._noise.uniform_(generator=generator)
            seen = self._seen(position)
            if seen in self._graphs:
                self._graphs[seen].replay()
            else:
                self._advance(seen)
        return {name: tensor.clone() for name, tensor in self._batch.items()}

    def _seen(self, position: int) -> int:
        return min(self._length, (position // _BUCKET + 1) * _BUCKET)

    def _advance(self, seen: int) -> None:
        """Write one position. No operation here waits for the device, or for the host."""
        token_ids, origins = self._led.advance(self._drawn)
        logits = self._model(token_ids, self._position, seen=seen)
        best = logits.log_softmax(-1).topk(min(DRAWN_FROM, logits.shape[-1]))
        for name, column in (
            ("token_ids", token_ids),
            ("origins", origins),
            ("best_ids", best.indices[:, : self._kept]),
            ("best_log_probs", best.values[:, : self._kept]),
        ):
            whole = self._batch[name]
            whole.index_copy_(1, self._position, column[:, None].to(whole.dtype))
        exponential = self._noise[:, : best.values.shape[1]].clamp(min=1e-20).log().neg()
        scores = best.values - self._led.temperatures()[:, None] * exponential.log()
        self._drawn.copy_(best.indices.gather(1, scores.argmax(-1, keepdim=True))[:, 0])
        self._position += 1

    @torch.no_grad()
    def _capture(self) -> None:
        """Record a graph of each bucket; go on without any if that fails."""
        buckets = sorted({self._seen(position) for position in range(self._length)})
        try:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for seen in buckets:  # Libraries load what they need before anything is recorded.
                    self._advance(seen)
            torch.cuda.current_stream().wait_stream(side)
            pool = torch.cuda.graph_pool_handle()
            for seen in buckets:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._advance(seen)
                self._graphs[seen] = graph
        except RuntimeError as error:
            self._graphs.clear()
            torch.cuda.synchronize()
            print(f"no CUDA graphs, so texts are written more slowly: {error}", flush=True)
