"""Equation 1 of the DSI paper: with how many targets verifications never wait for one.

ceil(target latency / (lookahead * drafter latency)) <= targets
"""

from __future__ import annotations

from paceline_contract.limits import MOST_LOOKAHEAD

LOOKAHEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MOST_LOOKAHEAD)
"""What DSI is simulated with; a finer choice changes little."""


def needed_target_count(target_ns: int, drafter_ns: int, *, lookahead: int) -> int:
    """Return how many targets keep verifications from waiting (Equation 1)."""
    return _ceil_div(target_ns, lookahead * drafter_ns)


def smallest_lookahead(target_ns: int, drafter_ns: int, *, target_count: int) -> int:
    """Return the smallest lookahead with which Equation 1 holds."""
    return max(1, _ceil_div(target_ns, target_count * drafter_ns))


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
