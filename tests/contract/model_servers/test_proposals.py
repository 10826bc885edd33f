"""Proposals that are none: distributions, trees, rules."""

from __future__ import annotations

import math

import pytest

from paceline.errors import PrefixNotHeldError, UnsupportedError
from paceline.v1 import sampling_pb2
from support.model_contract import PROMPT, Told, assert_names, assert_no_forward, continuation

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


@pytest.fixture
async def tree_target(target):
    """A target that judges trees."""
    if not target.info.tree_token_limit:
        pytest.skip("it judges chains only")
    return target


async def test_equal_siblings_are_refused(target):
    session = await target.open()
    call = target.call(session, 1, new=PROMPT)
    error = await target.error_of(target.verify(call, [1, 2, 2], parents=[0, 1, 1]))
    assert_names(error, "proposal.token_ids[2]")
    assert_no_forward(target)


@pytest.mark.parametrize("more", [0, 1])
async def test_a_tree_has_the_size_that_the_server_tells(tree_target, more):
    target = tree_target
    session = await target.open(reserve_length=100)
    call = target.call(session, 1, new=PROMPT)
    size = target.info.tree_token_limit + more
    tree = target.verify(
        call, [n % 200 for n in range(size)], parents=[n // 200 for n in range(size)]
    )
    if more:
        assert_names(await target.error_of(tree), "proposal.token_ids")
        assert_no_forward(target)
    else:
        assert (await tree).prefix_length == len(PROMPT)


@pytest.mark.parametrize("more", [0, 1])
async def test_a_tree_has_the_depth_that_the_server_tells(tree_target, more):
    target = tree_target
    session = await target.open(reserve_length=100)
    call = target.call(session, 1, new=PROMPT)
    depth = target.info.tree_depth_limit + more
    tree = target.verify(call, [2, *[1] * depth], parents=[0, 0, *range(2, depth + 1)])
    if more:
        assert_names(await target.error_of(tree), "proposal.parents")
        assert_no_forward(target)
    else:
        assert (await tree).prefix_length == len(PROMPT)


async def test_a_tree_is_unsupported_where_the_server_says_so(target):
    session = await target.open()
    call = target.call(session, 1, new=PROMPT)
    tree = target.verify(call, [1, 2], parents=[0, 0])
    if target.info.tree_token_limit:
        assert (await tree).prefix_length == len(PROMPT)
    else:
        error = await target.error_of(tree)
        assert isinstance(error, UnsupportedError)
        assert "proposal.parents" in error.message


async def test_under_rejection_a_tree_is_unsupported(target):
    # At temperature 0 every server takes this rule.
    session = await target.open(verification_rule=sampling_pb2.VERIFICATION_RULE_REJECTION)
    call = target.call(session, 1, new=PROMPT)
    given = [sampling_pb2.SparseDistribution(**DISTRIBUTION)] * 2
    error = await target.error_of(target.verify(call, [1, 2], parents=[0, 0], distributions=given))
    assert isinstance(error, UnsupportedError)
    assert_no_forward(target)
    spelled_out = await target.verify(call, [1, 2], parents=[0, 1], distributions=given)
    assert spelled_out.prefix_length == len(PROMPT)


async def test_a_trees_verdict_is_its_right_path_and_the_session_holds_that(tree_target):
    target = tree_target
    right = await continuation(target, PROMPT, 4)
    wrong = [(each + 1) % target.info.vocabulary_size for each in right]
    #       wrong; right, beside it; on both a right and a wrong one
    token_ids = [wrong[0], right[0], right[1], wrong[1], right[1], right[2]]
    session = await target.open()
    call = target.call(session, 1, new=PROMPT)
    answer = await target.verify(call, token_ids, parents=[0, 0, 1, 2, 2, 5], logprobs=True)
    assert (list(answer.accepted_path), answer.next_token_id) == ([1, 4, 5], right[3])
    assert (answer.held_length, len(answer.logprobs)) == (len(PROMPT) + 3, 4)
    call = target.call(session, 2, held=(*PROMPT, *right[:3]), new=right[3:4])
    assert (await target.verify(call)).prefix_length == len(PROMPT) + 4
    beyond = target.call(session, 3, held=(*PROMPT, *right[:4], wrong[0]))
    assert isinstance(await target.error_of(target.verify(beyond)), PrefixNotHeldError)


async def test_a_target_that_drafts_for_itself_proposes_what_follows_its_next_token(target):
    info = target.info
    session = await target.open()
    first = await target.verify(target.call(session, 1, new=PROMPT), propose=True)
    text = (*PROMPT, first.next_token_id)
    assert first.held_length == len(PROMPT)
    assert bool(info.self_draft_depth) == bool(info.self_draft_kind) == bool(first.proposal.parents)
    given = first.proposal
    depths = [0]
    for place, parent in enumerate(given.parents):
        assert parent <= place
        depths.append(depths[parent] + 1)
    assert max(depths) == info.self_draft_depth
    assert all(token < info.vocabulary_size for token in given.token_ids)
    siblings = list(zip(given.parents, given.token_ids, strict=True))
    assert len({*siblings}) == len(siblings)
    # It can be judged as any other.
    call = target.call(session, 2, held=PROMPT, new=text[-1:])
    second = await target.verify(call, given.token_ids, parents=given.parents)
    right = await continuation(target, text, len(second.accepted_path) + 1)
    accepted = [given.token_ids[index] for index in second.accepted_path]
    assert [*accepted, second.next_token_id] == right
    assert not second.HasField("proposal"), "nobody asked for it"


async def test_what_is_proposed_follows_the_accepted_path(target):
    right = await continuation(target, PROMPT, 3)
    plain = await target.open()
    text = (*PROMPT, *right[:2])
    alone = await target.verify(target.call(plain, 1, new=text), propose=True)
    session = await target.open()
    call = target.call(session, 1, new=PROMPT)
    wrong = (right[2] + 1) % target.info.vocabulary_size
    along = await target.verify(call, [*right[:2], wrong], propose=True)
    assert (list(along.accepted_path), along.next_token_id) == ([0, 1], right[2])
    assert along.proposal == alone.proposal


async def test_under_rejection_nothing_is_proposed(target):
    # At temperature 0 every server takes this rule.
    session = await target.open(verification_rule=sampling_pb2.VERIFICATION_RULE_REJECTION)
    answer = await target.verify(target.call(session, 1, new=PROMPT), propose=True)
    assert not answer.HasField("proposal")


async def test_a_rule_that_the_model_does_not_know_is_unsupported(target):
    rule = sampling_pb2.VERIFICATION_RULE_REJECTION
    if rule in target.info.verification_rules:
        pytest.skip("this model knows every rule")
    sampling = sampling_pb2.SamplingParameters(temperature=1.0)
    error = await target.error_of(target.open(verification_rule=rule, sampling=sampling))
    assert isinstance(error, UnsupportedError)


async def test_a_text_is_scored_as_it_is_or_the_server_says_that_it_cannot(target):
    for rule in (1, 2):
        session = await target.open(verification_rule=rule)
        call = target.call(session, 1, new=PROMPT)
        asked = target.verify(call, [7, 3, 7], score=True, logprobs=True, top_logprobs=2)
        if not target.info.scores_prompts:
            error = await target.error_of(asked)
            assert isinstance(error, UnsupportedError)
            assert "score" in error.message
            continue
        answer = await asked
        assert [*answer.accepted_path] == [0, 1, 2]
        assert answer.held_length == len(PROMPT) + 3
        assert len(answer.logprobs) == len(answer.top_logprobs) == 3
        assert max(answer.logprobs) <= 0


@pytest.mark.parametrize(
    "change", [{"token_ids": [1] * 1024}, {"token_ids": []}, {"parents": [0, 0]}]
)
async def test_what_is_scored_is_a_chain_that_is_not_too_long(target, change):
    if not target.info.scores_prompts:
        pytest.skip("it scores nothing")
    limit = (1 << 24) // target.info.vocabulary_size
    if len(change.get("token_ids", "12")) == 1024 <= limit:
        change = {"token_ids": [1] * 1025}
    session = await target.open()
    call = target.call(session, 1, new=PROMPT)
    given = {"token_ids": [1, 2], **change}
    error = await target.error_of(target.verify(call, given.pop("token_ids"), score=True, **given))
    assert_names(error, "proposal.parents" if "parents" in change else "proposal.token_ids")
