"""Write texts and train drafters on them, all in one go: `python models/distil_at_once.py --help`.

For a GPU that is there for minutes, or a CPU for hours. A drafter is to say what its target says,
so the target writes the texts that it learns from: chats, of which it writes both sides, and
continuations of code and prose. Nothing is downloaded. With each token its position's most probable
tokens are stored, with their probabilities: a drafter learns more from them than from the one token
that was drawn.

The texts stay on the device, every part has its share of the time, and several drafters can be
trained on the same texts, to choose from. A drafter's weights are in its folder from its first
report on, and only better ones replace them.

Where the device lacks memory, fewer rows are tried.
"""

from __future__ import annotations

import argparse
import gc
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors.torch import save_file

from device_texts import DeviceTexts
from distillation import Choice, Drafter, Texts, choose_tokens, embeddings_digest, load_target
from drafter_training import Training, write_own
from led_rows import Script
from paceline_engine.model_files.files import find_model_files
from side_by_side import SideBySide
from text_writers import load_writers
from train import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from transformers import LlamaForCausalLM

    from distillation import Reached
    from text_writers import Writers

# In the first 36 steps of 6 texts two layers came to 4.56 with this rate, to 4.77 with half of it.
_RATE = 2e-3
_LONGEST_GRADIENT = 1.0  # Nobody is there to begin again if one step went astray.
_KEPT = 32  # The most probable tokens of each position that are stored.
_LEAST_ROWS = 16
_CHECKED_TEXTS = 16
_SCRIPTS_AT_ONCE = 64
# The texts of the target whose tokens are counted to choose the tokens of the head.
_COUNTED_TEXTS = 1 << 13
_FIXED_COST = 2  # The cost of the head and the loss in a step, in layers.
_MOST_REPORT_SECONDS = 20.0
_EVALUATION_SECONDS = 3.0  # Kept free for each drafter's last report.

_Result = TypeVar("_Result")


class Clock:
    """Says how much of the time has passed, and prints lines with it."""

    def __init__(self, seconds: float) -> None:
        """Begin now."""
        self._started = time.monotonic()
        self.seconds = seconds

    def spent(self) -> float:
        """Return the seconds since the beginning."""
        return time.monotonic() - self._started

    def left(self) -> float:
        """Return the seconds up to the end."""
        return self.seconds - self.spent()

    def say(self, line: str) -> None:
        """Print a line."""
        print(f"[{self.spent():6.1f} s] {line}", flush=True)


class Scripts:
    """Makes the scripts of batches ahead, on threads of the CPU."""

    def __init__(self, training: Writers, held_out: Writers, *, seed: int, length: int) -> None:
        """Make none yet.

        Args:
            training: Makes the writers of texts to learn from.
            held_out: Makes those of held-out texts.
        """
        self._training, self._held_out = training, held_out
        self._seed, self._length = seed, length

    def make(
        self, pool: ThreadPoolExecutor, *, number: int, rows: int, held_out_rows: int
    ) -> list[Script]:
        """Make a batch's: those of its held-out texts first."""

        def some(part: range) -> list[Script]:
            makers = self._held_out if part.start < held_out_rows else self._training
            chance = random.Random(f"{self._seed}/{number}/{part.start}")  # noqa: S311 - no secrets
            return [Script.of(makers.make(chance), length=self._length) for _ in part]

        parts = [
            range(start, min(start + _SCRIPTS_AT_ONCE, stop))
            for first, stop in ((0, held_out_rows), (held_out_rows, rows))
            for start in range(first, stop, _SCRIPTS_AT_ONCE)
        ]
        return [script for scripts in pool.map(some, parts) for script in scripts]


def write_texts(
    target: LlamaForCausalLM,
    scripts: Scripts,
    rows: int,
    *,
    held_out_rows: int,
    length: int,
    seed: int,
    clock: Clock,
    until: float,
    takes_graphs: bool,
    least_agreement: float,
) -> tuple[Texts, Texts]:
    """Let a target write until a time of the clock, at least one batch.

    Args:
        held_out_rows: The texts of the first batch that are not learnt from, at most a quarter.
        least_agreement: The share of places in which the library's forward has the same best token.

    Returns:
        The texts to learn from, and the held-out ones.
    """
    held_out_rows = min(held_out_rows, rows // 4)
    device = target.device
    generator = torch.Generator(device).manual_seed(seed)
    batches: list[Mapping[str, Tensor]] = []
    took = 0.0
    with ThreadPoolExecutor() as pool:
        writing = DeviceTexts(
            SideBySide(target, rows=rows, length=length),
            rows=rows,
            length=length,
            kept=_KEPT,
            takes_graphs=takes_graphs,
        )
        clock.say(f"the target is ready to write {rows} texts side by side")
        coming = scripts.make(pool, number=0, rows=rows, held_out_rows=held_out_rows)
        while not batches or clock.spent() + took < until:
            started = time.monotonic()
            batches.append(writing.write(coming, generator=generator))
            # While the GPU works.
            coming = scripts.make(pool, number=len(batches), rows=rows, held_out_rows=0)
            made = time.monotonic() - started
            _wait_for(device)
            took = time.monotonic() - started
            speed = rows * length / took
            clock.say(
                f"batch {len(batches)}: {speed:.0f} tokens/s,"
                f" the next one's scripts after {made:.1f} of {took:.1f} s"
            )
            if len(batches) == 1:
                some = Texts.of(batches).rows(slice(_CHECKED_TEXTS))
                _check(target, some, clock=clock, least=least_agreement)
    every = Texts.of(batches)
    return every.rows(slice(held_out_rows, None)), every.rows(slice(held_out_rows))


@torch.no_grad()
def _check(target: LlamaForCausalLM, texts: Texts, *, clock: Clock, least: float) -> None:
    """Stop if what was written is not what the target would have said."""
    best = target(texts.token_ids.long()).logits.argmax(-1)
    share = float((best == texts.best_ids[..., 0]).float().mean())
    probability = float(texts.best_log_probs[..., 0].float().exp().mean())
    clock.say(
        f"the library's forward has the same best token in {share:.3f} of the places;"
        f" its probability is {probability:.3f} on average"
    )
    if share < least:
        raise SystemExit("so the texts are wrong")


def train(
    target: LlamaForCausalLM,
    choice: Choice,
    rows: int,
    *,
    texts: Texts,
    held_out: Texts,
    output: Path,
    until: float,
    rate: float,
    seed: int,
    clock: Clock,
    embeddings: str,
) -> Reached:
    """Train a drafter until a time of the clock; its folder has the best weights of all reports."""
    drafter = Drafter(target, choice)
    training = Training(
        drafter,
        texts=texts,
        held_out=held_out,
        seed=seed,
        rows=rows,
        rate=rate,
        longest_gradient=_LONGEST_GRADIENT,
        curve=output.with_name(f"{output.name}.jsonl"),
    )
    best = float("inf")

    def keep(reached: Reached) -> None:
        nonlocal best
        clock.say(f"{output.name}: {_gain(target, choice, reached)}")
        if reached.loss < best:  # Never so where it is no number.
            best = reached.loss
            written = output.with_name(f"{output.name}.partial")
            said = {"tokens": texts.token_ids.numel(), **reached.as_row(training.step)}
            write_own(written, drafter, embeddings=embeddings, training=said)
            shutil.rmtree(output, ignore_errors=True)
            written.rename(output)

    seconds = max(1.0, until - clock.spent())
    report_seconds = min(_MOST_REPORT_SECONDS, max(1.0, seconds / 6))
    return training.train_for(seconds, report_seconds=report_seconds, keep=keep)


def _gain(target: LlamaForCausalLM, choice: Choice, reached: Reached) -> str:
    """Say what greedy speculation would gain if a pass took as long as reading its weights."""
    layer = sum(weight.numel() for weight in target.model.layers[0].parameters())
    head = target.lm_head.weight
    whole = layer * len(target.model.layers) + head.numel()
    share = (layer * len(choice.layers) + len(choice.token_ids) * head.shape[1]) / whole
    gains = [
        (accepted + 1) / (1 + lookahead * share)
        for lookahead, accepted in enumerate(reached.accepted, 1)
    ]
    lookahead = max(range(len(gains)), key=gains.__getitem__) + 1
    return (
        f"a pass costs {share:.3f} of the target's; with lookahead {lookahead}"
        f" {gains[lookahead - 1]:.2f} times as fast as without"
    )


def with_fewer_rows(rows: int, attempt: Callable[[int], _Result]) -> _Result:
    """Attempt it with so many rows, and with half as many where memory is lacking."""
    while True:
        try:
            return attempt(rows)
        except torch.OutOfMemoryError as error:
            if rows <= _LEAST_ROWS:
                raise
            said = str(error).split(". ")[0]
        # Only here, so that no frame of the error holds memory.
        rows //= 2
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{said}; trying {rows} rows", flush=True)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write, choose and train."""
    options = _parse(arguments)
    clock = Clock(options.seconds)
    torch.set_num_threads(options.threads)
    if options.device.type == "cuda":
        # Float32 products with TF32's eleven bits are ten times as fast.
        torch.set_float32_matmul_precision("high")
    target = load_target(options.target, options.device)
    files = find_model_files(options.target)
    embeddings = embeddings_digest(target)
    clock.say(f"the target is loaded; its embeddings are {embeddings[:8]}")
    scripts = Scripts(
        load_writers(files, held_out=False),
        load_writers(files, held_out=True),
        seed=options.seed,
        length=options.length,
    )
    writing = partial(
        write_texts,
        target,
        scripts,
        held_out_rows=options.held_out_rows,
        length=options.length,
        seed=options.seed,
        clock=clock,
        until=clock.spent() + options.text_share * clock.left(),
        takes_graphs=not options.no_graphs,
        least_agreement=options.least_agreement,
    )
    texts, held_out = with_fewer_rows(options.rows, writing)
    if options.device.type == "cuda":
        torch.cuda.empty_cache()  # What the target's texts took.
    clock.say(f"{texts.token_ids.numel():,} tokens to learn from")
    if options.texts is not None:
        options.texts.mkdir(parents=True, exist_ok=True)
        tokens = {"token_ids": texts.token_ids.int().cpu().contiguous()}
        save_file(tokens, options.texts / "texts-00000.safetensors")
    token_ids, share = choose_tokens(
        texts.rows(slice(_COUNTED_TEXTS)),
        count=options.tokens,
        always=files.tokens.end_ids,
        vocabulary_size=files.vocabulary_size,
    )
    clock.say(f"{options.tokens} tokens have {share:.4f} of the target's probability")
    options.output.mkdir(parents=True, exist_ok=True)
    summary = {}
    for index, layers in enumerate(options.layers):
        choice = Choice(tuple(layers), token_ids)
        costs = [len(each) + _FIXED_COST for each in options.layers[index:]]
        free = clock.left() - _EVALUATION_SECONDS * len(costs)
        until = clock.spent() + max(free, len(costs)) * costs[0] / sum(costs)
        name = f"layers-{len(layers)}"
        clock.say(f"{name}: layers {layers}, up to {until:.0f} s")
        training = partial(
            train,
            target,
            choice,
            texts=texts,
            held_out=held_out,
            output=options.output / name,
            until=until,
            rate=options.rate,
            seed=options.seed,
            clock=clock,
            embeddings=embeddings,
        )
        reached = with_fewer_rows(options.step_rows, training)
        summary[name] = f"greedy {reached.greedy:.3f}, {_gain(target, choice, reached)}"
    for name, line in summary.items():
        clock.say(f"{name}: {line}")


def _layers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="as a server's --model")
    parser.add_argument("--output", type=Path, required=True, help="a folder for each drafter")
    parser.add_argument("--seconds", type=float, required=True, help="for all of it")
    parser.add_argument("--device", type=torch.device, default="cuda:0")
    parser.add_argument("--texts", type=Path, help="a folder: keep the texts for other trainings")
    parser.add_argument("--text-share", type=float, default=0.4, help="of the time, for texts")
    parser.add_argument("--rows", type=int, default=2048, help="texts of a batch")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs: more slowly")
    parser.add_argument(
        "--least-agreement",
        type=float,
        default=0.9,
        help="with the library's forward; products in bfloat16 change some best tokens",
    )
    parser.add_argument("--length", type=int, default=320, help="tokens of a text")
    parser.add_argument("--held-out-rows", type=int, default=512, help="of the first batch")
    parser.add_argument("--tokens", type=int, default=8192, help="that the head scores")
    parser.add_argument(
        "--layers",
        type=_layers,
        nargs="+",
        default=[[0, 1, 28, 29], [0, 29]],
        help="to begin with, of each drafter, such as 0,1,28,29 0,29",
    )
    parser.add_argument("--step-rows", type=int, default=64, help="texts of a step")
    parser.add_argument("--rate", type=float, default=_RATE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=4)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    keep_freed_memory()
    main()
