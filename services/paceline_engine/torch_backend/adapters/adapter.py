"""The interface that all kinds of adapters have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

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
