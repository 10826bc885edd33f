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

With `--seconds`, `finish` trains for so long instead, and the rate falls over the last fifth.
`distil_at_once.py` does all of it in one process, for a GPU that is there for minutes.

On one machine, with one number of threads, the result follows from the texts and the seed; with
`--seconds` or on a GPU it does not.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

_CHOICE = "choice.json"
_CHECKPOINT = "checkpoint.pt"
# AdamW: in the first steps Muon, which `train.py` uses, learnt less in twice the time.
_RATE = 1e-3
_WARM_UP_STEPS = 20
_FALLING_SHARE = 0.2  # In this last share of a limited time the rate falls to zero.


class Training:
    """A run, or the rest of one.

    Args:
        work: Where checkpoint and curve lie.
        drafter: What is trained.
        texts: To learn from.
        held_out: Not to learn from.
        seed: Of the order of texts.
        rows: Texts in a step.
        rate: The largest that the weights learn with.
        longest_gradient: Of all weights together; a longer one is scaled to it.
        report_steps: Steps between two reports; each writes a checkpoint, too.
        curve: The name of the curve's file.
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
        rate: float = _RATE,
        longest_gradient: float | None = None,
        report_steps: int = 50,
        curve: str = "curve.jsonl",
    ) -> None:
        """Begin, or go on from the checkpoint in the folder."""
        self.step = 0
        self._checkpoint = work / _CHECKPOINT
        self._curve = work / curve
        self._drafter = drafter
        self._texts = texts
        self._held_out = held_out
        self._seed = seed
        self._rows = min(rows, len(texts.token_ids))
        self._rate = rate
        self._longest_gradient = longest_gradient
        self._order: tuple[int, Tensor] | None = None
        self._report_steps = report_steps
        self._weights = [each for each in drafter.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._weights,
            lr=rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=self._weights[0].device.type == "cuda",
        )
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
            self._advance_aloud(min(1.0, (self.step + 1) / _WARM_UP_STEPS))
            if self.step % self._report_steps == 0 or self.step == steps:
                self._save()
                self.report()

    def finish(self, *, steps: int) -> Reached:
        """Make so many steps more, in which the rate falls to zero."""
        for left in range(steps, 0, -1):
            self._advance_aloud(left / steps)
        return self.report()

    def train_for(
        self,
        seconds: float,
        *,
        report_seconds: float,
        keep: Callable[[Reached], None] = lambda _: None,
    ) -> Reached:
        """Train for some time; the rate falls to zero at its end.

        Args:
            report_seconds: Between two reports.
            keep: Is told each report, and may write the weights as they are then.
        """
        started = reported = time.monotonic()
        step, tokens = self.step, self._rows * self._texts.token_ids.shape[1]
        while (left := 1 - (time.monotonic() - started) / seconds) > 0:
            self._advance(min((self.step + 1) / _WARM_UP_STEPS, left / _FALLING_SHARE, 1.0))
            if (spent := time.monotonic() - reported) >= report_seconds:
                print(f"{(self.step - step) * tokens / spent:.0f} tokens/s", flush=True)
                keep(self.report())
                step, reported = self.step, time.monotonic()
        reached = self.report()
        keep(reached)
        return reached

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

    def _advance_aloud(self, rate: float) -> None:
        started = time.monotonic()
        loss = float(self._advance(rate))
        speed = self._rows * self._texts.token_ids.shape[1] / (time.monotonic() - started)
        print(f"step {self.step}: {loss:.3f}, {speed:.0f} tokens/s", flush=True)

    def _advance(self, rate: float) -> Tensor:
        """Make a step, at a share of the largest rate; return the loss."""
        loss = self._drafter.loss(self._texts.rows(self._batch()))
        loss.backward()  # type: ignore[no-untyped-call]
        if self._longest_gradient is not None:
            torch.nn.utils.clip_grad_norm_(self._weights, self._longest_gradient)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    def _batch(self) -> Tensor:
        """Return which texts this step learns from: a function of its number."""
        count = len(self._texts.token_ids)
        epoch, index = divmod(self.step, count // self._rows)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(count, generator=generator)
            self._order = epoch, order.to(self._texts.token_ids.device)
        return self._order[1][index * self._rows : (index + 1) * self._rows]

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
    target = load_target(options.target, options.device)
    texts = Texts.load(options.work / "texts", batches=options.batches).to(options.device)
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
        held_out=Texts.load(options.work / "held-out", batches=options.held_out_batches).to(
            options.device
        ),
        seed=options.seed,
        rows=options.rows,
        rate=options.rate,
    )
    if options.what == "train":
        training.train(steps=options.steps)
        return
    if options.seconds is None:
        reached = training.finish(steps=options.steps)
    else:
        reached = training.train_for(options.seconds, report_seconds=options.seconds / 10)
    write_own(
        options.output,
        drafter,
        embeddings=embeddings_digest(target),
        training={"tokens": texts.token_ids.numel(), **reached.as_row(training.step)},
    )


def write_own(
    folder: Path, drafter: Drafter, *, embeddings: str, training: Mapping[str, Any]
) -> None:
    """Write the weights that are not the target's, the tokens of the head, and the card.

    Args:
        embeddings: The digest of the target's.
        training: What the card says of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = {
        name: weight.to("cpu", torch.bfloat16).contiguous()
        for name, weight in drafter.own_weights().items()
    }
    save_file(own, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)  # Written readable by its owner alone.
    said = {"token_ids": drafter.choice.token_ids}
    (folder / DRAFT_VOCABULARY).write_text(json.dumps(said, separators=(",", ":")) + "\n")
    card = {"embeddings": embeddings, "layers": drafter.choice.layers, "training": training}
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n")


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
    parser.add_argument("--seconds", type=float, help="finish: train for so long, instead of steps")
    parser.add_argument("--device", type=torch.device, default="cpu", help="such as cuda:0")
    parser.add_argument("--rows", type=int, default=12, help="texts of a step; on a GPU 64")
    parser.add_argument("--rate", type=float, default=_RATE, help="the largest that is learnt with")
    parser.add_argument("--output", type=Path, help="finish: the folder of the drafter's weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.what == "finish" and options.output is None:
        parser.error("finish needs --output")
    return options


if __name__ == "__main__":
    main()
