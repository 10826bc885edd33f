"""A grid of drafter latency and acceptance rate, online: is DSI ever slower than the others?"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline import Strategy
from paceline_bench.simulated_servers import SimulatedServers
from paceline_bench.table2.online import PLAIN, PLANNED, Variant, is_identical
from paceline_protocol.laboratory.simulation import ServerLatency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_bench.report import Row
    from paceline_bench.table2.online import OnlineSystem, Run

_TARGET_NS = 30_000_000
_FASTEST_DRAFTER = 0.05  # of the target's latency
_SI_LOOKAHEADS = range(1, 21)
MOST_SLOWER = 1.02


@dataclass(frozen=True, slots=True)
class GridCell:
    """Simulated servers of the grid.

    Attributes:
        drafter: The drafter's latency over the target's.
        acceptance_rate: In [0, 1].
    """

    drafter: float
    acceptance_rate: float

    def servers(self, *, target_count: int) -> SimulatedServers:
        """Make it; first forwards take no longer than others."""
        drafter_ns = round(self.drafter * _TARGET_NS)
        return SimulatedServers(
            target=ServerLatency(_TARGET_NS, _TARGET_NS),
            drafter=ServerLatency(drafter_ns, drafter_ns),
            acceptance_rate=self.acceptance_rate,
            target_count=target_count,
        )

    @property
    def name(self) -> str:
        """Its place."""
        return f"drafter {self.drafter:g}, acceptance {self.acceptance_rate:g}"

    @property
    def variants(self) -> tuple[Variant, Variant, Variant]:
        """Non-SI, SI with the lookahead that is best in expectation, and DSI as planned."""
        return PLAIN, Variant(Strategy.SPECULATIVE, self._best_si_lookahead), PLANNED

    @property
    def _best_si_lookahead(self) -> int:
        """A round takes the drafts and a forward, and yields 1 + a + ... + a^lookahead tokens."""
        return min(
            _SI_LOOKAHEADS,
            key=lambda lookahead: (
                (1 + lookahead * self.drafter)
                / sum(self.acceptance_rate**accepted for accepted in range(lookahead + 1))
            ),
        )


def grid_cells(size: int) -> list[GridCell]:
    """Lay out the grid: latencies from 1/20 of the target's to all of it, acceptance from 0 to 1.

    Args:
        size: Latencies and acceptance rates there are, each; 2 or more.
    """
    steps = [index / (size - 1) for index in range(size)]
    return [
        GridCell(round(_FASTEST_DRAFTER ** (1 - step), 3), rate) for rate in steps for step in steps
    ]


async def measure_cell(system: OnlineSystem, cell: GridCell, *, repeats: int) -> list[Row]:
    """Time the three strategies on a cell's servers, in turn, and describe each."""
    by_variant = await system.alternate(cell.variants, repeats=repeats, on_repeat=lambda _: None)
    return describe_cell(cell, *(by_variant[variant] for variant in cell.variants))


def describe_cell(
    cell: GridCell, plain: Sequence[Run], speculative: Sequence[Run], planned: Sequence[Run]
) -> list[Row]:
    """Return a row for each strategy; there are no ratios where an output differs."""
    identical = is_identical([*speculative, *planned], plain)
    restless_runs = sum(not run.began_quietly for run in (*plain, *speculative, *planned))
    rows: list[Row] = [
        {
            "name": cell.name,
            "drafter": cell.drafter,
            "acceptance_rate": cell.acceptance_rate,
            "strategy": variant.strategy_name,
            "lookaheads": tuple(sorted({run.plan.lookahead for run in runs})),
            "median_ms": statistics.median(_milliseconds(runs)),
            "times_ms": _milliseconds(runs),
            "restless_runs": restless_runs,
            "identical": identical,
        }
        for variant, runs in zip(cell.variants, (plain, speculative, planned), strict=True)
    ]
    if identical:
        rows[-1]["over_better"] = max(_over(planned, others) for others in (plain, speculative))
    return rows


def _milliseconds(runs: Sequence[Run]) -> tuple[float, ...]:
    return tuple(run.elapsed_ns / 1e6 for run in runs)


def _over(runs: Sequence[Run], others: Sequence[Run]) -> float:
    """Return one's time over the other's: the median over the prompts."""
    pairs = zip(runs, others, strict=True)
    return statistics.median(run.elapsed_ns / other.elapsed_ns for run, other in pairs)
