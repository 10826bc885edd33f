"""Table 1 of the Cascade Speculative Drafting paper (arXiv 2312.11462): expected gains, by formula.

Its acceptances are Leviathan et al.'s at temperature 0 (arXiv 2211.17192, table 2). Its costs are
not printed. Of all pairs these, the ratios of parameter counts (about 77M and 248M over 11.2B), are
what gives all six numbers; the paper's code has others, and they do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_engine.stack_backend.ewif import chain_factor


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter on a data set.

    Attributes:
        cost: Of its forward, in the target's.
    """

    name: str
    acceptance: float
    cost: float


@dataclass(frozen=True, slots=True)
class EwifRow:
    """A row of the table.

    Attributes:
        stages: Who drafts, first tokens first, and how many.
        paper: As printed.
        ours: As many digits.
        reversed_order: What the stages give the other way round; as good with one stage.
    """

    data: str
    stages: tuple[tuple[Drafter, int], ...]
    paper: str
    ours: str
    reversed_order: str


_NEWS_SMALL, _NEWS_BASE = Drafter("small", 0.65, 0.0069), Drafter("base", 0.73, 0.022)
_GERMAN_SMALL, _GERMAN_BASE = Drafter("small", 0.75, 0.0069), Drafter("base", 0.80, 0.022)
_TABLE = (
    ("CNNDM", ((_NEWS_SMALL, 9),), "2.65"),
    ("CNNDM", ((_NEWS_BASE, 8),), "2.96"),
    ("CNNDM", ((_NEWS_BASE, 5), (_NEWS_SMALL, 3)), "3.03"),
    ("EnDe", ((_GERMAN_SMALL, 12),), "3.61"),
    ("EnDe", ((_GERMAN_BASE, 11),), "3.75"),
    ("EnDe", ((_GERMAN_BASE, 5), (_GERMAN_SMALL, 8)), "3.93"),
)


def ewif_table() -> list[EwifRow]:
    """Compute the table."""
    return [
        EwifRow(
            data, stages, paper=paper, ours=_factor(stages), reversed_order=_factor(stages[::-1])
        )
        for data, stages, paper in _TABLE
    ]


def _factor(stages: tuple[tuple[Drafter, int], ...]) -> str:
    drafters = [drafter for drafter, count in stages for _ in range(count)]
    factor = chain_factor(
        [drafter.acceptance for drafter in drafters], costs=[drafter.cost for drafter in drafters]
    )
    return f"{factor:.2f}"
