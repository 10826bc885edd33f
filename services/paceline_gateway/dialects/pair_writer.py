"""Writes pairs of names and values as a JSON object, one pair at a time."""

from __future__ import annotations

import json


class PairWriter:
    """Writes one object. The pieces that the methods return, put together, are the object."""

    def __init__(self) -> None:
        self._is_begun = False

    def pair(self, key: str, value: str) -> str:
        """Return the piece for a pair whose value is JSON already."""
        before = ", " if self._is_begun else "{"
        self._is_begun = True
        return f"{before}{json.dumps(key, ensure_ascii=False)}: {value}"

    def end(self) -> str:
        """Return the piece that ends the object."""
        return "}" if self._is_begun else "{}"
