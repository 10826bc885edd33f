"""The proof at load that a library model's state continues a sequence.

Some families ignore their state when they are given several rows after others (Mamba and Jamba in
transformers 5.23), or count positions from 0 again. Their text would be wrong without any error. So
each model with a recurrent state computes a sequence at once, in single rows, and in blocks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from paceline_engine.terms.backend import ModelLoadError, first_line
from paceline_engine.torch_backend.recurrent.library_state import LibraryState
from paceline_engine.torch_backend.recurrent.stepped_text import MOST_COPIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_log = logging.getLogger(__name__)

MOST_TOKENS_PER_TEXT = 1024
"""Without attention a token takes no memory, so it counts as such a part of a text's state."""

_LENGTH = 40
_STEPS = (20, *([1] * 20))
_BLOCKS = (20, 5, 2, 13)
# Differences of logits, as a part of their spread: the root of the mean square. Rounding makes some
# 1e-6 in float32 and up to 0.1 in bfloat16; a state that is ignored makes 0.3 and more.
_MOST_OFF = 1e-2
_MOST_OFF_ROUNDED = 0.25
# Blocks round in another order than steps, and not much worse.
_MOST_WORSE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """How a library model goes on after a state.

    Attributes:
        is_right: Whether single rows get the logits of the whole sequence. If not, it cannot be
            served.
        takes_blocks: Whether several rows at once do, too. If not, they are computed one by one.
        bytes_per_token, bytes_per_text: The memory of a state: for each token, and in any case.
    """

    is_right: bool
    takes_blocks: bool
    bytes_per_token: int
    bytes_per_text: int


@torch.inference_mode()
def prove_steps(name: str, model: Any) -> Continuation:
    """Find out how a model with a recurrent state is computed row by row.

    Args:
        name: The model's name, for the log.

    Raises:
        ModelLoadError: it cannot.
    """
    try:
        found = _continuation(model)
    except Exception as error:
        raise ModelLoadError(
            f"model {name!r}: the library cannot compute it in parts ({first_line(error)})"
        ) from error
    if not found.is_right:
        raise ModelLoadError(
            f"model {name!r}: the library's logits in parts are not those of the whole text"
        )
    _log.warning(
        "model %s: its recurrent state cannot be taken back, so proposals are judged row by row and"
        " gain nothing%s",
        name,
        "" if found.takes_blocks else "; the library is wrong for several rows, so prompts are too",
    )
    return found


def _continuation(model: Any) -> Continuation:
    token_ids = torch.arange(_LENGTH, device=model.device) * 7919 % model.config.vocab_size
    whole = _computed(model, token_ids, (_LENGTH,))
    limit = rounding_limit(model.dtype)
    off_in_steps = spread_off(_computed(model, token_ids, _STEPS), whole)
    off_in_blocks = spread_off(_computed(model, token_ids, _BLOCKS), whole)
    half, full = LibraryState(model), LibraryState(model)
    half.append(token_ids[: _LENGTH // 2])
    full.append(token_ids)
    per_token = (full.byte_count - half.byte_count) // (_LENGTH - _LENGTH // 2)
    fixed = full.byte_count - per_token * _LENGTH
    return Continuation(
        is_right=off_in_steps <= limit,
        takes_blocks=off_in_blocks <= min(limit, max(_MOST_WORSE * off_in_steps, _MOST_OFF)),
        # A copy of the state has all keys and values, too.
        bytes_per_token=max(per_token * (1 + MOST_COPIES), -(-fixed // MOST_TOKENS_PER_TEXT)),
        bytes_per_text=fixed * (1 + MOST_COPIES),
    )


def _computed(model: Any, token_ids: Tensor, sizes: Sequence[int]) -> Tensor:
    state = LibraryState(model)
    edges = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    return torch.cat([state.append(token_ids[start:end]) for start, end in pairwise(edges)])


def rounding_limit(dtype: torch.dtype) -> float:
    """Return the most by which rounding may change logits, as `spread_off` measures it."""
    return _MOST_OFF if dtype in {torch.float32, torch.float64} else _MOST_OFF_ROUNDED


def spread_off(actual: Tensor, expected: Tensor) -> float:
    """Return how far logits are off, as a part of their spread; NaN if any is NaN."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).square().mean().sqrt() / expected.std())
