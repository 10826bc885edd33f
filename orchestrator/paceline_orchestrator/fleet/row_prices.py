"""What the rows of a server's forwards cost, beside a forward of one row."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class RowPrices:
    """What forwards cost by their rows, in forwards of one row. By default all cost the same.

    Attributes:
        points: Rows and cost, both ascending, from (1, 1.0) on. Between two of them costs lie on a
            line, beyond the last on the line through the first and the last.
        shares_forwards: Whether a forward computes all calls that wait. Elsewhere each has its own.
    """

    points: tuple[tuple[int, float], ...] = ((1, 1.0),)
    shares_forwards: bool = False

    @classmethod
    def measured(
        cls, table: tuple[tuple[int, int], ...], *, shares_forwards: bool = False
    ) -> RowPrices:
        """Read what a server says: median ns by rows, ascending.

        More rows never count as cheaper: where they were measured so, that is noise.
        """
        if not table or not table[0][1]:
            return cls(shares_forwards=shares_forwards)
        step_ns = table[0][1]
        costs = accumulate((median_ns / step_ns for _, median_ns in table), max)
        further = [(rows, cost) for (rows, _), cost in zip(table, costs, strict=True) if rows > 1]
        return cls(((1, 1.0), *further), shares_forwards)

    @property
    def are_measured(self) -> bool:
        """Whether anything is known of more rows than one."""
        return len(self.points) > 1

    def of(self, row_count: float) -> float:
        """Return what a forward of so many rows, 1 or more, costs."""
        points = self.points
        place = bisect_left(points, (row_count, 0.0))
        if place == 0:
            return 1.0
        if place == len(points):
            rows, cost = points[-1]
            slope = (cost - 1) / (rows - 1) if rows > 1 else 0.0
            return cost + slope * (row_count - rows)
        (fewer, less), (more, dearer) = points[place - 1], points[place]
        return less + (dearer - less) * (row_count - fewer) / (more - fewer)
