"""What weights in eight or four bits cost: how often the likeliest token stays, and perplexity.

Run from the repository's root: `python bench/int8.py MODEL TEXT... [--weights int4]` with a model's
folder or GGUF file, and files of text that it has not learned. A `.jsonl` file has a text in each
line's "text".
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from paceline_engine.terms.backend import INT4, INT8, PLAIN
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.shared_rows import SharedRows
from paceline_engine.torch_backend.transformers import TransformersBackend

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_TOKENS, LEAST_TOKENS = 512, 16


def main() -> None:
    """Compare both ways on each file."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("model")
    arguments.add_argument("texts", nargs="+", type=Path)
    arguments.add_argument("--weights", choices=(INT8, INT4), default=INT8)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--most-pieces", type=int, default=16, help="of each file")
    options = arguments.parse_args()
    ways = [
        TransformersBackend(options.model, threads=options.threads, weights=weights)
        for weights in (PLAIN, options.weights)
    ]
    tokenizer = Tokenizer.from_str(ways[0].tokenizer.decode())
    for path in options.texts:
        pieces = [*cut(tokenizer, path)][: options.most_pieces]
        print(path, compared(ways, pieces), flush=True)


def cut(tokenizer: Tokenizer, path: Path) -> Iterator[Sequence[int]]:
    """Yield pieces of a file's text."""
    if path.suffix == ".jsonl":
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    else:
        texts = [path.read_text()]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for start in range(0, len(ids), MOST_TOKENS):
            if len(piece := ids[start : start + MOST_TOKENS]) >= LEAST_TOKENS:
                yield piece


@torch.inference_mode()
def compared(ways: Sequence[TransformersBackend], pieces: Sequence[Sequence[int]]) -> str:
    """Return the comparison, as a line."""
    count = agreeing = 0
    losses, divergence, gaps = [0.0, 0.0], 0.0, []
    for ids in pieces:
        plain, rounded = (functional.log_softmax(scored(way, ids), -1) for way in ways)
        targets = torch.tensor(ids[1:])[:, None]
        for index, scores in enumerate((plain, rounded)):
            losses[index] -= float(scores.gather(1, targets).sum())
        best = plain.argmax(-1)
        differs = best != rounded.argmax(-1)
        count, agreeing = count + len(best), agreeing + int((~differs).sum())
        divergence += float((plain.exp() * (plain - rounded)).sum())
        first, second = plain[differs].topk(2).values.unbind(-1)
        gaps += (first - second).tolist()
    before, after = (math.exp(loss / count) for loss in losses)
    gap = sorted(gaps)[len(gaps) // 2] if gaps else 0
    return (
        f"{count} tokens: likeliest token the same {agreeing / count:.4f}, perplexity {before:.3f}"
        f" and {after:.3f} ({after / before - 1:+.2%}), divergence {divergence / count:.5f} nats,"
        f" median gap of the two likeliest where they differ {gap:.3f} nats"
    )


def scored(backend: TransformersBackend, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits after each token but the last: (T - 1, V)."""
    config = backend.model.config
    width = config.head_dim
    shape = KeyValueShape(
        config.num_hidden_layers,
        config.num_key_value_heads,
        width,
        width,
        torch.float32,
        torch.device("cpu"),
    )
    text = KeyValues(Slabs(shape), reserve_length=len(ids))
    text.make_room(len(ids) - 1)
    assert backend.decoder is not None
    return backend.decoder(SharedRows([text], [ids[:-1]], [len(ids) - 1]))


if __name__ == "__main__":
    main()
