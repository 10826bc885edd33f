"""How a server stands with an orchestrator, in words for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline import ServerInfo


def state_of(server: ServerInfo) -> str:
    """Say in a word or two how it stands; in an older orchestrator's words, where it is older."""
    if server.standing:
        return server.standing.replace("_", " ")
    return "ready" if server.ready else server.status or "not ready"


def sentence_on(server: ServerInfo) -> str:
    """Say in a sentence what there is to say beyond the word; empty if there is nothing."""
    if not server.standing_detail:
        return ""
    words = f"is {state_of(server)}" if server.ready else "is not used"
    return f"{server.name} {words}: {server.standing_detail}"
