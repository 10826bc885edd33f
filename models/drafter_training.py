"""Trains a drafter on what its target wrote, and writes the drafter's own weights.

The drafter has the target's embeddings, some of its layers, and a head that scores only the tokens
that the target says most often. Embeddings and head stay as they are, so a drafter is stored as its
layers alone; `smollm2_drafter.py` puts it together again.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from distillation import (
    Drafter,
    Reached,
    Texts,
    evaluate,
)
from paceline_engine.model_files.small_files import DRAFT_VOCABULARY
from smollm2_drafter import CARD, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

_WARM_UP_STEPS = 20
_FALLING_SHARE = 0.2  # In this last share of a limited time the rate falls to zero.


class Training:
    """A run of training.

    Args:
        drafter: What is trained.
        texts: To learn from.
        held_out: Not to learn from.
        seed: Of the order of texts.
        rows: Texts in a step.
        rate: The largest that the weights learn with.
        longest_gradient: Of all weights together; a longer one is scaled to it.
        curve: A file that gets a line of each report.
        clock: In seconds.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        texts: Texts,
        held_out: Texts,
        seed: int,
        rows: int,
        rate: float,
        longest_gradient: float,
        curve: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the first step."""
        self.step = 0
        self._curve = curve
        self._clock = clock
        self._drafter = drafter
        self._texts = texts
        self._held_out = held_out
        self._seed = seed
        self._rows = min(rows, len(texts.token_ids))
        self._rate = rate
        self._longest_gradient = longest_gradient
        self._order: tuple[int, Tensor] | None = None
        self._weights = [each for each in drafter.parameters() if each.requires_grad]
        # In the first steps on a CPU Muon, which `train.py` uses, learnt less in twice the time.
        self._optimizer = torch.optim.AdamW(
            self._weights,
            lr=rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=self._weights[0].device.type == "cuda",
        )

    def train_for(
        self,
        seconds: float,
        *,
        report_seconds: float,
        keep: Callable[[Reached], None],
    ) -> Reached:
        """Train for some time; the rate falls to zero at its end.

        Args:
            report_seconds: Between two reports.
            keep: Is told each report, and may write the weights as they are then.
        """
        started = reported = self._clock()
        step, tokens = self.step, self._rows * self._texts.token_ids.shape[1]
        while (left := 1 - (self._clock() - started) / seconds) > 0:
            self._advance(min((self.step + 1) / _WARM_UP_STEPS, left / _FALLING_SHARE, 1.0))
            if (spent := self._clock() - reported) >= report_seconds:
                print(f"{(self.step - step) * tokens / spent:.0f} tokens/s", flush=True)
                keep(self.report())
                step, reported = self.step, self._clock()
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

    def _advance(self, rate: float) -> Tensor:
        """Make a step, at a share of the largest rate; return the loss."""
        loss = self._drafter.loss(self._texts.rows(self._batch()))
        loss.backward()  # type: ignore[no-untyped-call]
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
