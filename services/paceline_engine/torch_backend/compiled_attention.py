"""Attention of few rows in compiled code, to keys and values where they lie.

Theory of operation
-------------------

To attend with one row, torch computes for some 15 microseconds, and its operators and Python take
ten times that around it. `compiled_attention.c` does the same for all sequences of a forward in one
call: it keeps a layer's new keys and values, and attends. A table tells it where each sequence
lies; the table is made once in a forward and serves all layers (`Spans`).

    span     | sequence | rows of the forward | place of the first | keys of torch's kernel |
    0        | A        | 0, 1                | 62                 | 64                     |
    1        | A        | 2                   | 64                 | 128                    |
    2        | B        | 3                   | 700                | 704                    |

With `--invariant` a text's bits must not depend on which of the two attends. The code adds in the
order of torch's kernel, so it gives the same bits, with most shapes: the products in that kernel
are MKL's, which has another order for a few numbers of rows. `agreeing_counts` finds out at load
with which it has not; those rows, trees, windows, and more than `MOST_ATTENDED` rows are left to
torch. Without `--invariant` the two may differ by rounding, as torch's kernels do among each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline_engine.torch_backend.attention_kernels import Attention, attend_apart, mask_of
from paceline_engine.torch_backend.attention_tables import (
    MOST_ATTENDED,
    AttentionLayer,
    Span,
    Spans,
)
from paceline_engine.torch_backend.compiled_steps import one_thread
from paceline_engine.torch_backend.invariant import LEAST_MULTIPLE, TILE
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs

if TYPE_CHECKING:
    from paceline_engine.torch_backend.compiled_steps import Steps

_MOST_WIDTH = 256
# In whole tiles, over two splits of torch's kernel; and what only many splits could show.
_CHECKED_LENGTHS, _LONG_LENGTH = range(TILE, 18 * TILE, TILE), 128 * TILE
# Queries of such sizes: flat attention, and some in which most weights vanish.
_CHECKED_SIZES = (1.0, 30.0)
_CHECKED_HEADS = 2


@torch.inference_mode()
def agreeing_counts(steps: Steps, how: Attention, *, group: int, width: int) -> frozenset[int]:
    """Return the numbers of a sequence's rows with which the code gives the bits of torch's kernel.

    Args:
        steps: Have the code.
        how: How layers attend.
        group: How many query heads each key head has.
        width: Of a head.
    """
    text = _random_text(_LONG_LENGTH, width)
    layer = AttentionLayer(
        0, heads=group * _CHECKED_HEADS, kv_heads=_CHECKED_HEADS, width=width, scale=how.scale
    )
    checked = [
        *((length, last, 1.0) for length in _CHECKED_LENGTHS for last in (TILE, TILE // 2)),
        *((length, TILE - 1, size) for length in _CHECKED_LENGTHS for size in _CHECKED_SIZES),
        (_LONG_LENGTH, TILE - 1, 1.0),
    ]
    with one_thread():
        return frozenset(
            count
            for count in range(LEAST_MULTIPLE, MOST_ATTENDED + 1, LEAST_MULTIPLE)
            if all(
                _agree(
                    steps,
                    how,
                    layer,
                    text=text,
                    places=range(length - TILE + last - count, length - TILE + last),
                    length=length,
                    size=size,
                )
                for length, last, size in checked
            )
        )


def can_attend(how: Attention, *, width: int) -> bool:
    """Whether the code computes such attention."""
    return how.is_plain and how.window is None and width <= _MOST_WIDTH


def _random_text(length: int, width: int) -> KeyValues:
    device = torch.device("cpu")
    shape = KeyValueShape(1, _CHECKED_HEADS, width, width, torch.float32, device)
    text = KeyValues(Slabs(shape), reserve_length=length)
    text.make_room(length)
    generator = torch.Generator().manual_seed(0)
    for each in (text.keys, text.values):
        each.normal_(generator=generator)
    return text


def _agree(
    steps: Steps,
    how: Attention,
    layer: AttentionLayer,
    *,
    text: KeyValues,
    places: range,
    length: int,
    size: float,
) -> bool:
    """Compare rows in such places with torch's kernel, which is given keys behind them, too.

    Args:
        size: Of the queries' numbers.
    """
    count, kv_heads = len(places), layer.heads // layer.group
    generator = torch.Generator().manual_seed(length)
    states = torch.randn(layer.heads + 2 * kv_heads, count, layer.width, generator=generator)
    states[: layer.heads] *= size
    span = Span(text=text, first=0, count=count, start=places.start, length=length)
    actual = steps.attend(states, Spans([span]), layer)
    keys, values = (each[0] for each in text.until(length))
    ages = torch.tensor(places)[:, None] - torch.arange(length)
    mask = mask_of(ages[None], None, like=states, group=layer.group)
    queries = states[None, : layer.heads]
    expected = attend_apart(queries, keys=keys, values=values, mask=mask, how=how)
    return torch.equal(actual, expected[0])
