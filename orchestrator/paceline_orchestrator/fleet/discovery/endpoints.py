"""What is found: endpoints, and the interface of whatever finds them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Role(StrEnum):
    """What a server is for."""

    DRAFTER = "drafter"
    ORCHESTRATOR = "orchestrator"
    TARGET = "target"


MODEL_ROLES = (Role.DRAFTER, Role.TARGET)
"""Of servers that compute."""


class Availability(Enum):
    """What an endpoint may be used for, as far as discovery knows.

    READY: everything. NOT_READY: nothing new; what it has may stay. TERMINATING: nothing new, and
    what it has shall move elsewhere while it still serves.
    """

    READY = auto()
    NOT_READY = auto()
    TERMINATING = auto()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server.

    Attributes:
        name: Its name in timelines and logs.
        address: Its gRPC address.
        role: What it is for.
        uid: What it stays known by while everything else changes; empty: its address.
        tls_name: The name that its certificate is for; empty: its address.
        availability: What it may be used for.
    """

    name: str
    address: str
    role: Role
    uid: str = ""
    tls_name: str = ""
    availability: Availability = Availability.READY

    @property
    def key(self) -> tuple[Role, str]:
        """Who it is: two endpoints with one key are the same server at different times."""
        return self.role, self.uid or self.address


class Discovery(Protocol):
    """Whatever knows the endpoints: a static list, DNS, a watch on a cluster."""

    def endpoints(self) -> AsyncIterator[frozenset[Endpoint]]:
        """Yield all endpoints at once, then again whenever they change; never ends by itself.

        No failure ends it either: while nobody answers, the last set stands.
        """
