from __future__ import annotations

import http.client
import resource
import socket
import threading
from contextlib import ExitStack, suppress

import pytest
from prometheus_client import CollectorRegistry

from paceline_serving import metrics_endpoint, process
from paceline_serving.metrics_endpoint import MetricsEndpoint
from paceline_serving.telemetry import new_registry

NOTHING = CollectorRegistry()


@pytest.fixture
def endpoint():
    endpoint = MetricsEndpoint("127.0.0.1:0", registry=NOTHING, pages={"/page": lambda: {"a": 1}})
    yield endpoint
    endpoint.close()


def connect(endpoint: MetricsEndpoint) -> socket.socket:
    host, _, port = endpoint.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=90)


def ask(endpoint: MetricsEndpoint, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(endpoint.address, timeout=90)
    connection.request(method, path)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def ends(connection: socket.socket) -> bool:
    with suppress(ConnectionError):
        return connection.recv(100) == b""
    return True


def test_pages_are_answered_and_all_else_is_refused(endpoint):
    assert ask(endpoint, "/page?x=1") == (200, b'{"a": 1}')
    assert ask(endpoint, "/metrics") == (200, b"")
    assert ask(endpoint, "/other") == (404, b"")
    assert ask(endpoint, "/page", "POST") == (405, b"")


def test_silent_connections_take_no_threads_few_descriptors_and_keep_no_scraper_out(endpoint):
    before = threading.active_count()
    with ExitStack() as open_connections:
        silent = [open_connections.enter_context(connect(endpoint)) for _ in range(300)]
        assert ask(endpoint, "/page") == (200, b'{"a": 1}')
        assert threading.active_count() <= before
        assert all(ends(each) for each in silent[:-32])


def test_a_connection_that_says_nothing_ends(endpoint, monkeypatch):
    monkeypatch.setattr(metrics_endpoint, "_CONNECTION_SECONDS", 0.01)
    with connect(endpoint) as silent:
        assert ends(silent)


def test_a_connection_that_reads_nothing_ends(monkeypatch):
    monkeypatch.setattr(metrics_endpoint, "_CONNECTION_SECONDS", 0.3)
    large = {"/large": lambda: "x" * (64 << 20)}
    endpoint = MetricsEndpoint("127.0.0.1:0", registry=NOTHING, pages=large)
    with connect(endpoint) as stalled:
        stalled.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        received = len(stalled.recv(1))
        with connect(endpoint) as later:
            assert ends(later)  # its time began later, so the other one's is over, too
        with suppress(ConnectionError):
            while piece := stalled.recv(1 << 20):
                received += len(piece)
    endpoint.close()
    assert 0 < received < 64 << 20


def test_a_request_that_has_no_end_is_dropped(endpoint):
    with connect(endpoint) as endless, suppress(ConnectionError):
        endless.sendall(b"GET /" + b"x" * 100_000)
        assert ends(endless)


def test_a_page_that_fails_is_logged_and_the_next_one_answered(caplog):
    pages = {"/broken": lambda: 1 / 0, "/page": list}
    endpoint = MetricsEndpoint("127.0.0.1:0", registry=NOTHING, pages=pages)
    assert ask(endpoint, "/broken") == (500, b"")
    assert ask(endpoint, "/page") == (200, b"[]")
    endpoint.close()
    assert "/broken failed" in caplog.text


def test_a_closed_endpoint_does_not_listen_and_closes_again():
    endpoint = MetricsEndpoint("127.0.0.1:0", registry=NOTHING, pages={})
    with connect(endpoint) as open_connection:
        assert ask(endpoint, "/other") == (404, b"")  # so the one before has been accepted
        endpoint.close()
        assert ends(open_connection)
    with pytest.raises(ConnectionRefusedError):
        connect(endpoint)
    endpoint.close()


def test_a_port_that_is_taken_is_an_error(endpoint):
    port = int(endpoint.address.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):
        MetricsEndpoint(f"127.0.0.1:{port}", registry=NOTHING, pages={})


@pytest.mark.parametrize(
    "fails", ["events.new_event_loop", "selector_events.BaseSelectorEventLoop.add_reader"]
)
def test_an_endpoint_that_cannot_start_says_so_and_gives_its_port_back(fails, monkeypatch):
    def fail(*_, **__):
        raise OSError("too many open files")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    failures = []

    def start():
        try:
            MetricsEndpoint(f"127.0.0.1:{port}", registry=NOTHING, pages={})
        except OSError as failure:
            failures.append(str(failure))

    with monkeypatch.context() as broken:
        broken.setattr(f"asyncio.{fails}", fail)
        starting = threading.Thread(target=start, daemon=True)
        starting.start()
        starting.join(90)
    assert failures == ["too many open files"]
    MetricsEndpoint(f"127.0.0.1:{port}", registry=NOTHING, pages={}).close()


def test_descriptors_are_counted_and_as_many_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        process._allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        registry = new_registry()
        assert registry.get_sample_value("process_max_fds") == hard
        assert registry.get_sample_value("process_open_fds") > 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
