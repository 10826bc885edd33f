"""The training loop: steps, a schedule, checkpoints, and progress."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from paceline_engine.torch_backend.adapters.eagle import EagleHead
from paceline_engine.torch_backend.adapters.trunk import compute_trunk
from paceline_training.objective import chain_loss, training_loss
from paceline_training.optimizers import OptimizerName, build_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline_training.fine_tuning import FineTuning
    from paceline_training.objective import Joint, Labels
    from paceline_training.optimizers import Optimizer
    from paceline_training.windows import TextWindows, WholeTexts

Decay: TypeAlias = Literal["linear", "cosine"]
Precision: TypeAlias = Literal["bfloat16", "float32"]

_CHECKPOINT_FORMAT = 1


class CheckpointError(Exception):
    """A checkpoint is damaged, or of another run. The message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """How to train.

    Attributes:
        steps: The number of steps; the schedule ends with the last one.
        rate: The highest learning rate.
        decay: How the rate falls to zero after warming up.
        warm_up_share: The part of the steps in which the rate rises.
        labels: The kind of labels.
        precision: The precision of products in a step; weights and losses are float32.
        optimizer: What turns gradients into steps.
        joint: How the model learns, too; None: it does not change.
        checkpoint_steps: The number of steps between two checkpoints.
        report_steps: The number of steps between two calls of `report`.
        seconds: A limit for the time of all steps: where it is reached first, the schedule ends
            with it. None: there is none, and the result does not depend on the time.
    """

    steps: int
    rate: float
    decay: Decay
    warm_up_share: float
    labels: Labels
    precision: Precision = "float32"
    optimizer: OptimizerName = "adamw"
    joint: Joint | None = None
    checkpoint_steps: int = 100
    report_steps: int = 20
    seconds: float | None = None

    def place(self, step: int, *, seconds: float) -> int:
        """Return how far the schedule is, in steps: by the steps or by the time, if that is later.

        Args:
            step: The number of steps that are done.
            seconds: The time that they took.
        """
        if self.seconds is None:
            return step
        return max(step, int(self.steps * seconds / self.seconds))

    @property
    def alone_steps(self) -> int:
        """How many of the first steps the adapter learns alone, before the model does, too."""
        return round(self.steps * self.joint.alone_share) if self.joint is not None else 0

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        steps = self.alone_steps
        if step >= steps:
            step, steps = step - steps, self.steps - steps
        warm_up = max(1.0, self.warm_up_share * steps)
        if step + 1 < warm_up:
            return self.rate * (step + 1) / warm_up
        left = (steps - step) / max(1.0, steps - warm_up)
        left = min(1.0, left)
        return self.rate * (left if self.decay == "linear" else (1 - math.cos(math.pi * left)) / 2)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is: `loss` is the mean in nats since the last report, of this process's steps."""

    step: int
    loss: float
    tokens_per_second: float


def train_adapter(
    adapter: nn.Module,
    model: Any,
    *,
    plan: TrainingPlan,
    windows: TextWindows | WholeTexts,
    run: dict[str, Any],
    checkpoint: Path,
    report: Callable[[Progress], None],
    tuning: FineTuning | None = None,
) -> int:
    """Train an adapter in place, on the device where it and the model are.

    Args:
        adapter: An `Adapter`, with the weights that training begins with.
        model: The adapter's model; it is not changed.
        plan: How to train.
        windows: The text.
        run: Further facts that decide the result (seed, data, model), to recognise the checkpoint
            of another run.
        checkpoint: The file that keeps the run's state. An interrupted run goes on from it, and
            ends bit for bit as if it had not been interrupted, on a CPU with as many threads.
        report: Called every `report_steps` steps.
        tuning: The model's low-rank weights, attached to it, if the plan is joint.

    Returns:
        The number of steps.

    Raises:
        CheckpointError: the checkpoint is damaged or of another run.
    """
    if plan.joint is not None and plan.optimizer != "adamw":
        raise ValueError("the rates of a joint plan are those of AdamW's two groups of weights")
    learners = [adapter] if tuning is None else [adapter, tuning]
    optimizer = build_optimizer(plan.optimizer, learners, rate=plan.rate)
    learner = adapter if tuning is None else nn.ModuleList(learners)
    identity = {"plan": _deciding(plan), "run": run}
    done, spent = _resume(checkpoint, learner, optimizer, identity=identity)
    losses: list[float] = []
    tokens, since = 0, time.monotonic()
    begun = since - spent
    place = plan.place(done, seconds=spent)
    while place < plan.steps:
        token_ids = windows.at(done).to(model.device)
        _set_rates(optimizer, plan, step=place)
        if tuning is not None:
            tuning.requires_grad_(place >= plan.alone_steps)
        loss = _loss(adapter, model, token_ids, plan=plan)
        losses.append(_descend(loss, optimizer, step=done))
        tokens += token_ids.numel()
        done += 1
        spent = time.monotonic() - begun
        place = plan.place(done, seconds=spent)
        if done % plan.report_steps == 0 or place >= plan.steps:
            seconds = time.monotonic() - since
            report(Progress(done, sum(losses) / len(losses), tokens / seconds))
            losses.clear()
            tokens, since = 0, time.monotonic()
        if done % plan.checkpoint_steps == 0 or place >= plan.steps:
            _save(checkpoint, learner, optimizer, identity=identity, step=done, seconds=spent)
    return done


def _set_rates(optimizer: Optimizer, plan: TrainingPlan, *, step: int) -> None:
    adapter_rate = plan.joint.adapter_rate if plan.joint is not None else 1.0
    factors = (adapter_rate, 1.0)  # the model's own weights come second, if at all
    for group, factor in zip(optimizer.param_groups, factors, strict=False):
        group["lr"] = plan.rate_at(step) * factor


def _loss(adapter: Any, model: Any, token_ids: torch.Tensor, *, plan: TrainingPlan) -> torch.Tensor:
    is_short, learns = plan.precision == "bfloat16", plan.joint is not None
    with torch.autocast(model.device.type, torch.bfloat16, enabled=is_short):
        trunk = compute_trunk(
            model,
            token_ids,
            upper_layers=adapter.upper_layers,
            feature_layers=adapter.feature_layers,
            learns=learns,
        )
        if isinstance(adapter, EagleHead):
            return chain_loss(adapter, model, trunk=trunk)
        return training_loss(
            adapter, model, trunk=trunk, token_ids=token_ids, labels=plan.labels, joint=plan.joint
        )


def _descend(loss: torch.Tensor, optimizer: Optimizer, *, step: int) -> float:
    """Do one step of gradient descent, and return the loss before it."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
    value = float(loss.detach())
    if not math.isfinite(value):
        raise RuntimeError(f"step {step + 1}: the loss is {value}; a lower --rate may help")
    return value


def _deciding(plan: TrainingPlan) -> dict[str, Any]:
    """Return the parts of a plan that decide the result."""
    found = dataclasses.asdict(plan)
    if plan.seconds is None:
        del found["seconds"]  # as in checkpoints from before there was such a limit
    return {key: found[key] for key in found if key not in {"checkpoint_steps", "report_steps"}}


def _save(
    path: Path,
    adapter: nn.Module,
    optimizer: Optimizer,
    *,
    identity: dict[str, Any],
    step: int,
    seconds: float,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    # Into a file that is open: where torch opens it itself, it hides that a disk is full.
    with partial.open("wb") as file:
        torch.save(
            {
                "format": _CHECKPOINT_FORMAT,
                "identity": identity,
                "adapter": adapter.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
                "seconds": seconds,
            },
            file,
        )
    partial.replace(path)  # A kill while writing leaves the previous checkpoint.


def _resume(
    path: Path,
    adapter: nn.Module,
    optimizer: Optimizer,
    *,
    identity: dict[str, Any],
) -> tuple[int, float]:
    """Load a run's state; return how many steps are done, and the time that they took."""
    if not path.exists():
        return 0, 0.0
    advice = f"remove {path} to start afresh"
    try:
        # weights_only: a checkpoint is data, and cannot run code.
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["format"] != _CHECKPOINT_FORMAT:
            raise CheckpointError(f"checkpoint of format {state['format']}; {advice}")
        # Checkpoints from before there was a choice.
        state["identity"]["plan"].setdefault("optimizer", "adamw")
        if state["identity"] != identity:
            raise CheckpointError(
                f"checkpoint of another run ({_difference(state, identity)}); {advice}"
            )
        adapter.load_state_dict(state["adapter"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"]), float(state.get("seconds", 0.0))
    except CheckpointError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"damaged checkpoint ({reason}); {advice}") from error


def _difference(state: dict[str, Any], identity: dict[str, Any]) -> str:
    differing = [
        f"{key} was {state['identity'].get(part, {}).get(key)!r}, is {own[key]!r}"
        for part, own in identity.items()
        for key in own
        if state["identity"].get(part, {}).get(key) != own[key]
    ]
    return "; ".join(differing) or "it has other settings"
