"""The faults of a run of chaos: how each begins, how it ends, and whether it hit something."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import grpc
from google.protobuf.message_factory import GetMessageClass

from paceline.errors import LoadingError, OverloadedError
from paceline.v1.drafter_service_pb2 import DraftResponse
from support.lies.list_of_lies import ANSWERS, field_lies, is_believed_of_targets

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from support.links import Link

    _Act: TypeAlias = Callable[[Link, random.Random], object]

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
_SILENT_CONNECTIONS = 200
# What is about a token in the vocabulary only its target can know: nobody can see that it is wrong.
_LIES = {
    method: [
        lie for lie in field_lies() if lie.method == method and not is_believed_of_targets(lie.path)
    ]
    for method in _CALLS
}
# An answer of another method, of a broken server, of none.
_NO_ANSWERS = (b"", b"\xff\xff\xff\xff", b"\x0a\x7f\x01")


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
    """What is done to a process that has calls, it meets."""
    del link
    return True


def _lie(link: Link, lots: random.Random) -> None:
    """Have one field of each answer wrong, or each answer another one."""
    for method in _CALLS:
        link.calls.change(method, how=lots.choice(_ways_to_lie(method, lots)))


def _ways_to_lie(method: str, lots: random.Random) -> Sequence[Callable[[bytes], bytes]]:
    lie, nothing = lots.choice(_LIES[method]), lots.choice(_NO_ANSWERS)
    answer_class = GetMessageClass(ANSWERS[method])

    def distorted(answer: bytes) -> bytes:
        return lie.distort(answer_class.FromString(answer))

    return distorted, lambda _: nothing


def _draft_wrongly(link: Link, lots: random.Random) -> None:
    """Have each draft token another one of the vocabulary."""
    added = lots.randrange(1, 256)

    def wrong(answer: bytes) -> bytes:
        drafted = DraftResponse.FromString(answer)
        ids = [256 + (it + added) % 256 for it in drafted.proposal.token_ids]
        drafted.proposal.token_ids[:] = ids
        return drafted.SerializeToString()

    link.calls.change("Draft", how=wrong)


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
    Fault("lie", _lie),
    Fault("draft wrongly", _draft_wrongly),
)
# A client has no deadline for a call of the orchestrator but its request's: what hangs there is the
# client's to give up.
ORCHESTRATOR_FAULTS = (
    *_PROCESS_FAULTS,
    *_CONNECTION_FAULTS,
    Fault(
        "silent connections",
        lambda link, _: link.open_silent_connections(_SILENT_CONNECTIONS),
        _surely,
    ),
)
