"""What a proxy tells an orchestrator of its own clients, so that they take turns in its queue.

A lane divides its sender's share and is worth nothing beyond it, so nobody has to be trusted.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["HEADER", "lane_in", "lane_name"]

HEADER = "paceline-lane"

_DIGITS = 16


def lane_name(identity: str) -> str:
    """Return what a client is called: a digest, and no name in clear."""
    return hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS]


def lane_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the lane that a call's metadata names; empty if there is none."""
    found = dict(metadata or ()).get(HEADER, "")
    return found[:_DIGITS] if isinstance(found, str) else ""
