"""What this process can dispatch: its event loop has one core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_contract.limits import MOST_LOOKAHEAD

if TYPE_CHECKING:
    from paceline_orchestrator.planning.measurements import Measurements

# Dispatching may take this part of the time of the event loop, which has one core: one of so many.
# Beyond, answers begin to wait for one another, and a rejection for its restart.
_DISPATCH_PARTS = 2


def affordable_lookahead(measurements: Measurements) -> int:
    """Return the smallest lookahead of DSI whose verifications this process can dispatch.

    However many requests there are, they verify what the drafters draft: one block of lookahead
    tokens after the other. A drafter that shares forwards drafts for all of them at the same time.
    """
    drafters = measurements.request_count
    if not measurements.drafter_prices.shares_forwards:
        drafters = min(measurements.drafter_count, drafters)
    dispatching_ns = _DISPATCH_PARTS * drafters * measurements.dispatch_ns
    return min(max(1, -(-dispatching_ns // measurements.drafter_step_ns)), MOST_LOOKAHEAD)


def affordable_targets(measurements: Measurements) -> int:
    """Return how many targets of each request this process can give one verification after another.

    It is what `affordable_lookahead` is where drafts are there at once.
    """
    dispatching_ns = _DISPATCH_PARTS * measurements.request_count * measurements.dispatch_ns
    return measurements.verification_ns // max(1, dispatching_ns)
