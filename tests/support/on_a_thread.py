"""Relays for tests that block: they run on an event loop of a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractAsyncContextManager


@contextmanager
def relaying(*relays: AbstractAsyncContextManager[object]) -> Iterator[None]:
    """Run relays until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="relays", daemon=True)
    thread.start()
    stack = AsyncExitStack()

    async def begin() -> None:
        for relay in relays:
            await stack.enter_async_context(relay)

    try:
        asyncio.run_coroutine_threadsafe(begin(), loop).result(90)
        yield
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(90)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(90)
        loop.close()
