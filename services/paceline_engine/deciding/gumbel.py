"""Gumbel noise on logits: in one kernel on a GPU, otherwise with operators of torch and NumPy.

`noise.py` defines the bits of the noise. Letters: T rows, V the tokenizer's vocabulary, or the
number of scored tokens where a drafter's head scores some only. Then `token_ids`, (V,) int64 and
ascending, says which token each column stands for.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline_engine.deciding.noise import Purpose, pair_bits
from paceline_engine.terms.backend import first_line

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger(__name__)

_WORD = 0xFFFFFFFF


def add_noise(
    scores: Tensor,
    positions: Sequence[int] | Tensor,
    *,
    seed: int | Tensor,
    purpose: Purpose,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Add Gumbel noise to each token that the filters kept.

    Args:
        scores: (T, V) float64, -inf where a token is out.
        positions: The position of each row's token: (T,) int64 if a tensor.
        seed: One for all rows, or (T,) int64.
        token_ids: What the columns stand for; see above.

    Cost: one kernel on a GPU. On a CPU, if less than half of the pairs of ids (2n, 2n + 1) have a
    survivor, noise is only computed for those; and the integer part runs in NumPy, whose calls cost
    a fraction of torch's.
    """
    if not isinstance(positions, Tensor):
        positions = sent(positions, scores.device)
    kernel = noise_kernel(scores.device)
    if kernel is not None:
        seeds = seed if isinstance(seed, Tensor) else torch.full_like(positions, seed)
        return kernel(scores, positions, seeds=seeds, purpose=purpose, token_ids=token_ids)
    return add_noise_in_steps(scores, positions, seed=seed, purpose=purpose, token_ids=token_ids)


def add_noise_in_steps(
    scores: Tensor,
    positions: Tensor,
    *,
    seed: int | Tensor,
    purpose: Purpose,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Add noise as `add_noise` does, with operators of torch and NumPy."""
    if token_ids is not None:
        return _add_noise_of(token_ids, scores, positions, seed=seed, purpose=purpose)
    rows, vocabulary = scores.shape
    if vocabulary % 2:
        scores = torch.nn.functional.pad(scores, (0, 1), value=-math.inf)
    pairs = scores.view(rows, -1, 2)
    wanted = (pairs > -math.inf).any(-1)
    if 2 * int(wanted.sum()) < wanted.numel():
        row, pair = wanted.nonzero(as_tuple=True)
        own_seed = seed if isinstance(seed, int) else seed[row]
        noise = _gumbel_pairs(pair, positions[row], seed=own_seed, purpose=purpose)
        noisy = pairs.index_put((row, pair), pairs[row, pair] + noise)
    else:
        pair = torch.arange(pairs.shape[1], device=scores.device)
        own_seed = seed if isinstance(seed, int) else seed[:, None]
        noisy = pairs + _gumbel_pairs(pair, positions[:, None], seed=own_seed, purpose=purpose)
    return noisy.view(rows, -1)[:, :vocabulary]


class NoiseKernel(Protocol):
    """Adds noise as `add_noise` does."""

    def __call__(  # noqa: D102 - the class says it
        self,
        scores: Tensor,
        positions: Tensor,
        *,
        seeds: Tensor,
        purpose: Purpose,
        token_ids: Tensor | None,
    ) -> Tensor: ...


@lru_cache
def noise_kernel(device: torch.device) -> NoiseKernel | None:
    """Return what computes noise in one kernel on a device; None: nothing does.

    Cost: the first call for a GPU compiles the kernel, in a second or two, and compares it.
    """
    if device.type != "cuda":
        return None
    scores = torch.zeros(1, 1024, dtype=torch.float64, device=device)
    positions = torch.zeros(1, dtype=torch.int64, device=device)
    columns = torch.arange(1024, device=device)
    try:
        from paceline_engine.deciding.noise_kernel import add_gumbel

        for token_ids in (None, columns):
            expected, actual = (
                add_noise_in_steps(
                    scores, positions, seed=1, purpose=Purpose.EXACT, token_ids=token_ids
                ),
                add_gumbel(
                    scores,
                    positions,
                    seeds=positions + 1,
                    purpose=Purpose.EXACT,
                    token_ids=token_ids,
                ),
            )
            if not torch.allclose(expected, actual, rtol=1e-12, atol=1e-12):
                _log.warning("noise takes torch's operators on %s: its kernel is off", device)
                return None
    except Exception as error:  # noqa: BLE001 - Triton needs a C compiler, and may break anywhere
        reason = first_line(error)
        _log.warning("noise takes torch's operators on %s, which is slower: %s", device, reason)
        return None
    return add_gumbel


def sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return integers as a tensor on a device; the host does not wait for the device's work."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def _add_noise_of(
    token_ids: Tensor, scores: Tensor, positions: Tensor, *, seed: int | Tensor, purpose: Purpose
) -> Tensor:
    """Add the noise of the tokens that columns stand for, where the filters kept them."""
    row, column = (scores > -math.inf).nonzero(as_tuple=True)
    token = token_ids[column]
    own_seed = seed if isinstance(seed, int) else seed[row]
    pairs = _gumbel_pairs(token >> 1, positions[row], seed=own_seed, purpose=purpose)
    noise = pairs.gather(-1, (token & 1)[:, None])[:, 0]
    return scores.index_put((row, column), scores[row, column] + noise)


def _gumbel_pairs(
    pair: Tensor, position: Tensor, *, seed: int | Tensor, purpose: Purpose
) -> Tensor:
    """Return the float64 noise of the ids (2n, 2n + 1): the broadcast shape, and 2."""
    if pair.device.type == "cpu":
        n, t = pair.numpy(), position.numpy()
        key = seed if isinstance(seed, int) else seed.numpy()
        words = pair_bits(key, (n, t & _WORD, t >> 32, int(purpose)))
        even, odd = map(torch.from_numpy, words)
    else:
        even, odd = pair_bits(seed, (pair, position & _WORD, position >> 32, int(purpose)))
    uniform = torch.stack((even, odd), dim=-1).double().mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()
