"""The life of a model server as a process of its own, with the simulated backend."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.errors import TryAgainError
from support.model_servers import TARGET, ModelClient

if TYPE_CHECKING:
    from collections.abc import Iterator

END_SECONDS = 60
GRPC_LOG = re.compile(r"[EIW]\d{4} ")  # what gRPC's core prints by itself
QUICK = ("--backend=simulated", "--simulated-ttft-seconds=0", "--simulated-tpot-seconds=0")


# A target that never comes back from this token, and whose libraries would wait for it at the end.
STICKY_TOKEN = 2000
STICKY_TARGET = f"""
import atexit, sys, time
from paceline_engine.scheduling import latencies, worker
from paceline_engine.simulated import SimulatedBackend
from paceline_target.__main__ import main

latencies._LEAST_PATIENCE_NS = worker._STOP_SECONDS = 0.1
forward = SimulatedBackend._forward

def stick(self, feeds, interrupt):
    if any({STICKY_TOKEN} in feed.token_ids for feed in feeds):
        atexit.register(time.sleep, 600)
        time.sleep(600)
    return forward(self, feeds, interrupt)

SimulatedBackend._forward = stick
sys.exit(main(sys.argv[1:]))
"""


# A target that says at its end how many objects no collection looks at.
COUNTING_TARGET = """
import gc, sys
from paceline_target.__main__ import main

code = main(sys.argv[1:])
print(f"frozen: {gc.get_freeze_count()}", file=sys.stderr)
sys.exit(code)
"""


class Server:
    """A process, and the lines it printed."""

    def __init__(self, role: str, *flags: str, script: str = "") -> None:
        program = ["-c", script] if script else ["-m", f"paceline_{role}"]
        self.process = subprocess.Popen(
            [sys.executable, *program, "--listen=127.0.0.1:0", *QUICK, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def event(self, name: str) -> dict[str, Any]:
        """Read lines until the one that tells of an event."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
        assert self.process.stderr is not None
        raise AssertionError(f"ended without {name!r}: {self.process.stderr.read()}")

    def wait(self) -> int:
        return self.process.wait(END_SECONDS)


def page(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


@contextmanager
def running(role: str, *flags: str, script: str = "") -> Iterator[Server]:
    server = Server(role, *flags, script=script)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        for pipe in (server.process.stdin, server.process.stdout, server.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.mark.parametrize("role", ["drafter", "target"])
def test_a_server_says_where_it_listens_serves_and_ends_on_sigterm(role):
    with running(role, "--metrics-listen=127.0.0.1:0") as server:
        ready = server.event("ready")
        assert ready["pid"] == server.process.pid
        for address in (ready["address"], ready["health_address"]):
            with grpc.insecure_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        metrics = page(ready["metrics_address"], "/metrics")
        assert f'paceline_sessions_active{{role="{role}"}} 0.0' in metrics
        server.process.send_signal(signal.SIGTERM)
        server.event("draining")
        assert server.wait() == 0


async def test_on_sigterm_the_calls_of_open_sessions_go_on_until_they_are_closed():
    with running("target") as server:
        address = server.event("ready")["address"]
        target = await ModelClient(TARGET, address).learn()
        session = await target.open()
        server.process.send_signal(signal.SIGTERM)
        server.event("draining")
        answer = await target.verify(target.call(session, 1, new=(1, 2, 3)))
        assert answer.held_length == 3
        await target.close(session)
        await target.channel.close()
        assert server.wait() == 0


async def test_an_open_session_does_not_hold_up_the_end_for_longer_than_the_drain():
    with running("target", "--drain-seconds=0.2") as server:
        target = await ModelClient(TARGET, server.event("ready")["address"]).learn()
        await target.open()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        await target.channel.close()


async def test_a_target_whose_model_hangs_for_long_ends_by_itself_and_waits_for_nothing():
    with running("target", "--hang-limit-seconds=0.1", script=STICKY_TARGET) as server:
        target = await ModelClient(TARGET, server.event("ready")["address"]).learn()
        session = await target.open()
        await target.verify(target.call(session, 1, new=(1, 2, 3)))
        stuck = target.verify(target.call(session, 2, held=(1, 2, 3), new=(STICKY_TOKEN,)))
        assert isinstance(await target.error_of(stuck), TryAgainError)
        await target.channel.close()
        assert server.wait() == 1
        assert server.process.stderr is not None
        log = server.process.stderr.read()
    assert "this server has to stop: a forward has hung for " in log


def test_no_collection_looks_at_what_a_server_has_loaded():
    with running("target", script=COUNTING_TARGET) as server:
        server.event("ready")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert server.process.stderr is not None
        _, _, count = server.process.stderr.read().rpartition("frozen: ")
    assert int(count) > 10_000


async def test_a_second_signal_ends_it_at_once():
    with running("target", "--drain-seconds=600") as server:
        target = await ModelClient(TARGET, server.event("ready")["address"]).learn()
        await target.open()
        server.process.send_signal(signal.SIGINT)
        server.event("draining")
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 1
        await target.channel.close()


def test_a_server_ends_with_its_parent_when_asked_to():
    with running("target", "--exit-with-parent") as server:
        server.event("ready")
        assert server.process.stdin is not None
        server.process.stdin.close()
        server.wait()


def test_a_killed_parent_leaves_no_server_behind():
    script = (
        "import subprocess, sys;"
        "child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE);"
        "print(child.pid, flush=True);"
        "[print(line.decode(), end='', flush=True) for line in child.stdout]"
    )
    command = [sys.executable, "-m", "paceline_target", "--listen=127.0.0.1:0", *QUICK]
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *command, "--exit-with-parent"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    watch = os.pidfd_open(child)
    assert '"listening"' in parent.stdout.readline()
    assert '"ready"' in parent.stdout.readline()
    parent.kill()
    parent.communicate()
    with os.fdopen(watch):
        assert select.select([watch], [], [], END_SECONDS)[0], "the server is still there"


@pytest.mark.parametrize(
    ("flags", "said", "code"),
    [
        (["--listen=0.0.0.0:0"], "needs TLS; --insecure allows plaintext", 2),
        (["--backend=transformers"], "--model is needed", 2),
        (["--simulated-ttft=1"], "did you mean --simulated-ttft-seconds?", 2),
        (["--backend=transformers", "--model=/does/not/exist"], "/does/not/exist", 1),
        (["--listen=203.0.113.1:1", "--insecure"], "cannot listen on 203.0.113.1:1", 1),
        (["--tls-certificate=/no.pem", "--tls-key=/no.key"], "/no.", 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_server_that_cannot_start_says_why_in_one_line(flags, said, code):
    with running("target", "--log-level=error", *flags) as server:
        assert server.wait() == code
        assert server.process.stderr is not None
        lines = [line for line in server.process.stderr if not GRPC_LOG.match(line)]
        assert len(lines) == 1
        assert said in lines[0]


@pytest.mark.parametrize("flag", ["--reflection", "--no-reflection"])
def test_reflection_is_there_only_when_asked_for(flag):
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

    with (
        running("target", flag) as server,
        grpc.insecure_channel(server.event("ready")["address"]) as channel,
    ):
        database = ProtoReflectionDescriptorDatabase(channel)
        if flag == "--reflection":
            served = {f"paceline.v1.{name}Service" for name in ("Model", "Session", "Target")}
            assert served <= set(database.get_services())
        else:
            with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
                database.get_services()


async def test_the_last_calls_are_shown_only_when_asked_for_and_without_content():
    flags = ("--metrics-listen=127.0.0.1:0", "--debug-calls")
    with running("target", *flags) as server:
        ready = server.event("ready")
        target = await ModelClient(TARGET, ready["address"]).learn()
        session = await target.open()
        call = target.call(session, 1, new=(1234, 1235, 1236))
        await target.verify(call, [1237], speculation_depth=2)
        text = page(ready["metrics_address"], "/debug/calls")
        await target.channel.close()
    (record,) = json.loads(text)
    assert (record["method"], record["sequence"], record["depth"]) == ("Verify", 1, 2)
    assert (record["rows"], record["outcome"]) == (4, "ok")
    assert 0 < record["start_ns"] < record["end_ns"]
    assert session not in text
    assert set(record) == {
        *("method", "session", "sequence", "depth", "start_ns", "end_ns", "queue_ns"),
        *("forward_ns", "outcome", "rows", "accepted", "is_tree", "runners_up"),
    }
    with running("target", flags[0]) as server:
        metrics_address = server.event("ready")["metrics_address"]
        with pytest.raises(urllib.error.HTTPError):
            page(metrics_address, "/debug/calls")
