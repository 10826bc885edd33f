"""Servers that discovery has lost sight of, all at once, while they say that they are well.

A cluster calls a pod not ready when its node no longer reports, and takes it out of DNS; a slice or
a Service can be deleted by mistake. None of that stops a server. Where some are left, they do;
where none is, believing it would end the whole service for a fault of its surroundings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from paceline_orchestrator.fleet.discovery.endpoints import Availability

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline_orchestrator.fleet.discovery.endpoints import Endpoint

_Key = TypeVar("_Key")


def out_of_sight(
    listed: Mapping[_Key, Endpoint], *, well: Mapping[_Key, Endpoint]
) -> dict[_Key, Endpoint]:
    """Return the endpoints to go on using as READY, of roles of which nothing listed is READY.

    What is or was last TERMINATING is none of them: that is a decision, and no loss of sight.

    Args:
        listed: What discovery says now.
        well: What it said last of those servers whose own health says that they are well.
    """
    seen = {it.role for it in listed.values() if it.availability is Availability.READY}
    return {
        key: replace(listed.get(key, last), availability=Availability.READY)
        for key, last in well.items()
        if last.role not in seen
        and listed.get(key, last).availability is not Availability.TERMINATING
    }
