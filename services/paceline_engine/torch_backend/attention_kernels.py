"""Attention to given keys and values, by torch's kernels or step by step.

Letters as in `attention.py`: H heads, G key and value heads, D their width; t rows of a sequence, L
its length with them; n sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# What flash attention computes; torch has no public words for the operator.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
_FLASH_DTYPES = frozenset({torch.float16, torch.bfloat16})
_MOST_FLASH_WIDTH, _FLASH_WIDTHS = 256, 8
_FIRST_WITH_FLASH = (8, 0)  # Ampere


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """How a layer attends.

    Attributes:
        scale: The factor of the products of queries and keys.
        window: How many tokens a row sees, itself included; None: all before it.
        soft_cap: The limit to which a tanh squeezes the scaled products; None: it does not.
        sinks: (H,) a further product for each head, which takes a part of the attention; or None.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether kernels compute it."""
        return self.soft_cap is None and self.sinks is None


def hidden_tokens(ages: Tensor, window: int | None) -> Tensor:
    """Whether a token of an age is hidden from its row."""
    hidden = ages < 0
    return hidden if window is None else hidden | (ages >= window)


def mask_of(ages: Tensor, window: int | None, *, like: Tensor, group: int) -> Tensor:
    """Return what is added to the products of several sequences' rows: (n, 1, group * t, L).

    Args:
        ages: How far each token is before each row; below 0 if the row does not see it: (n, t, L).
        window: How many tokens a row sees; None: all before it.
        like: A tensor of the mask's dtype and device.
        group: How many heads lie one below the other, as rows.
    """
    hidden = hidden_tokens(ages, window)
    mask = like.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
    return mask.repeat(1, group, 1)[:, None]


def attend_apart(
    queries: Tensor, *, keys: Tensor, values: Tensor, mask: Tensor | None, how: Attention
) -> Tensor:
    """Attend to several sequences, each to its own: (n, H, t, D) from the same.

    Args:
        keys, values: (n, G, L, D) each.
        mask: See `mask_of`; with a group of one if no kernel computes this attention.
    """
    if not how.is_plain:
        return attend_slowly(queries, keys=keys, values=values, mask=mask, how=how)
    # The heads of a group lie one below the other, as rows: (n, G, H / G * t, D).
    grouped = queries.reshape(len(queries), keys.shape[1], -1, queries.shape[-1])
    seen = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, scale=how.scale
    )
    return seen.reshape(*queries.shape[:-1], -1)


def takes_flash(queries: Tensor, *, values: Tensor) -> bool:
    """Whether `attend_at_end` computes queries and values of such devices, dtypes and widths."""
    width = queries.shape[-1]
    return (
        queries.dtype in _FLASH_DTYPES
        and width == values.shape[-1]
        and width <= _MOST_FLASH_WIDTH
        and width % _FLASH_WIDTHS == 0
        and _has_flash(queries.device)
    )


def _has_flash(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _FIRST_WITH_FLASH
    return device.type != "cpu"


def attend_at_end(queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention) -> Tensor:
    """Attend to all tokens up to each row's own: (1, H, t, D) from the same, and (1, G, L, D).

    With a mask, torch takes a kernel that has one block of threads for each key head, however long
    the sequence is. Flash attention divides a long sequence over the device, and a mask of t * L
    numbers is never made. `is_causal` of this operator aligns the last row with the last token, as
    `torch.nn.attention.bias.causal_lower_right` says, which costs twice the host's time.
    """
    seen: Tensor = _flash_attention(queries, keys, values, 0.0, is_causal=True, scale=how.scale)[0]
    return seen


def attend_slowly(
    queries: Tensor, *, keys: Tensor, values: Tensor, mask: Tensor | None, how: Attention
) -> Tensor:
    """Attend step by step, as no kernel computes this: (H, t, D) from the same, and (G, L, D).

    With several sequences each tensor has a further first dimension n.
    """
    group = queries.shape[-3] // keys.shape[-3]
    keys, values = keys.repeat_interleave(group, -3), values.repeat_interleave(group, -3)
    products = queries @ keys.transpose(-1, -2) * how.scale
    if how.soft_cap is not None:
        products = (products / how.soft_cap).tanh() * how.soft_cap
    if mask is not None:
        products = products + mask
    if how.sinks is not None:
        sinks = how.sinks.to(products).view(-1, 1, 1).expand(*products.shape[:-1], 1)
        products = torch.cat((products, sinks), -1)
    attention = products.softmax(-1, dtype=torch.float32).to(values.dtype)
    return attention[..., : values.shape[-2]] @ values
