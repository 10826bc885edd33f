"""Whether balancers shall send work here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline_gateway.orchestrators import Orchestrators


class Readiness:
    """Follows the orchestrators, and the process that leaves.

    Attributes:
        is_leaving: Whether balancers shall look elsewhere, though requests are still served.
    """

    def __init__(self, orchestrators: Orchestrators) -> None:
        self._orchestrators = orchestrators
        self.is_leaving = False

    @property
    def why_not(self) -> str | None:
        """Why balancers shall send no work here; None if they shall."""
        if self.is_leaving:
            return "this gateway is shutting down"
        if self._orchestrators.any_serves:
            return None
        if self._orchestrators.any_refuses:
            return "orchestrators refuse this gateway's own key or certificate"
        return "no orchestrator serves"
