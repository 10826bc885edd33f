"""The promise: the tokens of plain decoding, whatever the strategy; and the strategy happened."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest

from paceline import Strategy
from support.cells import SAMPLINGS, TOKENS, Cell, EqualityProof, Outcome, missing_evidence
from support.equality import NEAR_TIE, compare

RESULTS = Path(__file__).parents[2] / "bench" / "results"
CELLS = [
    Cell(strategy, lookahead, target_count, sampling)
    for strategy, lookahead, target_count, sampling in product(
        (Strategy.SPECULATIVE, Strategy.DISTRIBUTED), (1, 2, 5, 10), (1, 2, 3), SAMPLINGS
    )
]
FEW_PROMPTS, ROUNDS = 4, 4
MANY_PROMPTS = int(os.environ.get("EQUALITY_PROMPTS", "100"))
# Near-ties may decide fewer than one in so many of the compared positions.
POSITIONS_PER_TIE = 10_000


@pytest.fixture(scope="module")
def proof(bundled, oracle, tokenizer):
    return EqualityProof(bundled, oracle, tokenizer)


@pytest.fixture(scope="module")
def outcomes():
    """What the cells came to, for the one promise that is about all of them."""
    return {}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_plain_decoding_over_the_wire_is_the_oracles(sampling, proof, prompts):
    for prompt in prompts[:FEW_PROMPTS]:
        ids = proof.ids(prompt)
        expected = list(proof.oracle.decode(ids, SAMPLINGS[sampling], TOKENS))
        actual = proof.plain(prompt, sampling)
        assert not compare(proof.oracle, ids, SAMPLINGS[sampling], expected=expected, actual=actual)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, asdict(cell).values())))
def test_every_strategy_gives_the_tokens_of_plain_decoding(cell, proof, prompts, outcomes):
    outcomes[cell] = outcome = Outcome()
    # What a strategy leaves behind depends on timing: on a busy machine more prompts may be needed.
    for start in range(0, ROUNDS * FEW_PROMPTS, FEW_PROMPTS):
        proof.run(cell, prompts[start : start + FEW_PROMPTS], outcome)
        if not missing_evidence(cell, outcome):
            break
    assert not missing_evidence(cell, outcome), outcome
    assert outcome.positions >= FEW_PROMPTS * TOKENS


def test_rejections_happened_and_near_ties_are_rare(outcomes):
    if outcomes:
        assert sum(outcome.rejected for outcome in outcomes.values()) > 0
    check_rarity(outcomes)


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
    check_rarity(outcomes)


def check_rarity(outcomes):
    positions = sum(outcome.positions for outcome in outcomes.values())
    ties = [tie for outcome in outcomes.values() for tie in outcome.near_ties]
    assert not ties or len(ties) * POSITIONS_PER_TIE < positions, ties


def write(outcomes):
    report = {
        "prompts": MANY_PROMPTS,
        "tokens_per_prompt": TOKENS,
        "near_tie_bound": NEAR_TIE,
        "positions": sum(outcome.positions for outcome in outcomes.values()),
        "near_ties": sum(len(outcome.near_ties) for outcome in outcomes.values()),
        "cells": [asdict(cell) | asdict(outcome) for cell, outcome in outcomes.items()],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "equality.json").write_text(json.dumps(report, indent=1) + "\n")
