"""A process without file descriptors takes no connection, and takes them again when it has some."""

from __future__ import annotations

import socket
from contextlib import suppress

from support.processes import running
from support.system import simulated_model
from support.waiting import eventually

WHILE_SECONDS = 0.5


def test_a_process_without_descriptors_answers_nobody_new():
    server = simulated_model("target")
    with running(server):
        # What asked for its health hangs up about now, which leaves it a descriptor.
        eventually(lambda: answers_nobody(server), what="it has none")
        server.give_descriptors_back()
        eventually(lambda: server.page("/metrics"), what="it answers again")


def answers_nobody(server):
    server.take_descriptors()
    try:
        with asked(server) as line:
            return not line.recv(1)
    except OSError:
        return True


def asked(server):
    """Ask for the metrics, and give it little time to answer."""
    host, _, port = server.metrics_address.rpartition(":")
    line = socket.create_connection((host, int(port)), timeout=WHILE_SECONDS)
    with suppress(OSError):
        line.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    return line
