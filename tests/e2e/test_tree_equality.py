"""The promise with trees: the tokens of plain decoding, and corrections were found ahead."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product

import pytest

from paceline import Strategy
from support.cells import SAMPLINGS, TOKENS, Cell, Outcome, missing_evidence
from support.equality import check_rarity

WAYS = ((Strategy.SPECULATIVE, 1), (Strategy.DISTRIBUTED, 2), (Strategy.DISTRIBUTED, 3))
SHAPES = ((1, 0), *product((2, 4), (0, 4, 16)))
SHORT = [
    Cell(Strategy.SPECULATIVE, 4, 1, "greedy", 2, 16),
    Cell(Strategy.DISTRIBUTED, 4, 3, "temperature 1, top-p 0.9", 4, 4),
]


def cells():
    """All: the full form. A third of them is the long one: every two of its parts meet."""
    for (row, way), (column, sampling), (place, shape) in product(
        enumerate(WAYS), enumerate(SAMPLINGS), enumerate(SHAPES)
    ):
        strategy, target_count = way
        cell = Cell(strategy, 4, target_count, sampling, *shape)
        is_long = (row + column + place) % 3 == 0
        mark = pytest.mark.long if is_long else pytest.mark.full
        yield pytest.param(cell, marks=[] if cell in SHORT else mark)


FEW_PROMPTS, ROUNDS = 4, 4


@pytest.mark.parametrize(
    "cell", list(cells()), ids=lambda cell: "-".join(map(str, asdict(cell).values()))
)
def test_with_trees_too_the_tokens_are_those_of_plain_decoding(cell, proof, prompts):
    outcome = Outcome()
    # What trees find depends on timing: on a busy machine more prompts may be needed.
    for start in range(0, ROUNDS * FEW_PROMPTS, FEW_PROMPTS):
        proof.run(cell, prompts[start : start + FEW_PROMPTS], outcome)
        if not missing_evidence(cell, outcome):
            break
    assert not missing_evidence(cell, outcome), outcome
    assert outcome.positions >= FEW_PROMPTS * TOKENS
    check_rarity(outcome.near_ties, position_count=outcome.positions)
