"""A server that ends before it is ready leaves no process of a library's behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

# What vLLM does while it loads: a process that begins more of them. They heed no SIGTERM.
SERVER = """
    import asyncio, multiprocessing, os, signal, sys, time

    def wait():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        time.sleep(600)

    def work():
        multiprocessing.Process(target=wait).start()
        wait()

    class Loading:
        async def begin(self):
            await asyncio.to_thread(self.load)

        def load(self):
            multiprocessing.Process(target=work).start()
            if "fail" in sys.argv:
                sys.stdin.readline()
                raise ValueError("no model")
            time.sleep(600)

    if __name__ == "__main__":
        multiprocessing.set_start_method("spawn")
        from paceline_serving.process import run_process
        from paceline_serving.server_settings import RunSettings

        sys.exit(run_process(Loading, RunSettings()))
"""


def has_ended(process_id: int) -> bool:
    """Whether it computes no more; one that nobody waits for yet is a zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux tells of children")
@pytest.mark.parametrize("how", ["signal", "fail"])
def test_a_server_that_ends_while_it_loads_takes_its_processes_with_it(how, tmp_path):
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(script), how], **pipes) as server:
        begun = [int(server.stdout.readline()) for _ in range(2)]
        try:
            if how == "signal":
                server.terminate()
            else:
                server.stdin.write("\n")
                server.stdin.flush()
            assert server.wait(30) == (0 if how == "signal" else 1)
            until = time.monotonic() + 10
            while not all(map(has_ended, begun)) and time.monotonic() < until:
                time.sleep(0.05)
            assert [each for each in begun if not has_ended(each)] == []
        finally:
            for each in begun:
                if not has_ended(each):
                    os.kill(each, signal.SIGKILL)
