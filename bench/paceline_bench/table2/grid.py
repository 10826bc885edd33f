"""A grid of drafter latency and acceptance rate, online: is DSI ever slower than the others?"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline import Strategy
from paceline_bench.node import SimulatedNode
from paceline_bench.table2.online import PLAIN, PLANNED, Way, is_identical
from paceline_protocol.simulation import ServerLatency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_bench.table2.online import OnlineSystem, Run

__all__ = ["MOST_SLOWER", "GridCell", "grid_cells", "grid_json", "measure_cell"]

_TARGET_NS = 30_000_000
_FASTEST_DRAFTER = 0.05  # of the target's latency
_SI_LOOKAHEADS = range(1, 21)
MOST_SLOWER = 1.02


@dataclass(frozen=True, slots=True)
class GridCell:
    """A node of the grid.

    Attributes:
        drafter: The drafter's latency over the target's.
        acceptance_rate: In [0, 1].
    """

    drafter: float
    acceptance_rate: float

    def node(self, *, target_count: int) -> SimulatedNode:
        """Make it; first forwards take no longer than others."""
        drafter_ns = round(self.drafter * _TARGET_NS)
        return SimulatedNode(
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
    def ways(self) -> tuple[Way, Way, Way]:
        """Non-SI, SI with the lookahead that is best in expectation, and DSI as planned."""
        return PLAIN, Way(Strategy.SPECULATIVE, self._best_si_lookahead), PLANNED

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


@dataclass(frozen=True, slots=True)
class CellResult:
    """What was measured on a node of the grid.

    Attributes:
        cell: The node.
        plain: Non-SI's times in ms, one for each prompt.
        speculative: SI's.
        planned: DSI's, as the planner chose.
        si_lookahead: SI's lookahead.
        dsi_lookaheads: DSI's, ascending: several if the planner changed its mind.
        restless_runs: Runs that began while the orchestrator still computed behind an earlier one.
        identical: Whether every output was plain decoding's.
    """

    cell: GridCell
    plain: tuple[float, ...]
    speculative: tuple[float, ...]
    planned: tuple[float, ...]
    si_lookahead: int
    dsi_lookaheads: tuple[int, ...]
    restless_runs: int
    identical: bool

    def __str__(self) -> str:
        return f"{self.cell.name}: {self.over_better:.3f} of the better of SI and non-SI"

    @property
    def over_better(self) -> float:
        """DSI's time over that of the better of SI and non-SI: the median over the prompts."""
        return max(_over(self.planned, other) for other in (self.plain, self.speculative))


def grid_cells(size: int) -> list[GridCell]:
    """Lay out the grid: latencies from 1/20 of the target's to all of it, acceptance from 0 to 1.

    Args:
        size: Latencies and acceptance rates there are, each; 2 or more.
    """
    steps = [index / (size - 1) for index in range(size)]
    return [
        GridCell(round(_FASTEST_DRAFTER ** (1 - step), 3), rate) for rate in steps for step in steps
    ]


async def measure_cell(system: OnlineSystem, cell: GridCell, *, repeats: int) -> CellResult:
    """Time the three strategies on a cell's node, in turn."""
    by_way = await system.alternate(cell.ways, repeats=repeats, on_repeat=lambda _: None)
    plain, speculative, planned = (by_way[way] for way in cell.ways)
    return CellResult(
        cell=cell,
        plain=_milliseconds(plain),
        speculative=_milliseconds(speculative),
        planned=_milliseconds(planned),
        si_lookahead=speculative[0].plan.lookahead,
        dsi_lookaheads=tuple(sorted({run.plan.lookahead for run in planned})),
        restless_runs=sum(not run.began_quietly for run in (*plain, *speculative, *planned)),
        identical=is_identical([*speculative, *planned], plain),
    )


def grid_json(result: CellResult) -> list[dict[str, Any]]:
    """Describe a cell's strategies."""
    strategies = (
        ("non-SI", result.plain, (0,)),
        ("SI", result.speculative, (result.si_lookahead,)),
        ("DSI", result.planned, result.dsi_lookaheads),
    )
    return [
        {
            "name": result.cell.name,
            "drafter": result.cell.drafter,
            "acceptance_rate": result.cell.acceptance_rate,
            "strategy": strategy,
            "lookaheads": lookaheads,
            "median_ms": statistics.median(times),
            "times_ms": times,
            "restless_runs": result.restless_runs,
            "identical": result.identical,
        }
        | ({"over_better": result.over_better} if strategy == "DSI" and result.identical else {})
        for strategy, times, lookaheads in strategies
    ]


def _milliseconds(runs: Sequence[Run]) -> tuple[float, ...]:
    return tuple(run.elapsed_ns / 1e6 for run in runs)


def _over(times: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(time / other for time, other in zip(times, others, strict=True))
