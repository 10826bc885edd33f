"""Where the sequences of a forward lie, for compiled code that attends to them.

See `compiled_attention.py`.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_long, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline_engine.torch_backend.key_values import KeyValues

MOST_ATTENDED = 32
"""With more rows torch's kernel is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Rows of one sequence, which compiled code can attend with.

    Attributes:
        text: The sequence, with room for them.
        first: The first one's number among the forward's rows.
        count: How many they are.
        start: The first one's place in the sequence.
        length: How many keys torch's kernel would be given, also hidden ones.
    """

    text: KeyValues
    first: int
    count: int
    start: int
    length: int


class _Span(ctypes.Structure):
    """As in compiled_attention.c, like the next one."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_layer", c_long),
        ("key_head", c_long),
        ("value_layer", c_long),
        ("value_head", c_long),
        ("first", c_long),
        ("count", c_long),
        ("start", c_long),
        ("length", c_long),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        ("layer", c_long),
        ("kv_heads", c_long),
        ("group", c_long),
        ("width", c_long),
        ("scale", c_float),
    )


class AttentionLayer:
    """How one layer attends.

    Attributes:
        at: Where functions read it.
        heads, group: H, and H / G.
        width: D.
    """

    def __init__(self, layer: int, *, heads: int, kv_heads: int, width: int, scale: float) -> None:
        self.heads, self.group, self.width = heads, heads // kv_heads, width
        self._struct = _Attention(layer, kv_heads, self.group, width, scale)
        self.at = ctypes.addressof(self._struct)


class Spans:
    """The table of a forward's rows. Rows that no span has are fillings.

    Attributes:
        at: Where it lies.
        count: How many spans it has.
        key_count: How many keys rows see in all.
        kernel_counts: With how many rows of a sequence torch's kernel would be called, where its
            bits count.
    """

    def __init__(self, spans: Sequence[Span], *, kernel_counts: Iterable[int] = ()) -> None:
        """Build it of at least one span."""
        self._table = (_Span * len(spans))(*(_told(each) for each in spans))
        self.at, self.count = ctypes.addressof(self._table), len(spans)
        self.key_count = sum(each.count * (each.start + each.count) for each in spans)
        self.kernel_counts = frozenset(kernel_counts)


def _told(span: Span) -> _Span:
    keys, values = span.text.keys, span.text.values
    for each in (keys, values):
        assert each.stride()[3:] == (each.shape[-1], 1), "rows lie side by side"
    return _Span(
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        key_layer=keys.stride(0),
        key_head=keys.stride(2),
        value_layer=values.stride(0),
        value_head=values.stride(2),
        first=span.first,
        count=span.count,
        start=span.start,
        length=span.length,
    )
