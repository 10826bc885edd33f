"""Whose turn it is at a model that several shares want."""

from __future__ import annotations


class Turns:
    """Start-time fair queueing of one server among shares of equal weight.

    Goyal, Vin and Cheng 1996, "Start-time fair queueing". Each share has a virtual clock that its
    own service moves on; whose clock is behind is served first. A share that comes, or comes back,
    starts at the clock of whoever is being served: nobody saves up turns.

    Difference: a forward's length is known only at its end, and charged then; so a share's next
    turn is known when its forward ends, which is before it can be served again.

    Invariants:
        Of shares that all want service, two never differ by more service than one forward of each
        (tests/unit/engine/test_turns.py).
    """

    def __init__(self) -> None:
        self._now = 0
        self._clocks: dict[str, int] = {}

    def of(self, share: str) -> int:
        """Return a share's place: the smallest is served next."""
        return max(self._now, self._clocks.get(share, 0))

    def begin(self, share: str) -> None:
        """Serve a share: its clock is the time now."""
        self._now = self.of(share)
        self._clocks = {each: at for each, at in self._clocks.items() if at > self._now}

    def charge(self, share: str, service: int) -> None:
        """Move a share's clock on by the service that it had, in ns or any other unit."""
        self._clocks[share] = self.of(share) + service

    def rest(self) -> None:
        """Nobody waits: who comes next starts anew, whatever it had before."""
        self._clocks.clear()
