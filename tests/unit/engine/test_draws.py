"""Every draw of sampling and verification is the one that docs/protocol.md says, to the token."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_contract.proposal import SparseDistribution
from paceline_contract.sampling import SHAPING_PARAMETERS, SamplingParameters
from paceline_engine.deciding import gumbel
from paceline_engine.deciding.acceptance_rules import accept_sampled, residual_scores
from paceline_engine.deciding.noise import Purpose, noise_bits, uniform
from paceline_engine.deciding.sampling import choose_tokens, draw_draft, filtered_scores
from support.examples import examples
from support.plain_sampling import Draw, choose, filtered, verify

VECTORS = Path(__file__).parents[2] / "contract" / "vectors" / "verification.json"
SIZE = 8

TRIED = {
    "temperature": [0.3, 0.8, 1.0, 1.7, 5.0],
    "top_k": [0, 0, 3, 6],
    "top_p": [0.4, 0.75, 0.9, 1.0],
    "min_p": [0.0, 0.0, 0.1, 0.4],
}
PARAMETERS = st.builds(
    SamplingParameters, **{name: st.sampled_from(values) for name, values in TRIED.items()}
)
# A mixture of peaked and flat rows, whose values float32 holds exactly.
ROWS = st.lists(st.integers(-96, 96).map(lambda it: it / 32), min_size=SIZE, max_size=SIZE)
POSITIONS = st.integers(0, 9) | st.integers(2**32 - 2, 2**32 + 2)
SEEDS = st.integers(0, 2**53 - 1)


def test_every_parameter_that_filters_is_tried_here():
    """The others, which shape logits, are tried in test_shaping.py."""
    assert {it.name for it in fields(SamplingParameters)} - set(SHAPING_PARAMETERS) == set(TRIED)


@settings(max_examples=examples(200))
@given(ROWS, PARAMETERS)
def test_the_filters_leave_what_they_leave_one_after_the_other(row, parameters):
    scores = filtered_scores(torch.tensor([row]), parameters)[0].tolist()
    left = {token: math.exp(it) for token, it in enumerate(scores) if it > -math.inf}
    assert left == pytest.approx(filtered(row, parameters))


@settings(max_examples=examples(200))
@given(st.lists(ROWS, min_size=1, max_size=3), PARAMETERS, POSITIONS, SEEDS)
def test_each_rows_token_is_the_one_of_its_own_position(rows, parameters, position, seed):
    chosen = choose_tokens(
        torch.tensor(rows), first_position=position, parameters=parameters, seed=seed
    )
    assert chosen == [
        choose(filtered(row, parameters), position=at, seed=seed, purpose=Purpose.EXACT)
        for at, row in enumerate(rows, start=position)
    ]


@settings(max_examples=examples(150))
@given(ROWS, PARAMETERS, POSITIONS, SEEDS)
def test_a_draft_is_drawn_with_noise_of_its_own_from_what_is_sent(row, parameters, position, seed):
    token, said = draw_draft(
        torch.tensor([row]), position=position, parameters=parameters, seed=seed
    )
    sent = dict(zip(said.token_ids, said.probabilities, strict=True))
    weights = filtered(row, parameters)
    expected = {each: weight / sum(weights.values()) for each, weight in weights.items()}
    assert sent == pytest.approx(expected, rel=1e-6)
    assert token == choose(sent, position=position, seed=seed, purpose=Purpose.DRAFT)


def test_a_draft_is_drawn_from_the_rounded_numbers_where_rounding_decides():
    # The noise of the two tokens is outweighed but for 1e-9, and float32 rounds by up to 6e-8.
    parameters, decided_by_rounding = SamplingParameters(1.0), 0
    for position in range(50):
        even = torch.zeros(1, 2, dtype=torch.float64)
        noisy = gumbel.add_noise(even, [position], seed=3, purpose=Purpose.DRAFT)
        logits = -noisy + torch.tensor([[1e-9, 0.0]], dtype=torch.float64)
        token, said = draw_draft(logits, position=position, parameters=parameters, seed=3)
        sent = dict(zip(said.token_ids, said.probabilities, strict=True))
        assert token == choose(sent, position=position, seed=3, purpose=Purpose.DRAFT)
        decided_by_rounding += token == 1
    assert decided_by_rounding > 5


def test_a_draft_names_no_token_whose_probability_float32_cannot_hold():
    logits = torch.tensor([[0.0, -200.0, -1.0]])
    _, said = draw_draft(logits, position=0, parameters=SamplingParameters(1.0), seed=1)
    assert list(said.token_ids) == [0, 2]
    assert min(said.probabilities) > 0


def outcome(draws: list[Draw]) -> tuple[int, int]:
    """Return how many draft tokens are accepted, and the next token."""
    return sum(draw.outcome for draw in draws[:-1]), draws[-1].outcome


DISTRIBUTIONS = st.dictionaries(
    st.integers(0, SIZE - 1), st.integers(1, 1000), min_size=1, max_size=SIZE
)


@settings(max_examples=examples(200))
@given(st.data(), PARAMETERS, POSITIONS, SEEDS)
def test_a_block_is_judged_draw_by_draw(data, parameters, position, seed):
    count = data.draw(st.integers(0, 3))
    rows = data.draw(st.lists(ROWS, min_size=count + 1, max_size=count + 1))
    sums = data.draw(st.sampled_from([1.0, 0.99991, 1.00009]))
    drawn_from = [
        {token: weight / sum(each.values()) * sums for token, weight in each.items()}
        for each in data.draw(st.lists(DISTRIBUTIONS, min_size=count, max_size=count))
    ]
    block = [data.draw(st.sampled_from(sorted(each))) for each in drawn_from]
    draws = verify(
        block,
        rows,
        drawn_from=drawn_from,
        first_position=position,
        parameters=parameters,
        seed=seed,
    )
    assert outcome(draws) == accept_sampled(
        block,
        torch.tensor(rows),
        distributions=[SparseDistribution(tuple(it), tuple(it.values())) for it in drawn_from],
        first_position=position,
        parameters=parameters,
        seed=seed,
    )


@pytest.mark.parametrize("total", [0.99991, 1.0, 1.00009])
def test_a_distribution_counts_as_if_it_summed_to_1(total):
    # The target's probability lies between the two numbers that normalising tells apart.
    coin = uniform(noise_bits(5, 40, token_id=0, purpose=Purpose.ACCEPT))
    said = SparseDistribution((0, 1), (0.5 * total, 0.5 * total))
    for target, accepted in ((coin * 0.49999, 0), (coin * 0.50001, 1)):
        row = [math.log(target), math.log(1 - target)]
        judged = accept_sampled(
            [0],
            torch.tensor([row, row], dtype=torch.float64),
            distributions=[said],
            first_position=40,
            parameters=SamplingParameters(1.0),
            seed=5,
        )
        assert judged[0] == accepted
    even = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert torch.equal(residual_scores(even, said), even.log()), "nothing is left over"


def cases():
    return json.loads(VECTORS.read_text())["cases"]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["name"])
def test_the_vectors_of_verification_hold(case):
    said = [
        SparseDistribution(each["token_ids"], each["probabilities"])
        for each in case["distributions"]
    ]
    settled = {
        "first_position": int(case["first_position"]),
        "parameters": SamplingParameters(**case["parameters"]),
        "seed": int(case["seed"]),
    }
    expected = [
        Draw(each["purpose"], int(each["position"]), each["outcome"]) for each in case["draws"]
    ]
    logits = torch.tensor(case["logits"], dtype=torch.float64)
    judged = accept_sampled(case["block"], logits, distributions=said, **settled)
    assert judged == outcome(expected)
    drawn_from = [dict(zip(it.token_ids, it.probabilities, strict=True)) for it in said]
    assert verify(case["block"], case["logits"], drawn_from=drawn_from, **settled) == expected


def test_the_vectors_have_every_draw_there_is():
    draws = [(each["purpose"], each["outcome"]) for case in cases() for each in case["draws"]]
    assert {purpose for purpose, _ in draws} == {"ACCEPT", "RESIDUAL", "EXACT"}
    assert {outcome for purpose, outcome in draws if purpose == "ACCEPT"} == {True, False}
    assert {len(case["block"]) for case in cases()} >= {0, 1, 3}


# --- what it costs ----------------------------------------------------------------------------


def test_a_few_likely_tokens_are_found_without_sorting_the_vocabulary(monkeypatch):
    sorted_counts = []

    def watched(values, **options):
        sorted_counts.append(values.shape[-1])
        return sort(values, **options)

    sort = np.sort
    monkeypatch.setattr(np, "sort", watched)
    logits = torch.zeros(1, 50_000)
    logits[0, :10] = 20.0
    filtered_scores(logits, SamplingParameters(1.0, top_p=0.9))
    assert 0 < sum(sorted_counts) <= 256


def test_noise_is_computed_for_the_tokens_that_are_left(monkeypatch):
    computed = []

    def watched(pair, position, **settings):
        computed.append(pair.numel())
        return gumbel_pairs(pair, position, **settings)

    gumbel_pairs = gumbel._gumbel_pairs
    monkeypatch.setattr(gumbel, "_gumbel_pairs", watched)
    parameters = SamplingParameters(1.0, top_k=10)
    choose_tokens(torch.arange(50_000.0)[None], first_position=0, parameters=parameters, seed=1)
    assert computed == [5]
