"""The quality of guesses, measured on the model's own continuations.

Letters: B texts, J guesses of each row (the reach), R rows that are measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline_engine.torch_backend.adapters.trunk import compute_trunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.terms.rank_paths import RankPath
    from paceline_engine.torch_backend.adapters.adapter import Adapter
    from paceline_training.continuations import Continuations

_TEXTS_AT_ONCE = 4


@torch.no_grad()
def guess_ranks(adapter: Adapter, model: Any, texts: Continuations) -> Tensor:
    """Return the rank of the model's choice among an adapter's guesses: (B, R, J) int64.

    Row 0 is the prompt's last; rank 0 is the best guess. The last J rows have no measure.
    """
    parts = [
        _ranks(adapter, model, part)[:, texts.prompt_length - 1 :]
        for part in torch.split(texts.token_ids, _TEXTS_AT_ONCE)
    ]
    return torch.cat(parts)


def _ranks(adapter: Adapter, model: Any, token_ids: Tensor) -> Tensor:
    trunk = compute_trunk(
        model,
        token_ids,
        upper_layers=adapter.upper_layers,
        feature_layers=adapter.feature_layers,
    )
    chosen = trunk.logits.argmax(-1)
    count = token_ids.shape[1] - adapter.reach
    ranks = []
    for ahead, logits in enumerate(adapter.draft_logits(model, trunk), start=1):
        right = chosen[:, ahead : ahead + count, None]
        guessed = logits[:, :count]
        ranks.append((guessed > guessed.gather(-1, right)).sum(-1))
    return torch.stack(ranks, -1).cpu()


def hit_rates(ranks: Tensor, *, most: int) -> list[list[float]]:
    """Return for each guess how often the model chose its r-th best: J lists of `most` shares."""
    return [
        [float((ahead == rank).double().mean()) for rank in range(most)]
        for ahead in ranks.flatten(0, 1).unbind(-1)
    ]


def tokens_per_forward(ranks: Tensor, paths: Sequence[RankPath]) -> float:
    """Return how many tokens a forward decides on these texts, with a static tree of ranks.

    Exact for greedy decoding without pruning: the walk goes from each forward's last accepted token
    to the next one's, as decoding does.

    Args:
        ranks: (B, R, J), see `guess_ranks`.
        paths: The tree; empty is plain decoding.
    """
    tree = set(paths)
    tokens = forwards = 0
    for text in ranks.tolist():
        row = 0
        while row < len(text):
            accepted = 0
            while tuple(text[row][: accepted + 1]) in tree and accepted < len(text[row]):
                accepted += 1
            row += accepted + 1
            forwards += 1
        tokens += row
    return tokens / forwards
