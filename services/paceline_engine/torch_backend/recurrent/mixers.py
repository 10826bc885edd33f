"""Library modules with a recurrence, computed with our rows.

The library's modules call two functions of their file by name: a convolution, and what computes the
recurrence in chunks. Each module of a model gets a copy of its class's `forward` in which these
names mean functions of ours; so projections, gates, norms and multipliers are the library's. A
module whose forward does not have these names, or has others, is not known; then the model is
computed row by row (`stepped_text.py`).
"""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from paceline_engine.torch_backend.library import current_rows
from paceline_engine.torch_backend.recurrent.open_tile import RecurrentInput
from paceline_engine.torch_backend.recurrent.recurrent_rows import RecurrentLayers, RecurrentRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_CONVOLUTION = "causal_conv1d_fn"
_DELTA_RULE = "torch_chunk_gated_delta_rule"
_MAMBA2 = "mamba2_chunk_scan"
_OF_STATE = "get_recurrent_state"
_EPSILON = 1e-6  # as the library's norm of queries and keys has it


class Mixers:
    """A model's recurrent modules, computing with our rows."""

    def __init__(self, model: nn.Module) -> None:
        """Change the modules that are known."""
        self.layers: list[int] = []
        self._changed: list[nn.Module] = []
        for module in model.modules():
            functions = _functions(module)
            if functions is not None:
                module.forward = MethodType(_with(type(module).forward, functions), module)
                self.layers.append(module.layer_idx)  # type: ignore[arg-type]
                self._changed.append(module)

    def give_back(self) -> None:
        """Let the modules compute as before."""
        for module in self._changed:
            del module.forward


def _functions(module: nn.Module) -> Mapping[str, Callable[..., Any]] | None:
    """Return what the names in a module's forward shall mean; None: it is not known."""
    names = {*inspect.unwrap(type(module).forward).__code__.co_names}
    layer = getattr(module, "layer_idx", None)
    if _CONVOLUTION not in names or not isinstance(layer, int):
        return None
    found: dict[str, Callable[..., Any]] = {_CONVOLUTION: _convolution(layer)}
    if _DELTA_RULE in names:
        found[_DELTA_RULE] = _delta_rule(layer)
    elif _MAMBA2 in names:
        found[_MAMBA2] = _mamba2(layer)
    elif _OF_STATE in names:
        return None
    return found


def _with(forward: Callable[..., Any], names: Mapping[str, Any]) -> FunctionType:
    inner = inspect.unwrap(forward)
    assert isinstance(inner, FunctionType)
    changed = FunctionType(
        inner.__code__,
        {**inner.__globals__, **names},
        inner.__name__,
        inner.__defaults__,
        inner.__closure__,
    )
    changed.__kwdefaults__ = inner.__kwdefaults__
    return changed


def _layers() -> RecurrentLayers:
    rows = current_rows()
    assert isinstance(rows, RecurrentRows)
    return rows.recurrent


def _convolution(layer: int) -> Callable[..., Tensor]:
    def convolve(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """Convolve (1, C, T)."""
        found = _layers().convolve(layer, hidden_states[0].T, weight=weight, bias=bias)
        return (found if activation is None else ACT2FN[activation](found)).T[None]

    return convolve


def _delta_rule(layer: int) -> Callable[..., tuple[Tensor, None]]:
    def recur(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Apply the gated delta rule to (1, T, heads, width) each, (1, T, H) each."""
        queries, keys, values = (_precise(each[0]).transpose(0, 1) for each in (query, key, value))
        if use_qk_l2norm_in_kernel:
            queries, keys = (
                each * torch.rsqrt(each.square().sum(-1, keepdim=True) + _EPSILON)
                for each in (queries, keys)
            )
        new = RecurrentInput(
            queries * queries.shape[-1] ** -0.5,
            keys,
            values,
            log_decays=_precise(g[0]).T,
            strengths=_precise(beta[0]).T,
        )
        return _layers().recur(layer, new).transpose(0, 1)[None].to(query.dtype), None

    return recur


def _mamba2(layer: int) -> Callable[..., Tensor]:
    def recur(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803 - the library's name
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        *,
        D: Tensor | None = None,  # noqa: N803
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> Tensor:
        """Scan x of (1, T, H, V), with B and C of (1, T, G, K) and dt of (1, T, H)."""
        steps = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
        steps = functional.softplus(steps) if dt_softplus else steps
        steps = _precise(steps.clamp(*dt_limit)).T
        values = _precise(hidden_states[0]).transpose(0, 1)
        new = RecurrentInput(
            _precise(C[0]).transpose(0, 1),
            _precise(B[0]).transpose(0, 1),
            values * steps[..., None],
            log_decays=_precise(A)[:, None] * steps,
        )
        found = _layers().recur(layer, new)
        if D is not None:
            found = found + _precise(D)[:, None, None] * values
        return found.transpose(0, 1)[None].contiguous()

    return recur


def _precise(each: Tensor) -> Tensor:
    return each.to(torch.promote_types(each.dtype, torch.float32))
