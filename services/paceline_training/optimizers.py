"""What turns gradients into steps: AdamW, or Muon for matrices beside AdamW for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

OptimizerName: TypeAlias = Literal["adamw", "muon"]


class MuonForMatrices:
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), and AdamW for vectors.

    All singular values of a matrix's step are about the same, so that directions with small
    gradients are learnt, too. The steps are as large as AdamW's (`match_rms_adamw`, Liu et al.
    2025, arXiv 2502.16982), so one rate serves both.
    Difference: the post leaves embeddings and heads to AdamW. An adapter that is trained from its
    beginning has neither, so here every matrix is Muon's.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, rate: float) -> None:
        """Take each matrix to Muon, and all else to AdamW."""
        matrices = [each for each in parameters if each.dim() == 2]
        others = [each for each in parameters if each.dim() != 2]
        self._parts: dict[str, torch.optim.Optimizer] = {}
        if matrices:
            self._parts["muon"] = torch.optim.Muon(
                matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            )
        if others:
            self._parts["adamw"] = torch.optim.AdamW(others, lr=rate, weight_decay=0.0)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of both, matrices first, as torch's optimizers have them."""
        return [group for part in self._parts.values() for group in part.param_groups]

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for part in self._parts.values():
            part.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Change every weight by its gradient."""
        for part in self._parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


Optimizer: TypeAlias = torch.optim.Optimizer | MuonForMatrices


def build_optimizer(
    name: OptimizerName, learners: Sequence[torch.nn.Module], *, rate: float
) -> Optimizer:
    """Build the optimizer of some modules; AdamW has a group of parameters for each of them."""
    if name == "muon":
        return MuonForMatrices([each for one in learners for each in one.parameters()], rate=rate)
    groups = [{"params": [*each.parameters()]} for each in learners]
    return torch.optim.AdamW(groups, lr=rate, weight_decay=0.0)
