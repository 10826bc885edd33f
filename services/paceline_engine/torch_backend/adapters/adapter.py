"""What all kinds of adapters have, and what a head that drafts step by step is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import Tensor

    from paceline_engine.torch_backend.adapters.trunk import Trunk


class Adapter(Protocol):
    """A torch module that guesses the next tokens beside a model's own forward.

    Attributes:
        reach: How many tokens it guesses after the model's own next one (gamma).
    """

    reach: int

    @property
    def upper_layers(self) -> int:
        """How many of the model's last layers have rows beside the main stream's."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers of the model whose inputs it reads as features."""

    def start_from(self, model: Any, *, generator: torch.Generator) -> None:
        """Set the weights that training begins with."""

    def draft_logits(self, model: Any, trunk: Trunk) -> Iterator[Tensor]:
        """Yield for each guess its logits beside every row: (B, T, V)."""

    def early_logits(self, model: Any, trunk: Trunk) -> Tensor | None:
        """Return the model's own choice as guessed before its upper layers, or None."""


class SeenRows(Protocol):
    """What the rows of one step of guesses see; rows of a sequence stand side by side."""

    def take(self, keys: Tensor, values: Tensor) -> None:
        """Learn the rows' own keys and values, (R, G, D), which they see, too."""

    def states(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Return each sequence's keys and values, those of the rows included: (1, G, L, D)."""

    def attend(
        self,
        queries: Tensor,
        *,
        made: Sequence[tuple[Tensor, Tensor]] | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend, (R, H, D), to `states`, or to what was made of them."""
