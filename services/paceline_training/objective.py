"""The training objective: an adapter guesses the model's own tokens, some positions ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from paceline_engine.torch_backend.adapters.adapter import Adapter
    from paceline_engine.torch_backend.adapters.eagle import EagleHead
    from paceline_engine.torch_backend.adapters.trunk import Trunk

_STEP_WEIGHT = 0.8  # of a chain's step, as a share of the step before: EAGLE-3's code

Labels: TypeAlias = Literal["model", "text"]
"""The label of a position: the model's own distribution there, or the text's token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """How a model learns together with its adapter.

    Attributes:
        rank: The rank of the model's low-rank weights.
        guess_weights: The weight of each guess's loss; the loss of the model's own tokens has 1.
        adapter_rate: The adapter's learning rate, as a multiple of the model's.
        alone_share: The part of the steps in which the adapter learns alone, with a schedule of its
            own, before both learn.
    """

    rank: int
    guess_weights: tuple[float, ...]
    adapter_rate: float = 1.0
    alone_share: float = 0.0


def training_loss(
    adapter: Adapter,
    model: Any,
    *,
    trunk: Trunk,
    token_ids: Tensor,
    labels: Labels,
    joint: Joint | None = None,
) -> Tensor:
    """Return the mean loss of an adapter's guesses, the early exit's included, in nats.

    If the model learns, too: its own loss on the text plus the weighted loss of the guesses.

    Speculative Streaming and Medusa alike: the j-th guess beside the row of token t is for token
    t + 1 + j. Difference: both papers learn the text's token; here, by default, the model's own
    distribution at row t + j, which is what a guess is later compared with, and which the same
    forward has computed.

    Args:
        adapter: The adapter that is trained.
        model: The adapter's model.
        trunk: The model's own forward over the text.
        token_ids: (B, T) the text.
        labels: What is right.
        joint: How the model learns, if it does.
    """
    main = trunk.logits.detach().float().log_softmax(-1)
    losses = [
        _distance(logits, main, token_ids, labels=labels, ahead=ahead)
        for ahead, logits in enumerate(adapter.draft_logits(model, trunk), start=1)
    ]
    early = adapter.early_logits(model, trunk)
    if early is not None:
        losses.append(_distance(early, main, token_ids, labels=labels, ahead=0))
    if joint is None:
        return torch.stack(losses).mean()
    own = _distance(trunk.logits, main, token_ids, labels="text", ahead=0)
    weights = (*joint.guess_weights, joint.guess_weights[0])  # the early exit's at last, if any
    return own + sum(weight * loss for weight, loss in zip(weights, losses, strict=False))


def _distance(
    logits: Tensor, main: Tensor, token_ids: Tensor, *, labels: Labels, ahead: int
) -> Tensor:
    """Compare the guesses of rows t with what is right at rows t + ahead.

    Args:
        logits: (B, T, V) the guesses.
        main: (B, T, V) logarithms of the model's own probabilities.
        token_ids, labels: See `training_loss`.
        ahead: How far.
    """
    length = token_ids.shape[1]
    if labels == "text":
        count = length - 1 - ahead
        wanted = token_ids[:, ahead + 1 :].flatten()
        return functional.cross_entropy(logits[:, :count].flatten(0, 1).float(), wanted)
    count = length - ahead
    return functional.kl_div(
        logits[:, :count].flatten(0, 1).float().log_softmax(-1),
        main[:, ahead:].flatten(0, 1),
        reduction="batchmean",
        log_target=True,
    )


def chain_loss(adapter: EagleHead, model: Any, *, trunk: Trunk) -> Tensor:
    """Return the loss of a head that guesses in chains, in nats.

    EAGLE-3's training-time test: step s beside row t learns the model's distribution at row
    t + 1 + s, as far as the draft vocabulary goes. A row's weight is the share of the probability
    that the draft vocabulary has there: what the head cannot guess, it need not learn. Difference:
    EAGLE-3 leaves out the rows whose likeliest token cannot be guessed, and gives all others the
    weight 1.

    Args:
        adapter: The head that is trained.
        model: The head's model.
        trunk: The model's own forward over the text, with features.
    """
    token_ids = adapter.draft_token_ids
    with torch.no_grad():
        wanted = torch.stack([row[:, token_ids] for row in trunk.logits])
        # Row by row: in float32 all rows together would be as large as the rest of the forward.
        all_tokens = torch.stack([row.float().logsumexp(-1) for row in trunk.logits])
        shares = (wanted.float().logsumexp(-1) - all_tokens).exp()
        main = wanted.float().log_softmax(-1)
        probs = main.exp()
        surprises = (probs * main).sum(-1)  # minus the entropy
        del wanted, main
    length = trunk.token_ids.shape[1]
    losses, weights = [], []
    for step, logits in enumerate(adapter.step_logits(model, trunk)):
        count = length - 1 - step
        if count < 1:
            break
        guessed = logits[:, :count].float()
        after = slice(step + 1, None)
        # The Kullback-Leibler divergence, without a second table of logarithms in memory.
        right = (probs[:, after] * guessed).sum(-1)
        distances = guessed.logsumexp(-1) - right + surprises[:, after]
        rows = shares[:, after]
        losses.append((distances * rows).sum() / rows.sum())
        weights.append(_STEP_WEIGHT**step)
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    assert isinstance(total, Tensor), "a text has two tokens or more"
    return total / sum(weights)
