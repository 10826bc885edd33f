"""Proposals that are none: distributions, trees, rules."""

from __future__ import annotations

import math

import pytest

from paceline.errors import UnsupportedError
from paceline.v1 import sampling_pb2
from support.model_contract import PROMPT, Told, assert_names, assert_no_forward

VOCABULARY = Told("vocabulary_size")
DISTRIBUTION = {"token_ids": [1, 2], "probabilities": [0.25, 0.75]}


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1, 1]},
        {"token_ids": [1, VOCABULARY]},
        {"token_ids": [2, 3]},
        {"token_ids": [1]},
        {"token_ids": []},
        {"probabilities": [0.25, 0.7499]},
        {"probabilities": [0.0, 1.0]},
        {"probabilities": [-0.5, 1.5]},
        {"probabilities": [math.nan, 1.0]},
        {"probabilities": [math.inf, 0.5]},
        {"probabilities": [1.0]},
        {"probabilities": []},
    ],
    ids=str,
)
async def test_what_is_no_distribution_is_refused(target, change):
    # At temperature 0 every server takes this rule.
    session = await target.open(verification_rule=sampling_pb2.VERIFICATION_RULE_REJECTION)
    change = {name: Told.put_in(value, target.info) for name, value in change.items()}
    given = sampling_pb2.SparseDistribution(**{**DISTRIBUTION, **change})
    call = target.call(session, 1, new=PROMPT)
    error = await target.error_of(target.verify(call, [1], distributions=[given]))
    assert_names(error, "proposal.distributions[0]")
    good = sampling_pb2.SparseDistribution(**DISTRIBUTION)
    call = target.call(session, 2, new=PROMPT)
    answer = await target.verify(call, [1], distributions=[good])
    assert answer.held_length == 4 + len(answer.accepted_path)


@pytest.mark.parametrize(("rule", "count"), [(1, 1), (2, 0), (2, 2)])
async def test_distributions_are_as_many_as_the_rule_wants(target, rule, count):
    session = await target.open(verification_rule=rule)
    given = [sampling_pb2.SparseDistribution(**DISTRIBUTION)] * count
    call = target.call(session, 1, new=PROMPT)
    error = await target.error_of(target.verify(call, [1], distributions=given))
    assert_names(error, "proposal.distributions")


@pytest.mark.parametrize("parents", [[0], [0, 1, 2], [1, 0], [0, 2], [0, 2**32 - 1]], ids=str)
async def test_parents_that_make_no_tree_are_refused(target, parents):
    session = await target.open()
    call = target.call(session, 1, new=PROMPT)
    error = await target.error_of(target.verify(call, [1, 2], parents=parents))
    assert_names(error, "proposal.parents")
    assert_no_forward(target)


async def test_a_tree_is_unsupported(target):
    session = await target.open()
    call = target.call(session, 1, new=PROMPT)
    error = await target.error_of(target.verify(call, [1, 2], parents=[0, 0]))
    assert isinstance(error, UnsupportedError)
    assert "proposal.parents" in error.message
    assert_no_forward(target)
    spelled_out = await target.verify(call, [1, 2], parents=[0, 1])
    assert spelled_out.prefix_length == len(PROMPT)


async def test_a_rule_that_the_model_does_not_know_is_unsupported(target):
    rule = sampling_pb2.VERIFICATION_RULE_REJECTION
    if rule in target.info.verification_rules:
        pytest.skip("this model knows every rule")
    sampling = sampling_pb2.SamplingParameters(temperature=1.0)
    error = await target.error_of(target.open(verification_rule=rule, sampling=sampling))
    assert isinstance(error, UnsupportedError)
