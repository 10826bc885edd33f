"""An nginx that ends TLS, as docs/http.md has it: idle connections lose no request, nothing moves.

nginx closes a connection to the gateway when it has been idle for 60 s. If the gateway closed it
just then, too, the next request would come to nothing. NGINX_SECONDS=3600 runs for an hour.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import shutil
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import psutil
import pytest

from support.certificates import Certificates
from support.ports import free_address
from support.processes import GatewayProcess, running
from support.system import System, simulated_model
from support.waiting import eventually

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
SECONDS = float(os.environ.get("NGINX_SECONDS", "100"))
CLIENTS = 20
# More than the clients' requests are apart, so that each one needs a connection of its own: nginx
# would send a later one over the connection that an earlier one has just left.
ANSWER_SECONDS = 0.3
APART_SECONDS = 0.02

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(SECONDS + 300),
    pytest.mark.skipif(NGINX is None, reason="needs nginx"),
]


@pytest.fixture(scope="module")
def gateway():
    target = simulated_model("target", seconds=0.01, simulated_ttft_seconds=ANSWER_SECONDS)
    system = System(drafters=[], targets=[target])
    with system.running():
        process = GatewayProcess(f"--orchestrators={system.orchestrators[0].address}")
        with running(process):
            yield process


@contextmanager
def nginx_before(gateway, directory):
    """Run nginx with the page's own configuration, and return its address and its authority."""
    address, certificates = free_address(), Certificates(directory)
    files = certificates.issue("localhost")
    (block,) = re.findall(r"^```nginx\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, value in {
        "127.0.0.1:8000": gateway.address,
        "listen 443 ssl": f"listen {address} ssl",
        "/etc/nginx/llm.example.pem": str(files.certificate),
        "/etc/nginx/llm.example.key": str(files.key),
    }.items():
        assert name in block
        block = block.replace(name, value)
    configuration = directory / "nginx.conf"
    configuration.write_text(
        f"daemon off; pid {directory}/nginx.pid; user root; worker_processes 1;\n"
        f"events {{}}\nhttp {{ access_log {directory}/access.log;\n{block}}}\n"
    )
    command = [str(NGINX), "-p", str(directory), "-e", str(directory / "error.log")]
    process = subprocess.Popen([*command, "-c", str(configuration)])
    try:
        yield address, certificates.authority
    finally:
        process.terminate()
        process.wait(30)


class Caller:
    """A client with one connection, which it keeps."""

    def __init__(self, address, authority, *, streams):
        port, context = int(address.partition(":")[2]), ssl.create_default_context(cafile=authority)
        self._connection = http.client.HTTPSConnection("localhost", port, context=context)
        self._connection.auto_open = 0  # a connection that is cut is a request that is lost
        self._streams = streams

    def connect(self):
        self._connection.connect()
        return True

    def complete(self):
        """Ask for a completion; return its status and whether it came whole."""
        if self._connection.sock is None:  # nginx said with its last answer that this was the last
            self.connect()
        asked = {"model": "simulated", "prompt": "p", "max_tokens": 2, "stream": self._streams}
        body = json.dumps({**asked, "paceline": {"strategy": "autoregressive"}})
        self._connection.request("POST", "/v1/completions", body)
        answer = self._connection.getresponse()
        text = answer.read().decode()
        return answer.status, text.endswith("data: [DONE]\n\n" if self._streams else "}")

    def look(self, path):
        """Return the status of what is at a path, and where it leads."""
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        answer.read()
        return answer.status, answer.headers["Location"]


def silences(seconds, *, seed):
    """Draw how long all connections are idle; every second time by nginx's limit nearly exactly."""
    draw = random.Random(seed)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        yield 60 + draw.uniform(-0.05, 0.05)
        yield draw.uniform(59, 61)


def ports_to(gateway):
    """Return the ports of connections to the gateway that are open."""
    own = int(gateway.address.partition(":")[2])
    return {
        it.raddr.port
        for it in psutil.Process(gateway.pid).net_connections("tcp")
        if it.laddr.port == own and it.status == psutil.CONN_ESTABLISHED
    }


def test_requests_after_a_minute_of_silence_are_answered_behind_an_nginx_that_ends_tls(
    gateway, tmp_path
):
    answered, kept, renewed = 0, 0, 0
    with nginx_before(gateway, tmp_path) as (address, authority), ThreadPoolExecutor(40) as pool:
        callers = [Caller(address, authority, streams=bool(it % 2)) for it in range(CLIENTS)]
        eventually(callers[0].connect, what="nginx listens")
        for path in ("/v1/models", "/v1/models/", "/health/", "/"):
            assert callers[0].look(path) == (200, None)
        for caller in callers[1:]:
            caller.connect()

        def ask(index):
            time.sleep(index % 5 * APART_SECONDS / 4)
            return callers[index].complete()

        before = set()
        for silence in chain([0.0], silences(SECONDS, seed=36)):
            time.sleep(silence)
            assert list(pool.map(ask, range(CLIENTS))) == [(200, True)] * CLIENTS
            answered += CLIENTS
            now = ports_to(gateway)
            kept, renewed, before = kept + len(now & before), renewed + len(now - before), now
            print(f"{time.time():.0f}: {silence:.3f} s: {answered=} {kept=} {renewed=}", flush=True)
    assert "upstream" not in (tmp_path / "error.log").read_text()
    assert renewed > CLIENTS / 2  # else they did not need a connection each
