"""One stage of training: a wall-clock budget, a schedule that ends with it, and checkpoints."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from growth import CONTEXT, WIDTH
from optimizer import MuonWithAdamW

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from transformers import LlamaForCausalLM

_WARM_UP_SHARE = 0.02
_REPORT_SECONDS = 60.0
_CHECKPOINT_SECONDS = 240.0
_RETUNE_SECONDS = 240.0
_QUICK_WINDOWS = 6  # Held-out windows in the progress lines.


@dataclass(frozen=True)
class Stage:
    """What one stage trains, and for how long.

    Attributes:
        name: Of the stage and of its folder of checkpoints.
        layers: Of the model it trains.
        minutes: Wall-clock budget.
        matrix_rate: Peak learning rate of Muon.
        embedding_rate: Peak learning rate of AdamW.
        decay_share: Last share of the budget, over which the rates fall linearly to zero.
        batch: Windows of `CONTEXT` tokens per step.
        width: Of the model it trains.
        with_tests: Take half of the windows from the library's tests, where they are installed. The
            library alone is small enough to be learnt by heart.
    """

    name: str
    layers: int
    minutes: float
    matrix_rate: float
    embedding_rate: float
    decay_share: float
    batch: int = 4
    width: int = WIDTH
    with_tests: bool = False


@dataclass(frozen=True)
class StageResult:
    """What a stage cost and reached. `held_out_loss` is in nats per token, on every window."""

    steps: int
    tokens: int
    seconds: float
    held_out_loss: float


class Windows:
    """Training windows of `CONTEXT + 1` tokens; which ones a step sees is a function of its number.

    Each batch has equally many windows from each stream.
    """

    def __init__(self, streams: Sequence[torch.Tensor], *, batch: int, seed: int) -> None:
        rows = batch // len(streams)
        self._parts = [_StreamWindows(stream, rows=rows, seed=seed) for stream in streams]

    def at(self, step: int) -> torch.Tensor:
        """Return the (batch, CONTEXT + 1) int64 tokens of a step."""
        return torch.cat([part.at(step) for part in self._parts])


class _StreamWindows:
    """The windows of one stream. Each epoch cuts it at another offset and shuffles anew."""

    def __init__(self, stream: torch.Tensor, *, rows: int, seed: int) -> None:
        self._stream = stream
        self._rows = rows
        self._seed = seed
        self._count = (len(stream) - 1) // CONTEXT - 1
        self._epoch = -1
        self._starts = torch.empty(0, dtype=torch.int64)

    def at(self, step: int) -> torch.Tensor:
        epoch, index = divmod(step, self._count // self._rows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            offset = int(torch.randint(CONTEXT, (1,), generator=generator))
            self._starts = torch.randperm(self._count, generator=generator) * CONTEXT + offset
            self._epoch = epoch
        starts = self._starts[index * self._rows : (index + 1) * self._rows]
        return torch.stack([self._stream[start : start + CONTEXT + 1] for start in starts.tolist()])


def train_stage(
    model: LlamaForCausalLM,
    *,
    stage: Stage,
    windows: Windows,
    held_out: torch.Tensor,
    folder: Path,
    teacher: LlamaForCausalLM | None,
    thread_counts: tuple[int, ...],
) -> StageResult:
    """Train a model in place until the stage's budget is spent.

    Args:
        model: On the device to train on.
        stage: Budget and learning rates.
        windows: Training text.
        held_out: (N,) int64, for the progress lines and the final loss.
        folder: Of the checkpoint; a stage that was interrupted goes on from it.
        teacher: When given, minimise KL(teacher || model) instead of the text's cross-entropy.
        thread_counts: Numbers of CPU threads to choose from; the fastest is looked for again
            every few minutes, because other work on the machine comes and goes.

    Cost:
        Only time in this function counts against the budget, across interruptions.
    """
    optimizer = MuonWithAdamW(
        model, matrix_rate=stage.matrix_rate, embedding_rate=stage.embedding_rate
    )
    checkpoint = folder / "checkpoint.pt"
    step, tokens, spent = _resume(checkpoint, model=model, optimizer=optimizer)
    started = time.monotonic() - spent
    budget = stage.minutes * 60
    threads = _ThreadChoice(thread_counts)
    progress = _Progress(stage, elapsed=spent, tokens=tokens)
    saved = spent
    while (elapsed := time.monotonic() - started) < budget:
        batch = windows.at(step).to(model.device)
        with threads:
            loss = _loss(model, batch, teacher=teacher)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step(_relative_rate(elapsed / budget, stage.decay_share))
            progress.add(float(loss.detach()))
        step += 1
        tokens += batch[:, 1:].numel()
        if progress.is_due(elapsed):
            quick = held_out_loss(model, held_out, window_limit=_QUICK_WINDOWS)
            progress.report(step=step, tokens=tokens, elapsed=elapsed, held_out=quick)
        if elapsed - saved > _CHECKPOINT_SECONDS:
            saved = elapsed
            _save(checkpoint, model, optimizer, step=step, tokens=tokens, elapsed=elapsed)
    result = StageResult(step, tokens, elapsed, held_out_loss(model, held_out))
    checkpoint.unlink(missing_ok=True)
    return result


@torch.inference_mode()
def held_out_loss(
    model: LlamaForCausalLM, stream: torch.Tensor, *, window_limit: int | None = None
) -> float:
    """Measure the mean cross-entropy in nats per token over consecutive windows.

    Args:
        model: The model, on any device.
        stream: (N,) int64.
        window_limit: Take this many windows, spread evenly; all of them when absent.
    """
    starts = list(range(0, len(stream) - CONTEXT, CONTEXT))
    if window_limit is not None:
        starts = starts[:: max(1, len(starts) // window_limit)][:window_limit]
    total = 0.0
    for start in starts:
        window = stream[start : start + CONTEXT + 1][None].to(model.device)
        total += float(_loss(model, window, teacher=None))
    return total / len(starts)


def _loss(
    model: LlamaForCausalLM, batch: torch.Tensor, *, teacher: LlamaForCausalLM | None
) -> torch.Tensor:
    inputs, targets = batch[:, :-1], batch[:, 1:]
    logits = model(inputs, use_cache=False).logits.flatten(0, 1)
    if teacher is None:
        return functional.cross_entropy(logits, targets.flatten())
    with torch.no_grad():
        wanted = teacher(inputs, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
    return functional.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean", log_target=True)


def _relative_rate(progress: float, decay_share: float) -> float:
    """Warm up, hold, then decay linearly to zero at the end of the budget."""
    return max(0.0, min(1.0, progress / _WARM_UP_SHARE, (1 - progress) / decay_share))


def _resume(
    checkpoint: Path, *, model: LlamaForCausalLM, optimizer: MuonWithAdamW
) -> tuple[int, int, float]:
    if not checkpoint.exists():
        return 0, 0, 0.0
    state = torch.load(checkpoint, map_location=model.device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["tokens"], state["elapsed"]


def _save(
    checkpoint: Path,
    model: LlamaForCausalLM,
    optimizer: MuonWithAdamW,
    *,
    step: int,
    tokens: int,
    elapsed: float,
) -> None:
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "tokens": tokens,
        "elapsed": elapsed,
    }
    partial = checkpoint.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(checkpoint)  # A kill while writing leaves the previous checkpoint.


class _Progress:
    """Prints a line now and then: loss, held-out loss, tokens, speed, time left."""

    def __init__(self, stage: Stage, *, elapsed: float, tokens: int) -> None:
        self._stage = stage
        self._last = elapsed
        self._last_tokens = tokens
        self._losses: list[float] = []

    def add(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise RuntimeError(f"stage {self._stage.name}: the loss is {loss}; lower its rates")
        self._losses.append(loss)

    def is_due(self, elapsed: float) -> bool:
        return elapsed - self._last >= _REPORT_SECONDS

    def report(self, *, step: int, tokens: int, elapsed: float, held_out: float) -> None:
        speed = (tokens - self._last_tokens) / (elapsed - self._last)
        left = max(0.0, self._stage.minutes * 60 - elapsed)
        print(
            f"{self._stage.name:8} step {step:5}  loss {sum(self._losses) / len(self._losses):.3f}"
            f"  held out {held_out:.3f}  {tokens / 1e6:6.2f} M tokens  {speed:6.0f} tokens/s"
            f"  {torch.get_num_threads()} threads  {elapsed / 60:5.1f} min, {left / 60:5.1f} left",
            flush=True,
        )
        self._losses.clear()
        self._last, self._last_tokens = elapsed, tokens


class _ThreadChoice:
    """A context around each step that sets the number of threads and times the step."""

    _TRIALS = 3

    def __init__(
        self, counts: tuple[int, ...], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._counts = counts
        self._clock = clock
        self._trials: list[tuple[float, int]] = []
        self._tuned = -math.inf
        self._entered = 0.0

    def __enter__(self) -> None:
        trying = len(self._trials) < self._TRIALS * len(self._counts)
        if len(self._counts) > 1 and self._clock() - self._tuned > _RETUNE_SECONDS and trying:
            torch.set_num_threads(self._counts[len(self._trials) % len(self._counts)])
        elif len(self._counts) == 1:
            torch.set_num_threads(self._counts[0])
        self._entered = self._clock()

    def __exit__(self, *_: object) -> None:
        if len(self._counts) == 1 or self._clock() - self._tuned <= _RETUNE_SECONDS:
            return
        self._trials.append((self._clock() - self._entered, torch.get_num_threads()))
        if len(self._trials) == self._TRIALS * len(self._counts):
            torch.set_num_threads(min(self._counts, key=self._seconds))
            self._trials.clear()
            self._tuned = self._clock()

    def _seconds(self, count: int) -> float:
        return sum(seconds for seconds, threads in self._trials if threads == count)
