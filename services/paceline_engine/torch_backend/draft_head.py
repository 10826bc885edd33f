"""A head that scores the tokens of a draft vocabulary alone.

The head is narrowed when a model is loaded, so every way to compute a forward has the narrow one.
Drafts are chosen from its few logits, with the noise of the tokens that they stand for
(`deciding/sampling.py`). Reviews, which a stack makes, and requests with biases, penalties or a
grammar need logits of the whole vocabulary. There the other tokens get a logit so low that none of
them is drafted while another one may be. A grammar may allow none of the scored tokens at some
place: then one of those that it allows is drafted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend.weight_grids import StoredAs

if TYPE_CHECKING:
    from collections.abc import Sequence


# Neither the noise (37 at most) nor biases (100) lift it to a model's logits, beside which its
# probability is exactly 0.
_UNSCORED = -1e4


class DraftHead:
    """The narrow head of a model. Letters: N tokens that it scores, V of the vocabulary.

    Attributes:
        token_ids: (N,) int64, ascending, on the model's device.
    """

    def __init__(
        self, model: Any, token_ids: Sequence[int], *, vocabulary_size: int, name: str
    ) -> None:
        """Narrow a model's head, on its device. Its embeddings stay whole, also if they are tied.

        Args:
            token_ids: The tokens to score, ascending.
            vocabulary_size: V.
            name: The model's name, for messages.

        Raises:
            ModelLoadError: the head is no plain product.
        """
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ModelLoadError(
                f"model {name!r}: its head is no plain product, so it cannot score the tokens of"
                " draft_vocabulary.json alone"
            )
        self._vocabulary_size = vocabulary_size
        self.token_ids = torch.tensor(token_ids, device=head.weight.device)
        model.set_output_embeddings(_narrowed(head, self.token_ids))

    def widen(self, logits: Tensor) -> Tensor:
        """Return logits of the whole vocabulary, (rows, V), from (rows, N)."""
        wide = logits.new_full((len(logits), self._vocabulary_size), _UNSCORED)
        return wide.index_copy_(-1, self.token_ids, logits)


def _narrowed(head: nn.Linear, token_ids: Tensor) -> nn.Linear:
    has_bias = head.bias is not None
    with torch.device("meta"):
        narrow = nn.Linear(head.in_features, len(token_ids), bias=has_bias)
    narrow.weight = nn.Parameter(head.weight.detach()[token_ids], requires_grad=False)
    if has_bias:
        narrow.bias = nn.Parameter(head.bias.detach()[token_ids], requires_grad=False)
    stored = getattr(head, "stored_as", None)
    if isinstance(stored, StoredAs):
        narrow.stored_as = stored.of_outputs(token_ids.cpu())  # type: ignore[assignment]
    return narrow
