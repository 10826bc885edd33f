"""The faults of a run of chaos: how each begins, how it ends, and whether it hit something."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import grpc

from paceline.errors import LoadingError, OverloadedError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from support.links import Link

    _Act: TypeAlias = Callable[[Link, random.Random], object]

__all__ = ["MODEL_FAULTS", "ORCHESTRATOR_FAULTS", "Fault", "is_working", "lift"]

_CALLS = ("Verify", "Decode", "Draft")
_WORK = (*_CALLS, "Generate")
_FAILURES = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    OverloadedError("by chance", retry_after_seconds=0.5),
    LoadingError("by chance", retry_after_seconds=0.5),
)
_ASKED_SECONDS = 0.5


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: In the history.
        begin: Does it to a server, or to the way to it; may block.
        has_hit: Whether that met something, asked when it has lasted; by default the relays say.
    """

    name: str
    begin: _Act
    has_hit: Callable[[Link], bool] = lambda link: False


def is_working(link: Link) -> bool:
    """Whether a fault there would be noticed: a call runs."""
    return any(link.calls.running[method] for method in _WORK)


def lift(link: Link) -> None:
    """End whatever was done to a server, and wait until it serves."""
    link.heal()
    link.server.revive()


def _answers_nobody_new(link: Link) -> bool:
    """Ask for a page as anyone may who was not connected before."""
    host, _, port = link.server.metrics_address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _ASKED_SECONDS) as line:
            line.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            return not line.recv(1)
    except OSError:
        return True


def _surely(link: Link) -> bool:
    """A process that has calls when it is killed or stopped does not go on with them."""
    del link
    return True


_PROCESS_FAULTS = (
    Fault("kill", lambda link, _: link.server.kill(), _surely),
    Fault("stop", lambda link, _: link.server.freeze(), _surely),
    Fault("descriptors", lambda link, _: link.server.take_descriptors(), _answers_nobody_new),
)
_CONNECTION_FAULTS = (
    Fault(
        "delay", lambda it, lots: it.connections.delay(round_trip_seconds=lots.uniform(0.02, 0.3))
    ),
    Fault("stall", lambda link, _: link.connections.stall()),
    Fault("half open up", lambda link, _: link.connections.stall("up")),
    Fault("half open down", lambda link, _: link.connections.stall("down")),
    Fault("cut", lambda link, lots: link.connections.cut(lots.choice(("up", "down")))),
    Fault("reset", lambda link, _: link.connections.reset()),
    Fault("black hole", lambda link, _: link.connections.black_hole()),
)
MODEL_FAULTS = (
    *_PROCESS_FAULTS,
    *_CONNECTION_FAULTS,
    Fault("hang", lambda link, _: link.calls.hang(*_CALLS)),
    Fault("hang at opening", lambda link, _: link.calls.hang("OpenSession")),
    Fault(
        "slow",
        lambda it, lots: it.calls.delay(*_CALLS, seconds=lots.uniform(0.01, 0.3)),
    ),
    Fault(
        "fail",
        lambda link, lots: link.calls.fail(*_CALLS, how=lots.choice(_FAILURES)),
    ),
)
# A client has no deadline for a call of the orchestrator but its request's: what hangs there is the
# client's to give up.
ORCHESTRATOR_FAULTS = (*_PROCESS_FAULTS, *_CONNECTION_FAULTS)
