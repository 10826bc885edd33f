"""Table 1 of the DSI paper: an exact check, in fractions, that the protocol is the paper's."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from paceline_bench.protocol_runs import Setup, run_protocol
from paceline_protocol.laboratory.simulation import ServerLatency
from paceline_protocol.methods import Strategy
from paceline_protocol.task import DispatchPolicy

# In target forwards.
MOMENTS = (Fraction(2), Fraction(32, 7), Fraction(8), Fraction(64, 7))
_TARGET = ServerLatency(Fraction(1), Fraction(1))
_DRAFTER = ServerLatency(Fraction(1, 7), Fraction(1, 7))
_TARGET_COUNT = 7
_TOKENS = 80  # more than any of them finishes by the last moment

_PAPER = (
    ("non-SI", Strategy.AUTOREGRESSIVE, 0, (2, 4, 8, 9)),
    ("SI, every draft token wrong", Strategy.SPECULATIVE, 0, (1, 4, 7, 8)),
    ("SI, every draft token right", Strategy.SPECULATIVE, 1, (2, 8, 14, 16)),
    ("DSI, every draft token wrong", Strategy.DISTRIBUTED, 0, (2, 4, 8, 9)),
    ("DSI, every draft token right", Strategy.DISTRIBUTED, 1, (8, 26, 50, 58)),
)


@dataclass(frozen=True, slots=True)
class TableRow:
    """Tokens that are final by each moment.

    Attributes:
        name: Strategy and case.
        ours: By the protocol on the virtual clock.
        paper: By the paper.
    """

    name: str
    ours: tuple[int, ...]
    paper: tuple[int, ...]


def table1() -> list[TableRow]:
    """Run the protocol: lookahead 1, a drafter at 1/7 of the target's latency, 7 targets."""
    rows = []
    for name, strategy, acceptance_rate, paper in _PAPER:
        setup = Setup(
            strategy,
            _TARGET,
            _DRAFTER,
            target_count=_TARGET_COUNT,
            dispatch=DispatchPolicy.BLOCKS,
        )
        result = run_protocol(setup, acceptance_rate=acceptance_rate, max_tokens=_TOKENS)
        counts = (sum(time <= moment for time in result.token_times) for moment in MOMENTS)
        rows.append(TableRow(name, tuple(counts), paper))
    return rows
