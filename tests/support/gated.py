"""A model whose forwards wait at a gate, for as long as a test wants."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.simulated import SimulatedBackend, SimulatedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_engine.model_backend import Feed
    from paceline_engine.terms.backend import Interrupt

_LONGEST_WAIT_SECONDS = 120.0


class Gate:
    """Lets through as many forwards as it is told, the first ones to come."""

    def __init__(self) -> None:
        self._left: float = 0
        self._changed = threading.Condition()

    def let_pass(self, count: float) -> None:
        """Let so many through from now on, whatever was said before."""
        with self._changed:
            self._left = count
            self._changed.notify_all()

    def open(self) -> None:
        """Let all through."""
        self.let_pass(math.inf)

    def shut(self) -> None:
        """Let none through."""
        self.let_pass(0)

    def enter(self) -> None:
        """Wait for a turn; on the model's thread."""
        with self._changed:
            waited = self._changed.wait_for(lambda: self._left > 0, _LONGEST_WAIT_SECONDS)
            assert waited, "nobody opened the gate"
            self._left -= 1


def gated_host(gate: Gate, *, clock: Callable[[], float] | None = None) -> ModelHost:
    """Return a host of a model whose forwards take no time beyond the gate.

    Args:
        gate: What each forward waits at.
        clock: What measures leases, if that is not the time.
    """
    model = SimulatedModel(ttft_seconds=0, tpot_seconds=0)
    limits = HostLimits(warm_up_rounds=0)
    clocks = {} if clock is None else {"clock": clock}
    return ModelHost(lambda: _Backend(model, gate), limits=limits, **clocks)


class _Backend(SimulatedBackend):
    def __init__(self, model: SimulatedModel, gate: Gate) -> None:
        super().__init__(model)
        self._gate = gate

    def _forward(self, feeds: Sequence[Feed], interrupt: Interrupt) -> list[Sequence[int]]:
        self._gate.enter()
        return super()._forward(feeds, interrupt)
