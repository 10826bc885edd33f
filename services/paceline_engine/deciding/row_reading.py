"""Rows of a model's scores, for what decides by more than one of them: see `speaking/`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline_engine.terms.items import Judge, Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsTask(Judge):
    """Return the rows after a prefix and after each token of a chain; nothing is decided."""


@dataclass(frozen=True, slots=True, eq=False)
class RowsRead(Judgement):
    """The rows.

    Attributes:
        rows: A tensor, (T + 1, V) float32 probabilities, of its own memory.
    """

    rows: Any = None
