"""Slower cores than the machine has: processes that run in a share of the time only.

A process of its own stops and continues them by signals. It continues them for good when whoever
asked for it is done, or has died.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_PERIOD_SECONDS = 0.02


@asynccontextmanager
async def throttled(pids: Sequence[int], *, share: float) -> AsyncIterator[None]:
    """Let processes run one after the other, each in a share of the time, during the block.

    Args:
        share: In (0, 1 / number of processes].
    """
    assert 0 < share * len(pids) <= 1
    throttle = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(share), *map(str, pids)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert throttle.stdin is not None
    assert throttle.stdout is not None
    try:
        await throttle.stdout.readline()
        yield
    finally:
        throttle.stdin.close()
        await throttle.wait()


def _throttle(pids: Sequence[int], *, share: float) -> None:
    """Stop and continue processes until standard input ends, or one of them has ended."""
    running = share * _PERIOD_SECONDS
    rest = max(0.0, _PERIOD_SECONDS - len(pids) * running)
    try:
        _signal(pids, signal.SIGSTOP)
        print("on", flush=True)
        while True:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
                if _is_over(within_seconds=running):
                    return
                os.kill(pid, signal.SIGSTOP)
            if _is_over(within_seconds=rest):
                return
    except ProcessLookupError:
        return
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _is_over(*, within_seconds: float) -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], within_seconds)
    return bool(readable)


if __name__ == "__main__":
    # A key that interrupts a whole group of processes is for its parent, which then ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _throttle([int(pid) for pid in sys.argv[2:]], share=float(sys.argv[1]))
