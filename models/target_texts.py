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

On a GPU (`--device cuda:0 --rows 2048`) `DeviceTexts` does the same with thousands of rows.

A batch is a function of the seed, of the batch's number, of the number of rows and of the kind of
device. Finished batches are files, and a
run that was killed goes on with the first batch that is missing.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path
from pydoc_data import topics
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from corpus import load_corpus
from device_texts import DRAWN_FROM, DeviceTexts
from led_rows import Script
from paceline_engine.model_files.files import find_model_files
from paceline_engine.torch_backend.model_loading import load_model
from side_by_side import SideBySide
from text_writers import Writers, chat_tokenizer
from train import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline_engine.model_files.files import ModelFiles
    from text_writers import Writer

ROWS = 64
LENGTH = 320
KEPT = 32  # The most probable tokens of each position that are stored.


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
        here = torch.tensor([position])
        logits = model(token_ids[:, position].long(), here, seen=position + 1)
        log_probs = logits.log_softmax(-1)
        best = log_probs.topk(DRAWN_FROM)
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
    files = find_model_files(options.target)
    makers = load_writers(files, held_out=options.held_out)
    target = load_model(files, dtype="float32").to(options.device)
    model = SideBySide(target, rows=options.rows, length=LENGTH)
    on_device = None
    if options.device.type != "cpu":
        fast_products()
        on_device = DeviceTexts(model, rows=options.rows, length=LENGTH, kept=KEPT)
    options.work.mkdir(parents=True, exist_ok=True)
    for number in range(options.first, options.batches, options.stride):
        path = batch_path(options.work, number)
        if path.exists():
            continue
        started = time.monotonic()
        seed = options.seed * 1_000_003 + number
        chance = random.Random(seed)  # noqa: S311 - texts, no secrets
        writers = [makers.make(chance) for _ in range(options.rows)]
        generator = torch.Generator(options.device).manual_seed(seed)
        if on_device is None:
            batch = write_batch(model, writers, length=LENGTH, generator=generator)
        else:
            scripts = [Script.of(writer, length=LENGTH) for writer in writers]
            batch = on_device.write(scripts, generator=generator)
        partial = path.with_suffix(f".{os.getpid()}")
        save_file({name: tensor.cpu() for name, tensor in batch.items()}, partial)
        partial.replace(path)  # A kill while writing leaves no half of a batch.
        speed = options.rows * LENGTH / (time.monotonic() - started)
        print(f"batch {number}: {speed:.0f} tokens/s", flush=True)


def load_writers(files: ModelFiles, *, held_out: bool) -> Writers:
    """Return what makes writers, with beginnings that are for training or held out."""
    corpus = load_corpus()
    code = [file.text for file in (corpus.held_out if held_out else corpus.training)]
    prose = [text for index, text in enumerate(topics.topics.values()) if
             (index % 20 == 0) == held_out]  # fmt: skip
    return Writers(chat_tokenizer(files), code=code, prose=prose)


def fast_products() -> None:
    """Let a GPU compute float32 products with TF32's eleven bits, which is ten times as fast."""
    torch.set_float32_matmul_precision("high")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="as a server's --model")
    parser.add_argument("--work", type=Path, required=True, help="where the texts go")
    parser.add_argument("--device", type=torch.device, default="cpu", help="such as cuda:0")
    parser.add_argument("--rows", type=int, default=ROWS, help="texts of a batch")
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
