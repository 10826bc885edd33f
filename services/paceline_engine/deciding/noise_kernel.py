"""The noise of `noise.py` on a GPU, in one kernel: with torch's operators it is over a hundred.

Triton comes with torch's CUDA wheels. Its `philox` is the same generator, so the bits are those of
`noise.py` (tests/unit/engine/test_noise_kernel.py). Logarithms may differ from a CPU's in the last
bit, as torch's own on a GPU do.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from paceline_engine.deciding.noise import Purpose

_BLOCK = 1024


def add_gumbel(
    scores: Tensor,
    positions: Tensor,
    *,
    seeds: Tensor,
    purpose: Purpose,
    token_ids: Tensor | None,
) -> Tensor:
    """Return the scores with the noise of their tokens: (T, V) float64, as `add_noise` says.

    Args:
        scores: (T, V) float64, -inf where a token is out.
        positions: (T,) int64.
        seeds: (T,) int64.
        purpose: What the noise is for.
        token_ids: What the columns stand for, (V,) int64; None: themselves.
    """
    scores = scores.contiguous()
    noisy = torch.empty_like(scores)
    rows, columns = scores.shape
    blocks = triton.cdiv(columns, _BLOCK)
    device = torch.cuda.device(scores.device) if scores.is_cuda else nullcontext()
    with device:
        _add_gumbel[(rows, blocks)](
            noisy,
            scores,
            positions,
            seeds,
            scores if token_ids is None else token_ids,
            columns,
            int(purpose),
            HAS_TOKEN_IDS=token_ids is not None,
            BLOCK=_BLOCK,
        )
    return noisy


@triton.jit  # type: ignore[untyped-decorator]
def _add_gumbel(  # type: ignore[no-untyped-def]
    noisy,
    scores,
    positions,
    seeds,
    token_ids,
    columns,
    purpose,
    HAS_TOKEN_IDS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < columns
    place = row * columns + column
    score = tl.load(scores + place, mask=is_there, other=0.0)
    token = column.to(tl.int64)
    if HAS_TOKEN_IDS:
        token = tl.load(token_ids + column, mask=is_there, other=0)
    position = tl.load(positions + row)
    zeros = tl.zeros_like(token)
    even_0, even_1, odd_0, odd_1 = tl.philox(
        tl.load(seeds + row),
        (token >> 1).to(tl.uint32),
        (zeros + (position & 0xFFFFFFFF)).to(tl.uint32),
        (zeros + (position >> 32)).to(tl.uint32),
        (zeros + purpose).to(tl.uint32),
    )
    is_odd = (token & 1) == 1
    high = tl.where(is_odd, odd_0, even_0).to(tl.int64)
    low = tl.where(is_odd, odd_1, even_1).to(tl.int64)
    bits = (high << 21) | (low >> 11) | 1
    uniform = bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53
    tl.store(noisy + place, score - tl.log(-tl.log(uniform)), mask=is_there)
