"""Drafts with a width: a chain, and beside it what else is likely."""

from __future__ import annotations

import pytest

from paceline.errors import PrefixMismatchError, PrefixNotHeldError, UnsupportedError
from paceline.v1 import sampling_pb2
from support.model_contract import PROMPT, assert_names, assert_no_forward

WINDOW = 6


async def drafted(drafter, call, max_tokens=WINDOW, **fields):
    """What a call streams, as tokens and parents, and its messages."""
    messages = await drafter.draft(call, max_tokens, **fields)
    token_ids = [each for message in messages for each in message.proposal.token_ids]
    parents = [each for message in messages for each in message.proposal.parents]
    return token_ids, parents, messages


def chain_of(token_ids, parents) -> list[int]:
    """The tokens that are the first children, from the prefix on."""
    found, row = [], 0
    while row in parents:
        row = parents.index(row) + 1
        found.append(token_ids[row - 1])
    return found


async def plain_chain(drafter) -> list[int]:
    session = await drafter.open()
    token_ids, parents, _ = await drafted(drafter, drafter.call(session, 1, new=PROMPT))
    assert parents == []
    return token_ids


@pytest.mark.parametrize("branch_count", [0, 3])
@pytest.mark.parametrize("chunk_tokens", [0, 4])
async def test_beside_its_chain_a_tree_has_runners_up(drafter, branch_count, chunk_tokens):
    if branch_count and not drafter.info.tree_token_limit:
        pytest.skip("it follows no branches")
    session = await drafter.open()
    call = drafter.call(session, 1, new=PROMPT)
    fields = {"width": 3, "branch_count": branch_count, "chunk_tokens": chunk_tokens}
    token_ids, parents, messages = await drafted(drafter, call, **fields)
    chain = await plain_chain(drafter)
    assert chain_of(token_ids, parents) == chain
    assert all(parent <= place for place, parent in enumerate(parents))
    assert len(set(zip(parents, token_ids, strict=True))) == len(token_ids)
    places = {parent: parents.count(parent) for parent in parents}
    assert set(places.values()) == {3}
    assert WINDOW <= len(places) <= WINDOW * (1 + branch_count)
    step = chunk_tokens or 1
    starts = [message.start_length - len(PROMPT) for message in messages]
    assert starts == list(range(0, WINDOW, step))


async def test_a_drafters_session_holds_the_chain(drafter):
    session = await drafter.open()
    call = drafter.call(session, 1, new=PROMPT)
    token_ids, parents, _ = await drafted(drafter, call, width=2)
    held = (*PROMPT, *chain_of(token_ids, parents))
    beyond = drafter.call(session, 2, held=(*held, 1))
    assert isinstance(await drafter.error_of(drafter.draft(beyond, 1)), PrefixNotHeldError)
    (message,) = await drafter.draft(drafter.call(session, 3, held=held), 1)
    assert message.start_length == len(held)
    runner_up = drafter.call(session, 4, held=(*PROMPT, token_ids[1]))
    assert isinstance(await drafter.error_of(drafter.draft(runner_up, 1)), PrefixMismatchError)


async def test_a_draft_goes_on_from_a_runner_up(drafter):
    session, fresh = await drafter.open(), await drafter.open()
    call = drafter.call(session, 1, new=PROMPT)
    token_ids, _, _ = await drafted(drafter, call, width=2)
    restart = drafter.call(session, 2, held=PROMPT, new=[token_ids[1]])
    whole = drafter.call(fresh, 1, new=(*PROMPT, token_ids[1]))
    found = [await drafted(drafter, each, width=2) for each in (restart, whole)]
    assert found[0][:2] == found[1][:2]


async def test_a_draft_finds_as_many_tokens_as_it_may(drafter):
    session = await drafter.open()
    call = drafter.call(session, 1, new=PROMPT)
    fields = {"width": 16, "branch_count": 64}
    error = await drafter.error_of(drafter.draft(call, 8, **fields))
    assert_names(error, "width")
    assert_no_forward(drafter)


async def test_under_rejection_no_tree_is_drafted(drafter):
    # At temperature 0 every server takes this rule.
    session = await drafter.open(verification_rule=sampling_pb2.VERIFICATION_RULE_REJECTION)
    call = drafter.call(session, 1, new=PROMPT)
    error = await drafter.error_of(drafter.draft(call, 2, width=2))
    assert isinstance(error, UnsupportedError)
    assert_no_forward(drafter)


async def test_branches_are_unsupported_where_the_server_says_so(drafter):
    session = await drafter.open()
    call = drafter.call(session, 1, new=PROMPT)
    draft = drafter.draft(call, 2, width=2, branch_count=2)
    if drafter.info.tree_token_limit:
        assert len(await draft) == 2
    else:
        assert isinstance(await drafter.error_of(draft), UnsupportedError)
