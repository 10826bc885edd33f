"""Train a drafter on what its target wrote: `python models/distil_drafter.py --help`.

    target_texts.py -> texts -> choose -> train -> finish -> the drafter's own weights

The drafter has the target's embeddings, some of its layers, and a head that scores only the tokens
that the target says most often. Embeddings and head stay as they are, so a drafter is stored as its
layers alone; `smollm2_drafter.py` puts it together again.

- `choose` picks the tokens of the head, and says with which layers to begin.
- `train` goes on from its checkpoint, with more texts and more steps if asked to, at a constant
  rate.
- `finish` goes on from the checkpoint, lets the rate fall to zero, and writes the weights. The
  checkpoint stays as it is, so that training can go on from before the fall.

On one machine, with one number of threads, the result follows from the texts and the seed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from distillation import (
    Choice,
    Drafter,
    Reached,
    Texts,
    choose_tokens,
    embeddings_digest,
    evaluate,
    load_target,
)
from paceline_engine.model_files.files import find_model_files
from paceline_engine.model_files.small_files import DRAFT_VOCABULARY
from smollm2_drafter import CARD, WEIGHTS
from train import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_CHOICE = "choice.json"
_CHECKPOINT = "checkpoint.pt"
_CURVE = "curve.jsonl"
# AdamW: in the first steps Muon, which `train.py` uses, learnt less in twice the time.
_RATE = 1e-3
_WARM_UP_STEPS = 20


class Training:
    """A run, or the rest of one.

    Args:
        work: Where checkpoint and curve lie.
        drafter: What is trained.
        texts: To learn from.
        held_out: Not to learn from.
        seed: Of the order of texts.
        rows: Texts in a step.
        report_steps: Steps between two reports; each writes a checkpoint, too.
    """

    def __init__(
        self,
        work: Path,
        drafter: Drafter,
        *,
        texts: Texts,
        held_out: Texts,
        seed: int,
        rows: int = 12,
        report_steps: int = 50,
    ) -> None:
        """Begin, or go on from the checkpoint in the folder."""
        self.step = 0
        self._checkpoint = work / _CHECKPOINT
        self._curve = work / _CURVE
        self._drafter = drafter
        self._texts = texts
        self._held_out = held_out
        self._seed = seed
        self._rows = rows
        self._report_steps = report_steps
        weights = [each for each in drafter.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(weights, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        if self._checkpoint.exists():
            state = torch.load(self._checkpoint, weights_only=True)
            drafter.model.load_state_dict(state["drafter"], strict=False)
            self._optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]

    def train(self, *, steps: int) -> None:
        """Go on at the constant rate until so many steps were made in all."""
        if not self.step:
            self.report()
        while self.step < steps:
            self._advance(min(1.0, (self.step + 1) / _WARM_UP_STEPS))
            if self.step % self._report_steps == 0 or self.step == steps:
                self._save()
                self.report()

    def finish(self, *, steps: int) -> Reached:
        """Make so many steps more, in which the rate falls to zero."""
        for left in range(steps, 0, -1):
            self._advance(left / steps)
        return self.report()

    def report(self) -> Reached:
        """Measure, print and keep what is reached."""
        reached = evaluate(self._drafter, self._held_out)
        lengths = " ".join(f"{each:.2f}" for each in reached.accepted)
        print(
            f"step {self.step}: held out {reached.loss:.3f}, greedy {reached.greedy:.3f},"
            f" sampled {reached.sampled:.3f}, accepted {lengths}",
            flush=True,
        )
        with self._curve.open("a") as file:
            file.write(json.dumps(reached.as_row(self.step)) + "\n")
        return reached

    def _advance(self, rate: float) -> None:
        started = time.monotonic()
        batch = self._texts.rows(self._batch())
        loss = self._drafter.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for group in self._optimizer.param_groups:
            group["lr"] = _RATE * rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        speed = batch.token_ids.numel() / (time.monotonic() - started)
        print(f"step {self.step}: {float(loss.detach()):.3f}, {speed:.0f} tokens/s", flush=True)

    def _batch(self) -> Tensor:
        """Return which texts this step learns from: a function of its number."""
        count = len(self._texts.token_ids)
        epoch, index = divmod(self.step, count // self._rows)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order = torch.randperm(count, generator=generator)
        return order[index * self._rows : (index + 1) * self._rows]

    def _save(self) -> None:
        state = {
            "drafter": self._drafter.own_weights(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._checkpoint)  # A kill while writing leaves the previous checkpoint.


def main(arguments: Sequence[str] | None = None) -> None:
    """Choose, train or finish."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    target = load_target(options.target)
    texts = Texts.load(options.work / "texts", batches=options.batches)
    path = options.work / _CHOICE
    if options.what == "choose":
        files = find_model_files(options.target)
        token_ids, share = choose_tokens(
            texts,
            count=options.tokens,
            always=files.tokens.end_ids,
            vocabulary_size=files.vocabulary_size,
        )
        print(f"{options.tokens} tokens have {share:.4f} of the target's probability")
        Choice(tuple(options.layers), token_ids).write(path)
        return
    training = Training(
        options.work,
        drafter := Drafter(target, Choice.read(path)),
        texts=texts,
        held_out=Texts.load(options.work / "held-out", batches=options.held_out_batches),
        seed=options.seed,
    )
    if options.what == "train":
        training.train(steps=options.steps)
        return
    reached = training.finish(steps=options.steps)
    _write(options.output, drafter)
    card = {
        "embeddings": embeddings_digest(target),
        "layers": drafter.choice.layers,
        "training": {"tokens": texts.token_ids.numel(), **reached.as_row(training.step)},
    }
    (options.output / CARD).write_text(json.dumps(card, indent=2) + "\n")


def _write(folder: Path, drafter: Drafter) -> None:
    """Write the weights that are not the target's, and the tokens of the head."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: weight.bfloat16().contiguous() for name, weight in drafter.own_weights().items()}
    save_file(own, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)  # Written readable by its owner alone.
    said = {"token_ids": drafter.choice.token_ids}
    (folder / DRAFT_VOCABULARY).write_text(json.dumps(said, separators=(",", ":")) + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("choose", "train", "finish"))
    parser.add_argument("--target", required=True, help="as a server's --model: a folder")
    parser.add_argument("--work", type=Path, required=True, help="texts and checkpoint")
    parser.add_argument("--batches", type=int, required=True, help="of the texts")
    parser.add_argument("--held-out-batches", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192, help="choose: that the head scores")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[0, 1, 28, 29], help="choose: to begin with"
    )
    parser.add_argument("--steps", type=int, default=400, help="train: in all; finish: more")
    parser.add_argument("--output", type=Path, help="finish: the folder of the drafter's weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.what == "finish" and options.output is None:
        parser.error("finish needs --output")
    return options


if __name__ == "__main__":
    main()
