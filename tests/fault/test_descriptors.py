"""A process without file descriptors takes no call, and takes them again when it has some.

Its metrics are answered all the same: they tell what is missing.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from support.processes import running
from support.system import simulated_model
from support.waiting import eventually

WHILE_SECONDS = 0.5
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


def test_a_process_without_descriptors_answers_nobody_new_but_tells_its_metrics():
    server = simulated_model("target")
    with running(server):
        # What asked for its health hangs up about now, which leaves it a descriptor.
        eventually(lambda: answers_nobody(server), what="it has none")
        for _ in range(10):
            page = server.page("/metrics")
            assert "process_open_fds" in page
        server.give_descriptors_back()
        eventually(lambda: answers(server), what="it answers again")


def answers_nobody(server):
    server.take_descriptors()
    return not answers(server)


def answers(server):
    """Greet it, and give it little time to greet back."""
    host, _, port = server.address.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), WHILE_SECONDS) as line:
        line.sendall(PREFACE)
        return bool(line.recv(1))
    return False
