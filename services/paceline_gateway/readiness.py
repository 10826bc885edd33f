"""Readiness: whether balancers should send requests here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline_gateway.fleet.orchestrators import Orchestrators


class Readiness:
    """Follows the orchestrators, and the end of this process.

    Attributes:
        is_leaving: Whether this process is ending, though it still serves requests.
    """

    def __init__(self, orchestrators: Orchestrators) -> None:
        self._orchestrators = orchestrators
        self.is_leaving = False

    @property
    def why_not(self) -> str | None:
        """The reason why balancers should send no requests here; None if they should."""
        if self.is_leaving:
            return "this gateway is shutting down"
        if self._orchestrators.any_serves:
            return None
        if self._orchestrators.any_refuses:
            return "orchestrators refuse this gateway's own key or certificate"
        return "no orchestrator serves"
