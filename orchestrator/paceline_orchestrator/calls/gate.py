"""One long text at a time: a loop that hands on many in a row delivers no tokens meanwhile."""

from __future__ import annotations

import asyncio

from paceline_orchestrator.calls.share_locks import ShareLocks

__all__ = ["LongTextGate"]

# Shorter ones take less than a millisecond.
_LONG_TOKENS = 16_384
# After a text the way is free for others for as long as it took, or longer: some 10 ms for 190,000
# tokens, at this process and at the server that reads them.
_SECONDS_PER_TOKEN = 2e-7


class LongTextGate:
    """Lets long texts pass one after the other, each client's in its turn.

    So one client's texts make another one's streams wait for one of them at most, and its long
    texts for one of each client's.
    """

    def __init__(self) -> None:
        self._passage = asyncio.Lock()
        self._locks = ShareLocks()

    async def passed(self, length: int, *, share: str) -> None:
        """Wait until a text may be handed on; at once if it is short.

        Args:
            length: Its tokens.
            share: Whose it is.
        """
        if length < _LONG_TOKENS:
            return
        async with self._locks.of(share):
            await self._passage.acquire()
        rest_seconds = length * _SECONDS_PER_TOKEN
        asyncio.get_running_loop().call_later(rest_seconds, self._passage.release)
