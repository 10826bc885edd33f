import subprocess
import sys

import pytest

from paceline_bench.processes import quiet


@pytest.fixture
def waiting():
    """The id of a process that waits for input that never comes."""
    arguments = (sys.executable, "-c", "print(flush=True); input()")
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process.pid
        process.kill()


async def test_a_process_that_only_waits_is_quiet(waiting):
    assert await quiet([waiting])


async def test_who_gives_up_waiting_says_so(waiting):
    assert not await quiet([waiting], within_seconds=0.0)
