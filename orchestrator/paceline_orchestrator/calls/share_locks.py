"""Of each client's long texts one is worked on at a time."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

__all__ = ["ShareLocks"]


class ShareLocks:
    """A lock for each share, for as long as somebody has it or waits for it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, share: str) -> asyncio.Lock:
        """Return a share's lock; whoever asks keeps it until it is given back."""
        return self._locks.setdefault(share, asyncio.Lock())
