"""What a run's adapter guesses, measured on the model's own continuations of held-out text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline_engine.terms.rank_paths import cartesian_tree, likeliest_tree
from paceline_engine.torch_backend.adapters.eagle import EagleHead
from paceline_training.continuations import continue_greedily, spread_prompts
from paceline_training.hit_rates import guess_ranks, hit_rates, tokens_per_forward
from paceline_training.windows import TextTooShortError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_engine.torch_backend.adapters.adapter import Adapter
    from paceline_training.continuations import Continuations
    from paceline_training.training import Progress, TrainingPlan

_PROMPT_COUNT = 32
_PROMPT_LENGTH = 64
_CONTINUATION_LENGTH = 128
_RANKS = 10


@dataclass(frozen=True, slots=True)
class Measurement:
    """Guesses on the model's own greedy continuations of held-out text.

    Attributes:
        hit_rates: For each guess how often the r-th best was right, best first.
        single: Tokens per forward with one guess at each depth.
        double: The same with the two best guesses at each depth.
        tree: The same with the likeliest tree of the wanted size.
        paths: That tree.
        text_loss: The model's own loss on held-out text, in nats per token.
    """

    hit_rates: list[list[float]]
    single: float
    double: float
    tree: float
    paths: tuple[tuple[int, ...], ...]
    text_loss: float


class Reports:
    """Measures and tells how far a run has come.

    Attributes:
        base_loss: The model's own loss before it learnt anything.
        last: The last measurement; None before the first report.
    """

    def __init__(
        self,
        adapter: Any,
        model: Any,
        validation: Tensor,
        *,
        node_count: int,
        plan: TrainingPlan,
        tell: Callable[[str], None],
    ) -> None:
        self._adapter, self._model, self._validation = adapter, model, validation
        self._node_count, self._plan, self._tell = node_count, plan, tell
        self._texts = continuations_of(model, validation)
        self.base_loss = _text_loss(model, self._texts)
        self.last: Measurement | None = None

    def measure(self) -> Measurement:
        """Measure the guesses now; the model's continuations change while the model learns."""
        texts = self._texts
        if self._plan.joint is not None:
            texts = continuations_of(self._model, self._validation)
        return measure_guesses(self._adapter, self._model, texts, node_count=self._node_count)

    def report(self, progress: Progress) -> None:
        """Measure, and tell it with the loss and the speed."""
        measured = self.last = self.measure()
        self._tell(
            f"step {progress.step:5}/{self._plan.steps}  loss {progress.loss:.3f}"
            f"  {progress.tokens_per_second:5.0f} tokens/s  hit rates"
            f" {' '.join(f'{rates[0]:.3f}' for rates in measured.hit_rates)}"
            f"  tokens per forward {measured.single:.2f}, tree {measured.tree:.2f}"
            + (f"  text {measured.text_loss:.3f}" if self._plan.joint is not None else "")
        )


def continuations_of(model: Any, validation: Tensor) -> Continuations:
    """Let a model go on with parts of held-out text, or with the first halves of whole texts.

    Raises:
        TextTooShortError: there is too little of it.
    """
    if validation.dim() == 2:
        chosen = torch.linspace(0, len(validation) - 1, _PROMPT_COUNT).long()
        prompts = validation[chosen, : max(1, validation.shape[1] // 2)]
        return continue_greedily(model, prompts, length=_CONTINUATION_LENGTH)
    if len(validation) <= _PROMPT_LENGTH:
        raise TextTooShortError(
            f"the validation text has {len(validation)} tokens, and must have more than"
            f" {_PROMPT_LENGTH}"
        )
    prompts = spread_prompts(validation, count=_PROMPT_COUNT, length=_PROMPT_LENGTH)
    return continue_greedily(model, prompts, length=_CONTINUATION_LENGTH)


def measure_guesses(
    adapter: Adapter, model: Any, texts: Continuations, *, node_count: int
) -> Measurement:
    """Measure guesses on a model's own continuations, and choose a tree of so many nodes."""
    ranks = guess_ranks(adapter, model, texts)
    rates = hit_rates(ranks, most=_RANKS)
    if isinstance(adapter, EagleHead):
        node_count = min(node_count, adapter.reach)
        paths = tuple((0,) * depth for depth in range(1, node_count + 1))
    else:
        paths = likeliest_tree(rates, node_count=node_count)
    return Measurement(
        rates,
        single=tokens_per_forward(ranks, cartesian_tree((1,) * adapter.reach)),
        double=tokens_per_forward(ranks, cartesian_tree((2,) * adapter.reach)),
        tree=tokens_per_forward(ranks, paths),
        paths=paths,
        text_loss=_text_loss(model, texts),
    )


@torch.no_grad()
def _text_loss(model: Any, texts: Continuations) -> float:
    prompts = texts.token_ids[:, : texts.prompt_length]
    logits = model(prompts).logits[:, :-1].float()
    return float(functional.cross_entropy(logits.flatten(0, 1), prompts[:, 1:].flatten()))
