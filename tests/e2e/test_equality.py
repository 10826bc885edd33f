"""The promise: the tokens of plain decoding, whatever the strategy; and the strategy happened."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest

from paceline import Strategy
from support.cells import SAMPLINGS, TOKENS, Cell, Outcome, missing_evidence
from support.equality import NEAR_TIE, NearTie, check_rarity, compare

RESULTS = Path(__file__).parents[2] / "bench" / "results"
CELLS = [
    Cell(strategy, lookahead, target_count, sampling)
    for strategy, lookahead, target_count, sampling in product(
        (Strategy.SPECULATIVE, Strategy.DISTRIBUTED), (1, 2, 5, 10), (1, 2, 3), SAMPLINGS
    )
]


def some(si_lookaheads, dsi_lookaheads, *, shift):
    """So few that every target count meets all lookaheads; in SI one target has work."""
    samplings = tuple(SAMPLINGS)
    return [
        *(Cell(Strategy.SPECULATIVE, it, 3, each) for it in si_lookaheads for each in samplings),
        *(
            Cell(Strategy.DISTRIBUTED, lookahead, count, samplings[(row + column + shift) % 3])
            for row, lookahead in enumerate(dsi_lookaheads)
            for column, count in enumerate((1, 2, 3))
        ),
    ]


SHORT, LONG = some((5,), (1, 10), shift=0), some((1, 2, 10), (1, 2, 5, 10), shift=1)
FEW_PROMPTS, ROUNDS = 4, 4
MANY_PROMPTS = int(os.environ.get("EQUALITY_PROMPTS", "100"))


@pytest.fixture(scope="module")
def outcomes():
    """What the cells came to, for the one promise that is about all of them."""
    return {}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_plain_decoding_over_the_wire_is_the_oracles(sampling, proof, prompts):
    ties = []
    for prompt in prompts[:FEW_PROMPTS]:
        ids = proof.ids(prompt)
        expected = list(proof.oracle.decode(ids, SAMPLINGS[sampling], TOKENS))
        actual = proof.plain(prompt, sampling)
        ties += compare(proof.oracle, ids, SAMPLINGS[sampling], expected=expected, actual=actual)
    check_rarity(ties, position_count=FEW_PROMPTS * TOKENS)


@pytest.mark.parametrize(
    "cell",
    [*SHORT, *(pytest.param(cell, marks=pytest.mark.long) for cell in LONG)],
    ids=lambda cell: "-".join(map(str, asdict(cell).values())),
)
def test_every_strategy_gives_the_tokens_of_plain_decoding(cell, proof, prompts, outcomes):
    outcomes[cell] = outcome = Outcome()
    # What a strategy leaves behind depends on timing: on a busy machine more prompts may be needed.
    for start in range(0, ROUNDS * FEW_PROMPTS, FEW_PROMPTS):
        proof.run(cell, prompts[start : start + FEW_PROMPTS], outcome)
        if not missing_evidence(cell, outcome):
            break
    assert not missing_evidence(cell, outcome), outcome
    assert outcome.positions >= FEW_PROMPTS * TOKENS


@pytest.mark.parametrize("cells", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])
def test_rejections_happened_and_near_ties_are_rare(cells, outcomes):
    if outcomes.keys() < set(cells):
        pytest.skip(f"this is about {len(cells)} cells, and {len(outcomes)} have run")
    assert sum(outcome.rejected for outcome in outcomes.values()) > 0
    # Prompts that a busy machine took more excuse nothing.
    check_rarity(all_ties(outcomes), position_count=len(outcomes) * FEW_PROMPTS * TOKENS)


@pytest.mark.parametrize(
    ("ties", "position_count"),
    [([], 1), ([1], 9_216), ([1, 1], 9_216), ([1], 10_001), ([1] * 6, 69_120)],
)
def test_few_near_ties_are_excused_and_listed(ties, position_count, recwarn):
    """In the short form one, though several cells may meet it."""
    ties = [NearTie(each, expected=5, actual=6, gap=1e-5) for each in ties]
    check_rarity(ties, position_count=position_count)
    listed = [str(warning.message) for warning in recwarn]
    assert listed == [f"met {ties.count(tie)} times: {tie}" for tie in dict.fromkeys(ties)]


@pytest.mark.filterwarnings("ignore:met ")
@pytest.mark.parametrize(("ties", "position_count"), [([1, 2], 9_216), ([1] * 7, 69_120)])
def test_more_near_ties_are_an_error(ties, position_count):
    ties = [NearTie(each, expected=5, actual=6, gap=1e-5) for each in ties]
    with pytest.raises(AssertionError):
        check_rarity(ties, position_count=position_count)


@pytest.mark.full
@pytest.mark.timeout(0)
def test_every_strategy_gives_the_tokens_of_plain_decoding_of_many_prompts(proof, prompts):
    outcomes = {}
    for index, cell in enumerate(CELLS, start=1):
        outcomes[cell] = outcome = Outcome()
        proof.run(cell, prompts[:MANY_PROMPTS], outcome)
        assert not missing_evidence(cell, outcome), outcome
        print(f"{index} of {len(CELLS)}: {cell}, {len(outcome.near_ties)} near-ties")
        write(outcomes)
    assert all(it.positions == MANY_PROMPTS * TOKENS for it in outcomes.values())
    check_rarity(all_ties(outcomes), position_count=len(CELLS) * MANY_PROMPTS * TOKENS)


def all_ties(outcomes):
    return [tie for outcome in outcomes.values() for tie in outcome.near_ties]


def write(outcomes):
    report = {
        "prompts": MANY_PROMPTS,
        "tokens_per_prompt": TOKENS,
        "near_tie_bound": NEAR_TIE,
        "positions": sum(outcome.positions for outcome in outcomes.values()),
        "near_ties": len(all_ties(outcomes)),
        "cells": [asdict(cell) | asdict(outcome) for cell, outcome in outcomes.items()],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "equality.json").write_text(json.dumps(report, indent=1) + "\n")
