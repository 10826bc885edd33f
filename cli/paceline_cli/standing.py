"""A server's standing with an orchestrator, in words for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline import ServerInfo


def state_of(server: ServerInfo) -> str:
    """Return the standing in a word or two; for an older orchestrator, in its words."""
    if server.standing:
        return server.standing.replace("_", " ")
    return "ready" if server.ready else server.status or "not ready"


def sentence_on(server: ServerInfo) -> str:
    """Return a sentence with the details of the standing; empty if there are none."""
    if not server.standing_detail:
        return ""
    words = f"is {state_of(server)}" if server.ready else "is not used"
    return f"{server.name} {words}: {server.standing_detail}"
