"""Connections that say nothing, more than a process has descriptors for: whoever asks is served."""

from __future__ import annotations

import resource
import socket
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.fake_orchestrator import FakeOrchestrator, serving
from support.on_a_thread import relaying
from support.ports import free_address
from support.processes import GatewayProcess, running
from support.system import simulated_model
from support.unread_watch import unread_watch
from support.waiting import eventually

FEW = 192
FLOOD = 300
MOST_LOG_BYTES = 200_000
DRAIN_SECONDS = 2
STOP_SECONDS = 2.5  # for answers on their way
SLACK_SECONDS = 30  # a machine that does much besides
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
ATTACKS = {
    "silence": b"",
    "half a head": HEAD,
    "a body that does not come": HEAD + b"Content-Length: 100\r\n\r\n",
    "idleness after an answer": b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "answers that are not read": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200,
}


@contextmanager
def gateway(*, descriptor_limit: int | None):
    """A gateway over an orchestrator of this process."""
    fake = FakeOrchestrator(address=free_address())
    flags = (f"--orchestrators={fake.address}", f"--drain-seconds={DRAIN_SECONDS}")
    gateway = GatewayProcess(*flags, descriptor_limit=descriptor_limit)
    with relaying(serving(fake)), running(gateway):
        yield gateway


@contextmanager
def flooded(address: str, say: bytes):
    """Connect very often, and say no more than this."""
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        for _ in range(FLOOD):
            line = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            line.setblocking(False)
            with suppress(OSError):  # it was closed for a younger one
                line.send(say)
        yield


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as page:
            return page.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    ("attack", "is_counted"), [*((attack, True) for attack in ATTACKS), ("silence", False)]
)
def test_a_gateway_in_a_flood_answers_probes_and_scrapers_and_ends_in_time(attack, is_counted):
    with gateway(descriptor_limit=FEW if is_counted else None) as flooded_gateway:
        if not is_counted:
            resource.prlimit(flooded_gateway.pid, resource.RLIMIT_NOFILE, (FEW, FEW))
        with flooded(flooded_gateway.address, ATTACKS[attack]):
            for _ in range(3):
                assert status(f"{flooded_gateway.url}/health/live") == 200
                assert "process_open_fds" in flooded_gateway.page("/metrics")
            flooded_gateway.terminate()
            ends_seconds = DRAIN_SECONDS + STOP_SECONDS + SLACK_SECONDS
            assert flooded_gateway.wait(ends_seconds) == 0
        assert len(flooded_gateway.log) < MOST_LOG_BYTES
        assert "Traceback" not in flooded_gateway.log, flooded_gateway.log[-3000:]


@pytest.mark.parametrize(
    ("flooded_port", "say"),
    [("health_address", PREFACE), ("address", PREFACE), ("metrics_address", b"")],
)
def test_a_flood_at_one_port_of_a_model_server_leaves_the_others_their_descriptors(
    flooded_port, say
):
    server = simulated_model("target", tls=True, descriptor_limit=FEW)
    with running(server), flooded(getattr(server, flooded_port), say):
        for port in {"health_address", "address"} - {flooded_port}:
            assert is_serving(getattr(server, port))
        assert "process_open_fds" in server.page("/metrics")
        assert len(server.log) < MOST_LOG_BYTES


def test_a_flood_at_the_health_port_is_over_while_its_connections_are_still_held():
    server = simulated_model("target", tls=True, descriptor_limit=FEW)
    with running(server), flooded(server.health_address, PREFACE):
        eventually(lambda: is_serving(server.health_address), what="a probe is answered")


@pytest.mark.parametrize("port", ["health_address", "address"])
def test_a_watcher_of_health_that_reads_nothing_holds_up_neither_others_nor_the_end(port):
    server = simulated_model("target", drain_seconds=DRAIN_SECONDS)
    with running(server), unread_watch(getattr(server, port)):
        with grpc.insecure_channel(getattr(server, port)) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=60
            )
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            server.terminate()
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert server.wait(DRAIN_SECONDS + STOP_SECONDS + SLACK_SECONDS) == 0


def is_serving(address: str) -> bool:
    """Ask once, as a probe does."""
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=30, wait_for_ready=True
        )
    return answer.status == health_pb2.HealthCheckResponse.SERVING
