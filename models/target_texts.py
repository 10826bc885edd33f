"""Texts that a target writes itself, with what it would have said at each position.

A drafter is to say what its target says, so the target writes the text that the drafter learns
from: chats, of which it writes both sides, and continuations of code and prose. Nothing is
downloaded. With each token its position's most probable tokens are stored, with their
probabilities: a drafter learns more from them than from the one token that was drawn.

Theory of operation
-------------------

`ROWS` texts of `LENGTH` tokens grow side by side, by one token each in a forward. So no text is
padded, and a forward has enough rows to be bound by arithmetic, not by reading weights. Each text
is led by a `Writer`, which says what comes next: a token that has to stand there (the template of a
chat, a given beginning), or a token to be drawn at a temperature of its choice. A chat goes on with
another turn of the user where an answer ends, and other text with another beginning.

A batch is a function of the seed and of the batch's number alone. Finished batches are files, and a
run that was killed goes on with the first batch that is missing.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

from corpus import load_corpus
from paceline_engine.model_files.files import find_model_files
from paceline_engine.torch_backend.model_loading import load_model
from paceline_engine.torch_backend.packed_linear import Product, product_of
from text_writers import Writers, chat_tokenizer
from train import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from text_writers import Writer

ROWS = 64
LENGTH = 320
KEPT = 32  # The most probable tokens of each position that are stored.
_DRAWN_FROM = 64  # The most probable tokens that a token is drawn from.


class SideBySide:
    """A Llama that reads one token of each of many texts in a forward.

    Its products compute in bfloat16, with packed weights; everything else is in float32.

    Letters: B texts, L positions, E width, G key and value heads, R query heads for each, D their
    width.
    """

    def __init__(self, model: Any, *, rows: int, length: int) -> None:
        config = model.config
        self._epsilon = config.rms_norm_eps
        self._groups = config.num_key_value_heads
        self._repeats = config.num_attention_heads // self._groups
        self._width = config.head_dim
        body = model.model
        self._embedding = body.embed_tokens.weight.detach()
        self._head = _packed(self._embedding)
        self._norm = body.norm.weight.detach()
        self._layers = [_Layer.of(layer) for layer in body.layers]
        positions = torch.arange(length)[None]
        cosines, sines = body.rotary_emb(self._embedding, positions)
        self._cosines: Tensor = cosines[0]
        self._sines: Tensor = sines[0]
        shape = (len(self._layers), rows * self._groups, length, self._width)
        self._keys = torch.zeros(shape, dtype=torch.bfloat16)
        self._values = torch.zeros(shape, dtype=torch.bfloat16)

    def __call__(self, token_ids: Tensor, position: int) -> Tensor:
        """Read (B,) tokens at one position; return logits, (B, V) float32."""
        hidden = functional.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attend(index, layer, self._normed(hidden, layer.norm), position)
            gate, up = layer.gate_and_up(self._normed(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(functional.silu(gate) * up)
        return self._head(self._normed(hidden, self._norm)).float()

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self._epsilon).bfloat16()

    def _attend(self, index: int, layer: _Layer, normed: Tensor, position: int) -> Tensor:
        rows, groups = len(normed), self._groups
        states = layer.into_heads(normed).view(rows, -1, self._width)
        queries = groups * self._repeats
        rotated = self._rotate(states[:, : queries + groups].float(), position).bfloat16()
        keys, values = self._keys[index], self._values[index]
        keys[:, position] = rotated[:, queries:].reshape(-1, self._width)
        values[:, position] = states[:, queries + groups :].reshape(-1, self._width)
        query = rotated[:, :queries].reshape(rows * groups, self._repeats, self._width)
        scores = query @ keys[:, : position + 1].mT * self._width**-0.5
        seen = scores.float().softmax(-1).bfloat16() @ values[:, : position + 1]
        return layer.out_of_heads(seen.reshape(rows, -1))

    def _rotate(self, states: Tensor, position: int) -> Tensor:
        half = self._width // 2
        swapped = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
        return states * self._cosines[position] + swapped * self._sines[position]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    norm: Tensor
    mlp_norm: Tensor
    into_heads: Product
    out_of_heads: Product
    gate_and_up: Product
    down: Product

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            norm=layer.input_layernorm.weight.detach(),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            into_heads=_packed(
                attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
            ),
            out_of_heads=_packed(attention.o_proj.weight),
            gate_and_up=_packed(mlp.gate_proj.weight, mlp.up_proj.weight),
            down=_packed(mlp.down_proj.weight),
        )


def _packed(*weights: Tensor) -> Product:
    return product_of(torch.cat(weights).detach().bfloat16(), None, packs=True)


@torch.inference_mode()
def write_batch(
    model: SideBySide, writers: Sequence[Writer], *, length: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Let a target write a batch of texts.

    Returns:
        token_ids and origins, (B, L) int32 and uint8; and of the token *after* each position the
        most probable ones, (B, L, K) int32, with their log probabilities, float16.
    """
    shape = (len(writers), length)
    token_ids = torch.zeros(shape, dtype=torch.int32)
    origins = torch.zeros(shape, dtype=torch.uint8)
    best_ids = torch.zeros((*shape, KEPT), dtype=torch.int32)
    best_log_probs = torch.zeros((*shape, KEPT), dtype=torch.float16)
    drawn = [0] * len(writers)
    steps = [writer.next_step() for writer in writers]
    for position in range(length):
        for row, (writer, step) in enumerate(zip(writers, steps, strict=True)):
            token_id = drawn[row] if step.token_id is None else step.token_id
            token_ids[row, position], origins[row, position] = token_id, step.origin
            writer.read(token_id, step.origin)
        steps = [writer.next_step() for writer in writers]
        log_probs = model(token_ids[:, position].long(), position).log_softmax(-1)
        best = log_probs.topk(_DRAWN_FROM)
        best_ids[:, position] = best.indices[:, :KEPT]
        best_log_probs[:, position] = best.values[:, :KEPT]
        temperatures = torch.tensor([step.temperature for step in steps])[:, None]
        noise = torch.rand(best.values.shape, generator=generator).clamp_min_(1e-20)
        scores = best.values - temperatures * noise.log().neg_().log()
        drawn = best.indices.gather(1, scores.argmax(-1, keepdim=True))[:, 0].tolist()
    return {
        "token_ids": token_ids,
        "origins": origins,
        "best_ids": best_ids,
        "best_log_probs": best_log_probs,
    }


def batch_path(folder: Path, number: int) -> Path:
    """Return where a batch of texts is stored."""
    return folder / f"texts-{number:05}.safetensors"


def main(arguments: Sequence[str] | None = None) -> None:
    """Let the target write those batches that are not there yet."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    corpus = load_corpus()
    code = [file.text for file in (corpus.held_out if options.held_out else corpus.training)]
    prose = [text for index, text in enumerate(topics.topics.values()) if
             (index % 20 == 0) == options.held_out]  # fmt: skip
    files = find_model_files(options.target)
    makers = Writers(chat_tokenizer(files), code=code, prose=prose)
    model = SideBySide(load_model(files, dtype="float32"), rows=ROWS, length=LENGTH)
    options.work.mkdir(parents=True, exist_ok=True)
    for number in range(options.first, options.batches, options.stride):
        path = batch_path(options.work, number)
        if path.exists():
            continue
        started = time.monotonic()
        seed = options.seed * 1_000_003 + number
        chance = random.Random(seed)  # noqa: S311 - texts, no secrets
        batch = write_batch(
            model,
            [makers.make(chance) for _ in range(ROWS)],
            length=LENGTH,
            generator=torch.Generator().manual_seed(seed),
        )
        partial = path.with_suffix(f".{os.getpid()}")
        save_file(batch, partial)
        partial.replace(path)  # A kill while writing leaves no half of a batch.
        speed = ROWS * LENGTH / (time.monotonic() - started)
        print(f"batch {number}: {speed:.0f} tokens/s", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="as a server's --model")
    parser.add_argument("--work", type=Path, required=True, help="where the texts go")
    parser.add_argument("--batches", type=int, default=100, help="how many batches there shall be")
    parser.add_argument("--first", type=int, default=0, help="the first batch of this process")
    parser.add_argument("--stride", type=int, default=1, help="processes that share the batches")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--held-out", action="store_true", help="take beginnings that training never sees"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
