from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.errors import InvalidFieldError, UnsupportedError
from paceline_contract.calls import DraftOptions, PrefixCall, VerificationRule, VerifyOptions
from paceline_contract.proposal import Proposal, SparseDistribution
from paceline_contract.sampling import SamplingParameters
from paceline_engine.terms import validation
from paceline_engine.terms.calls import SessionSpec
from unit.engine.conftest import chain, instant

MODEL = instant(vocabulary_size=100, context_length=1000).description
BIG = replace(MODEL, vocabulary_size=300)
DIGEST = bytes(16)
CALL = PrefixCall("s", 1, 4, DIGEST, (1, 2))


def refused_field(check, *arguments, **settings) -> str:
    with pytest.raises(InvalidFieldError) as caught:
        check(*arguments, **settings)
    return caught.value.violations[0].field


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0.0, 1e-300, 100.0], [-1e-9, 100.1, math.nan, math.inf]),
        ("top_k", [0, 1, 100], [-1, 101]),
        ("top_p", [1e-9, 1.0], [0.0, -0.1, 1.0001, math.nan, math.inf]),
        ("min_p", [0.0, 1.0], [-0.1, 1.0001, math.nan, -math.inf]),
    ],
)
def test_sampling_parameters_have_limits(name, good, bad):
    for value in good:
        validation.check_spec(SessionSpec(10, SamplingParameters(**{name: value})), MODEL)
    for value in bad:
        spec = SessionSpec(10, SamplingParameters(**{name: value}))
        assert refused_field(validation.check_spec, spec, MODEL) == f"spec.sampling.{name}"


@pytest.mark.parametrize(
    ("name", "field", "good", "bad"),
    [
        ("reserve_length", "spec.reserve_length", [1, 1000], [0, -1, 1001]),
        ("limit_length", "spec.limit_length", [None, 10, 1000], [9, 0, -1, 1001]),
        ("seed", "spec.seed", [0, 2**53 - 1], [-1, 2**53]),
        ("lease_seconds", "spec.lease", [1.0, 300.0], [0.99, 300.1, math.nan, math.inf]),
        ("request_id", "spec.request_id", ["", "a.B_9-" * 10], ["a b", "x" * 65, "a\n", "é"]),
        ("share", "spec.share", ["", "a.B_9-" * 10], ["a b", "x" * 65, "a/b"]),
    ],
)
def test_session_fields_have_limits(name, field, good, bad):
    for value in good:
        validation.check_spec(replace(SessionSpec(10), **{name: value}), MODEL)
    for value in bad:
        spec = replace(SessionSpec(10), **{name: value})
        assert refused_field(validation.check_spec, spec, MODEL) == field


def test_a_rule_that_the_model_lacks_is_unsupported_unless_greedy():
    spec = SessionSpec(10, SamplingParameters(temperature=1.0), rule=VerificationRule.REJECTION)
    with pytest.raises(UnsupportedError):
        validation.check_spec(spec, MODEL)
    validation.check_spec(replace(spec, sampling=SamplingParameters()), MODEL)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sequence": 0}, "call.sequence"),
        ({"sequence": 2**64}, "call.sequence"),
        ({"base_length": -1}, "call.base_length"),
        ({"base_length": 21}, "call.base_length"),
        ({"base_digest": b""}, "call.base_digest"),
        ({"base_digest": bytes(15)}, "call.base_digest"),
        ({"token_ids": (1, 100)}, "call.token_ids[1]"),
        ({"token_ids": (-1,)}, "call.token_ids[0]"),
        ({"token_ids": (1,) * 17}, "call.token_ids"),
        ({"token_ids": (), "base_length": 0}, "call.token_ids"),
    ],
)
def test_a_call_has_limits(change, field):
    limits = {"limit_length": 20, "vocabulary_size": 100}
    validation.check_call(CALL, **limits)
    validation.check_call(replace(CALL, base_length=0, base_digest=b""), **limits)
    validation.check_call(replace(CALL, token_ids=(0, 99) * 8), **limits)
    assert refused_field(validation.check_call, replace(CALL, **change), **limits) == field


@pytest.mark.parametrize(
    ("proposal", "depth", "field"),
    [
        (chain([100]), 0, "proposal.token_ids[0]"),
        (chain([1] * 15), 0, "proposal.token_ids"),
        (chain([1]), 65536, "speculation_depth"),
        (chain([1]), -1, "speculation_depth"),
        (chain([1], [SparseDistribution((1,), (1.0,))]), 0, "proposal.distributions"),
        (Proposal((1, 2), parents=(0,)), 0, "proposal.parents"),
        (Proposal((1, 2), parents=(0, 1, 2)), 0, "proposal.parents"),
        (Proposal((), parents=(0,)), 0, "proposal.parents"),
        (Proposal((1, 2), parents=(1, 0)), 0, "proposal.parents[0]"),
        (Proposal((1, 2), parents=(0, 2)), 0, "proposal.parents[1]"),
        (Proposal((1, 2), parents=(0, -1)), 0, "proposal.parents[1]"),
    ],
)
def test_a_proposal_has_limits(proposal, depth, field):
    settings = {"spec": SessionSpec(20), "model": MODEL}
    validation.check_proposal(CALL, chain([1] * 14), options=VerifyOptions(depth=65535), **settings)
    options = VerifyOptions(depth=depth)
    assert (
        refused_field(validation.check_proposal, CALL, proposal, options=options, **settings)
        == field
    )


def test_a_proposal_has_at_most_1024_tokens():
    settings = {"options": VerifyOptions(), "spec": SessionSpec(5000), "model": MODEL}
    validation.check_proposal(CALL, chain([1] * 1024), **settings)
    refused = refused_field(validation.check_proposal, CALL, chain([1] * 1025), **settings)
    assert refused == "proposal.token_ids"


def test_rejection_needs_a_distribution_for_each_draft_token():
    spec = SessionSpec(20, rule=VerificationRule.REJECTION)
    settings = {"options": VerifyOptions(), "spec": spec, "model": MODEL}
    assert refused_field(validation.check_proposal, CALL, chain([1]), **settings) == (
        "proposal.distributions"
    )


@pytest.mark.parametrize("parents", [(0, 0, 1), (0, 1, 1), (0, 1, 0)])
def test_a_tree_is_unsupported_where_only_chains_are_judged(parents):
    chain_of_three, tree = (Proposal((1, 2, 3), parents=each) for each in ((0, 1, 2), parents))
    settings = {"options": VerifyOptions(), "spec": SessionSpec(20)}
    validation.check_proposal(CALL, tree, model=MODEL, **settings)
    for_chains = replace(MODEL, takes_trees=False)
    validation.check_proposal(CALL, chain_of_three, model=for_chains, **settings)
    with pytest.raises(UnsupportedError, match=r"proposal\.parents"):
        validation.check_proposal(CALL, tree, model=for_chains, **settings)
    settings["spec"] = SessionSpec(20, rule=VerificationRule.REJECTION)
    drawn = replace(tree, distributions=[SparseDistribution((1,), (1.0,))] * 3)
    with pytest.raises(UnsupportedError, match=r"proposal\.parents"):
        validation.check_proposal(CALL, drawn, model=MODEL, **settings)


def bush(depth: int, leaves: int) -> Proposal:
    """A chain, with leaves beside its first token."""
    token_ids = (*range(1, leaves + 1), *[0] * depth)
    parents = (*[0] * leaves, 0, *range(leaves + 1, leaves + depth))
    return Proposal(token_ids, parents=parents)


@pytest.mark.parametrize(
    ("good", "bad", "field"),
    [
        (bush(64, 1), bush(65, 1), "proposal.parents"),
        (bush(56, 200), bush(57, 200), "proposal.token_ids"),
        (Proposal((1, 2, 1), (0, 0, 2)), Proposal((1, 2, 1), (0, 0, 0)), "proposal.token_ids[2]"),
        (Proposal((1, 2, 2), (0, 1, 2)), Proposal((1, 2, 2), (0, 1, 1)), "proposal.token_ids[2]"),
    ],
    ids=["depth", "size", "equal roots", "equal siblings"],
)  # fmt: skip
def test_a_tree_has_limits(good, bad, field):
    settings = {"options": VerifyOptions(), "spec": SessionSpec(1000), "model": BIG}
    validation.check_proposal(CALL, good, **settings)
    assert refused_field(validation.check_proposal, CALL, bad, **settings) == field


def test_of_a_tree_the_longest_path_has_to_fit_in_the_session():
    settings = {"options": VerifyOptions(), "spec": SessionSpec(9), "model": MODEL}
    validation.check_proposal(CALL, bush(3, 50), **settings)
    refused = refused_field(validation.check_proposal, CALL, bush(4, 1), **settings)
    assert refused == "proposal.token_ids"


@pytest.mark.parametrize(
    ("ids", "probabilities", "field"),
    [
        ((), (), ""),
        ((1,), (0.5, 0.5), ""),
        (tuple(range(4097)), (1 / 4097,) * 4097, ""),
        ((1, 100), (0.5, 0.5), ".token_ids[1]"),
        ((1, 1), (0.5, 0.5), ".token_ids"),
        ((2, 3), (0.5, 0.5), ".token_ids"),
        ((1, 2), (0.5, 0.4), ".probabilities"),
        ((1, 2), (1.0, 0.0), ".probabilities"),
        ((1, 2), (1.5, -0.5), ".probabilities"),
        ((1, 2), (math.nan, 1.0), ".probabilities"),
        ((1, 2), (math.inf, 1.0), ".probabilities"),
        ((1, 2, 3), (math.inf, -math.inf, 1.0), ".probabilities"),
    ],
)
def test_a_distribution_has_limits(ids, probabilities, field):
    good = SparseDistribution((1, 2), (0.5, 0.49995))
    validation.check_distributions(chain((1, 2), (good, good)), vocabulary_size=100)
    bad = SparseDistribution(ids, probabilities)
    proposal = chain((2, 1), (good, bad))
    found = refused_field(validation.check_distributions, proposal, vocabulary_size=100)
    assert found == f"proposal.distributions[1]{field}"


@pytest.mark.parametrize(
    ("max_tokens", "width", "branch_count", "field"),
    [
        (5, 0, 0, "width"),
        (5, 17, 0, "width"),
        (5, 2, 65, "branch_count"),
        (5, 2, -1, "branch_count"),
        (65, 2, 63, "width"),
        (1024, 9, 0, "width"),
    ],
)
def test_a_drafts_tree_has_limits(max_tokens, width, branch_count, field):
    settings = {"spec": SessionSpec(2000), "model": MODEL}
    for most, wide, branches in ((1024, 8, 0), (64, 2, 63), (1024, 1, 64), (1, 16, 64)):
        good = DraftOptions(max_tokens=most, width=wide, branch_count=branches)
        validation.check_drafting(CALL, good, **settings)
    options = DraftOptions(max_tokens=max_tokens, width=width, branch_count=branch_count)
    assert refused_field(validation.check_drafting, CALL, options, **settings) == field


def test_a_drafts_tree_is_unsupported_where_only_chains_are_drafted():
    alone = replace(MODEL, takes_trees=False)
    rejecting = SessionSpec(20, rule=VerificationRule.REJECTION)
    spec = SessionSpec(20)
    validation.check_drafting(
        CALL, DraftOptions(max_tokens=4, width=3, branch_count=2), spec=spec, model=MODEL
    )
    validation.check_drafting(CALL, DraftOptions(max_tokens=4), spec=spec, model=alone)
    with pytest.raises(UnsupportedError, match="width"):
        validation.check_drafting(CALL, DraftOptions(max_tokens=4, width=3), spec=spec, model=alone)
    with pytest.raises(UnsupportedError, match="width"):
        validation.check_drafting(
            CALL, DraftOptions(max_tokens=4, width=2), spec=rejecting, model=MODEL
        )


@pytest.mark.parametrize(
    ("max_tokens", "chunk_tokens", "field"),
    [
        (0, 1, "max_tokens"),
        (1025, 1, "max_tokens"),
        (15, 1, "max_tokens"),
        (5, 0, "chunk_tokens"),
        (5, 65, "chunk_tokens"),
    ],
)
def test_a_window_has_limits(max_tokens, chunk_tokens, field):
    settings = {"spec": SessionSpec(20), "model": MODEL}
    validation.check_drafting(CALL, DraftOptions(max_tokens=14, chunk_tokens=64), **settings)
    options = DraftOptions(max_tokens=max_tokens, chunk_tokens=chunk_tokens)
    assert refused_field(validation.check_drafting, CALL, options, **settings) == field
