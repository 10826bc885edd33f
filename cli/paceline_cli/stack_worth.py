"""The gain of each stage of a drafter's stack, from its server's measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.table import times
from paceline_engine.deciding.cascade import MAX_GRAM
from paceline_engine.scheduling.latencies import LatencyMeter
from paceline_engine.stack_backend.ewif import best_rate
from paceline_local.screen import safe, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from paceline.v1.model_service_pb2 import Stage

_HEADINGS = ("stage", "ms per forward", "accepted by", "drafting with it")


class ToldStack:
    """The numbers of a stack, or of some of its stages, as its server reports them.

    `paceline_engine.stack_backend.ewif` chooses a matrix by them: `StackNumbers`.
    """

    def __init__(self, stages: Sequence[Stage], *, places: Sequence[int] | None = None) -> None:
        """Read the reported stages.

        Args:
            stages: All stages, largest first.
            places: The places of the stages that count; None: all.
        """
        self._stages = stages
        self._places = range(len(stages)) if places is None else places
        self._meters = [_meter(stage) for stage in stages]

    @property
    def stage_count(self) -> int:
        """Number of stages."""
        return len(self._places)

    @property
    def model_count(self) -> int:
        """Number of stages that are models."""
        return sum(self._stages[place].model_name != MAX_GRAM for place in self._places)

    def cost_ns(self, stage: int, row_count: int) -> float:
        """Return the time of a model's forward."""
        return self._meters[self._places[stage]].cost_ns(row_count)

    def acceptance(self, reviewer: int, drafter: int) -> float:
        """Return how often a stage accepted another one's token; 0 where none was judged."""
        return self.judged(self._places[reviewer], self._places[drafter]) or 0.0

    def judged(self, reviewer: int, drafter: int) -> float | None:
        """Return the same by places in the whole stack; None where none was judged."""
        verdicts = self._stages[reviewer].verdicts[drafter - reviewer - 1]
        if not verdicts.judged_count:
            return None
        return verdicts.accepted_count / verdicts.judged_count

    def worth(self, place: int) -> float | None:
        """Return the largest model's drafting speed with a stage, relative to without it.

        Each time with the best matrix by the formulas. None until every model has run.
        """
        if not all(self.cost_ns(stage, 1) for stage in range(self.model_count)):
            return None
        others = [each for each in self._places if each != place]
        return best_rate(self) / best_rate(ToldStack(self._stages, places=others))


def stack_table(stages: Sequence[Stage]) -> Table:
    """Make a table of a stack's stages: costs, acceptance of each pair, and each stage's gain."""
    stack = ToldStack(stages)
    rows = [
        (
            safe(stage.model_name),
            f"{stack.cost_ns(place, 1) / 1e6:.2f}" if stage.forward_latencies else "-",
            ", ".join(_accepted(stack, stages, place)) or "-",
            times(stack.worth(place) if place else None),
        )
        for place, stage in enumerate(stages)
    ]
    return table(_HEADINGS, rows)


def _accepted(stack: ToldStack, stages: Sequence[Stage], drafter: int) -> Sequence[str]:
    said = [(stages[reviewer], stack.judged(reviewer, drafter)) for reviewer in range(drafter)]
    return [
        f"{safe(stage.model_name)} {'never judged' if rate is None else format(rate, '.0%')}"
        for stage, rate in said
    ]


def _meter(stage: Stage) -> LatencyMeter:
    meter = LatencyMeter()
    for forward in stage.forward_latencies:
        meter.record(forward.rows, forward.median_ns)
    return meter
