"""What compiled code gains (`compiled_steps.py`, `compiled_products.py`): with and without.

Run from the repository's root: `python bench/compiled.py MODEL --weights int8 --threads 1`. It
prints a line for each number of rows, beside texts of 200 tokens: ms with torch's operators, with
compiled steps, and with compiled products, too; medians with the least in brackets, in turn; the
last by the one before; and whether all have the same bits.
"""

from __future__ import annotations

import argparse
import time
from array import array
from statistics import median
from unittest import mock

import torch

from paceline_engine.terms.backend import INT8, PLAIN
from paceline_engine.torch_backend.compiled_products import few_row_products
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.shared_rows import SharedRows
from paceline_engine.torch_backend.transformers import TransformersBackend

# Texts, and rows of each.
FORWARDS = ((1, 1), (1, 2), (1, 5), (1, 9), (1, 16), (1, 17), (1, 64), (1, 256), (4, 1), (16, 1))
TEXT, ROUNDS, MOST_TEXTS = 200, 20, 16


class Way:
    """A model, and texts in it."""

    def __init__(self, backend: TransformersBackend) -> None:
        """Let it read the texts."""
        assert backend.decoder is not None
        self._compute = backend.decoder
        config = backend.model.config
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        shape = KeyValueShape(
            config.num_hidden_layers,
            config.num_key_value_heads,
            width,
            width,
            backend.model.dtype,
            torch.device("cpu"),
        )
        slabs = Slabs(shape)
        self._texts = [KeyValues(slabs, reserve_length=3 * TEXT) for _ in range(MOST_TEXTS)]
        for n, text in enumerate(self._texts):
            ids = array("I", [(7919 * place + n) % config.vocab_size for place in range(TEXT)])
            text.make_room(TEXT + max(rows for _, rows in FORWARDS))
            self._compute(SharedRows([text], [ids], [1]))
            text.extend(ids)

    def timed(self, texts: int, rows: int) -> tuple[float, torch.Tensor]:
        """Compute so many rows of so many texts: ms, and the logits."""
        ids = [array("I", range(rows))] * texts
        started = time.perf_counter()
        logits = self._compute(SharedRows(self._texts[:texts], ids, [rows] * texts))
        return 1e3 * (time.perf_counter() - started), logits


@torch.inference_mode()
def main() -> None:
    """Measure a model."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("model")
    arguments.add_argument("--weights", choices=[PLAIN, INT8], default=INT8)
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    ways = [
        Way(_load(options, compiled=False, products=False)),
        Way(_load(options, compiled=True, products=False)),
    ]
    if options.weights == INT8:
        ways.append(Way(_load(options, compiled=True, products=True)))
    for texts, rows in FORWARDS:
        times: list[list[float]] = [[] for _ in ways]
        same = True
        for _ in range(ROUNDS):
            found = [way.timed(texts, rows) for way in ways]
            same = same and all(torch.equal(found[0][1], logits) for _, logits in found)
            for own, (each, _) in zip(times, found, strict=True):
                own.append(each)
        told = ", ".join(f"{median(own):.1f} ({min(own):.1f})" for own in times)
        ratio = median(times[-1]) / median(times[-2])
        print(f"{texts} x {rows}: {told}: {ratio:.2f}, {same=}", flush=True)


def _load(options: argparse.Namespace, *, compiled: bool, products: bool) -> TransformersBackend:
    with mock.patch(
        "paceline_engine.torch_backend.decoders.few_row_products",
        few_row_products if products else lambda _: [],
    ):
        return TransformersBackend(
            options.model, threads=options.threads, weights=options.weights, compiled=compiled
        )


if __name__ == "__main__":
    main()
