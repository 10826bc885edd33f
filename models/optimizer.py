"""Muon for the matrices inside the layers, AdamW for the embedding and the norms.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
Difference: float32, and all matrices of one shape in one batched product. `torch.optim.Muon` works
in bfloat16, which takes tens of seconds per step on CPUs without bfloat16 units. Adapters, with a
tenth of the weights, are trained with it (`paceline_training/optimizers.py`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # The quintic of the Muon post.
_ITERATIONS = 5
_MOMENTUM = 0.95


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Bring every singular value near 1 by five Newton-Schulz iterations.

    Args:
        matrices: (B, rows, columns) float32.

    Returns:
        (B, rows, columns) float32, singular values within about [0.7, 1.2].
    """
    linear, cubic, quintic = _COEFFICIENTS
    wide = matrices.size(-2) <= matrices.size(-1)
    x: torch.Tensor = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = linear * x + (cubic * gram + quintic * gram @ gram) @ x
    return x if wide else x.mT


class MuonWithAdamW:
    """One optimizer over a model, with one relative learning rate for both parts.

    Args:
        model: Matrices of its decoder layers go to Muon, everything else to AdamW.
        matrix_rate: Muon's peak learning rate (spectral norm of an update).
        embedding_rate: AdamW's peak learning rate.
    """

    def __init__(self, model: nn.Module, *, matrix_rate: float, embedding_rate: float) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.dim() == 2:
                by_shape[parameter.shape].append(parameter)
            else:
                others.append(parameter)
        self._groups = list(by_shape.values())
        self._momenta = [torch.zeros_like(_stacked(group)) for group in self._groups]
        self._matrix_rate = matrix_rate
        self._embedding_rate = embedding_rate
        self._adamw = torch.optim.AdamW(
            others, lr=embedding_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    @torch.no_grad()
    def step(self, relative_rate: float) -> None:
        """Update every parameter and drop the gradients.

        Args:
            relative_rate: Share of the peak learning rates, in [0, 1].
        """
        for group, momentum in zip(self._groups, self._momenta, strict=True):
            gradient = torch.stack([_gradient(parameter) for parameter in group])
            momentum.lerp_(gradient, 1 - _MOMENTUM)
            update = orthogonalise(gradient.lerp(momentum, _MOMENTUM))  # Nesterov.
            rows, columns = update.shape[-2:]
            rate = self._matrix_rate * relative_rate * max(1.0, rows / columns) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.sub_(change, alpha=rate)
                parameter.grad = None
        for options in self._adamw.param_groups:
            options["lr"] = self._embedding_rate * relative_rate
        self._adamw.step()
        self._adamw.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on."""
        return {"momenta": self._momenta, "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state of the same model."""
        for momentum, saved in zip(self._momenta, state["momenta"], strict=True):
            momentum.copy_(saved)
        self._adamw.load_state_dict(state["adamw"])


def _stacked(group: list[nn.Parameter]) -> torch.Tensor:
    return torch.stack([parameter.detach() for parameter in group])


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "step() before backward()"
    return parameter.grad
