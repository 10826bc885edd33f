"""Processes that are slowed down run on when nobody wants that any more."""

from __future__ import annotations

import asyncio
import sys

import psutil
import pytest

from paceline_bench.load.throttle import throttled


@pytest.fixture
async def busy():
    """A process that does nothing but say that it runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-uc", "import sys\nfor line in sys.stdin: print(line, end='')"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    yield process
    process.kill()
    await process.wait()


async def answer(process):
    process.stdin.write(b"there?\n")
    return await process.stdout.readline()


async def test_a_throttled_process_still_runs_and_is_let_go_at_the_end(busy):
    async with throttled([busy.pid], share=0.5):
        assert await answer(busy) == b"there?\n"
    assert psutil.Process(busy.pid).status() != psutil.STATUS_STOPPED
    assert await answer(busy) == b"there?\n"


async def test_a_process_is_let_go_after_an_error(busy):
    with pytest.raises(RuntimeError, match="of the block"):
        async with throttled([busy.pid], share=0.5):
            raise RuntimeError("of the block")
    assert await answer(busy) == b"there?\n"


async def test_others_are_let_go_when_one_has_ended(busy):
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await ended.wait()
    async with throttled([busy.pid, ended.pid], share=0.5):
        pass
    assert await answer(busy) == b"there?\n"
