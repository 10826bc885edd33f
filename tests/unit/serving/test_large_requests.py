"""A large request is looked at before anything is made of it."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from paceline.errors import InvalidFieldError, MalformedRequestError
from paceline.v1.target_service_pb2 import VerifyRequest
from paceline_contract.calls import VerificationRule
from paceline_engine.simulated import SimulatedModel
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.validation import MOST_ENTRIES, MOST_TOKENS
from paceline_model_server.large_requests import check_large_request
from support.model_contract import a_host

LENGTH = 2000  # longer than any block
EMPTY = b"\x12\x02\x1a\x00"  # a proposal with a distribution without entries
OTHER = b"\x18\x01"  # a speculation_depth


@asynccontextmanager
async def serving(vocabulary_size):
    model = SimulatedModel(vocabulary_size=vocabulary_size, context_length=4096)
    host = a_host(model=model)
    await host.start()
    yield host
    await host.stop()


@pytest.fixture
async def host():
    async with serving(32_000) as host:
        yield host


@pytest.fixture
async def host_of_few_tokens():
    async with serving(300) as host:
        yield host


def a_request(host, *, rule=VerificationRule.REJECTION, length=LENGTH, block=0, entries=0, ids=9):
    """A verification whose token ids all take as many bytes as the last one of the vocabulary."""
    session_id = host.open_session(SessionSpec(length, rule=rule)).session_id
    last = host.description.vocabulary_size - 1
    request = VerifyRequest(
        call={"session_id": session_id, "token_ids": [last] * ids},
        proposal={"token_ids": [last] * block},
    )
    for _ in range(block):
        request.proposal.distributions.add(
            token_ids=[last] * entries, probabilities=[0.5] * entries
        )
    return request.SerializeToString()


def check(host, raw):
    check_large_request(raw, host=host, caller="")


def test_the_largest_block_with_the_longest_prompt_is_parsed(host):
    context_length = host.description.context_length
    request = a_request(host, block=MOST_TOKENS, entries=MOST_ENTRIES, ids=context_length)
    assert 28 << 20 < len(request) < 32 << 20
    check(host, request)


def test_as_many_distributions_are_parsed_as_a_block_may_have_tokens(host):
    fits = a_request(host, block=MOST_TOKENS, entries=20)
    check(host, fits)
    with pytest.raises(InvalidFieldError, match="at most 1024") as caught:
        check(host, fits + EMPTY)
    assert caught.value.violations[0].field == "proposal.distributions"


def test_a_short_session_has_a_short_block(host):
    fits = a_request(host, length=30, block=30, entries=MOST_ENTRIES)
    check(host, fits)
    with pytest.raises(InvalidFieldError, match="at most 30"):
        check(host, fits + EMPTY)


def test_without_rejection_no_distribution_is_parsed(host):
    prompt = a_request(host, rule=VerificationRule.EXACT, ids=host.description.context_length)
    padding = b"\x7a\x80\x80\x04" + bytes(1 << 16)  # 64 KiB of a field that nobody knows
    check(host, prompt + padding)
    with pytest.raises(InvalidFieldError, match="at most 0"):
        check(host, prompt + padding + EMPTY)


def test_a_distribution_has_no_more_bytes_than_its_entries_can_take(host):
    fits = a_request(host, block=3, entries=MOST_ENTRIES)
    check(host, fits)
    too_long = a_request(host, block=3, entries=MOST_ENTRIES + 2)
    with pytest.raises(InvalidFieldError) as caught:
        check(host, too_long)
    assert caught.value.violations[0].field == "proposal.distributions[0]"


def test_a_small_vocabulary_has_small_distributions(host_of_few_tokens):
    host = host_of_few_tokens
    check(host, a_request(host, block=50, entries=300))
    with pytest.raises(InvalidFieldError, match="bytes, at most"):
        check(host, a_request(host, block=50, entries=303))


def test_token_ids_cannot_hide_in_a_second_call(host):
    again = b"\x0a" + b"\xff\xff\x3f" + bytes((1 << 20) - 1)
    with pytest.raises(InvalidFieldError, match="bytes, at most"):
        check(host, a_request(host) + again)


def test_a_million_small_fields_are_not_walked_over(host):
    with pytest.raises(InvalidFieldError, match="fields"):
        check(host, a_request(host) + OTHER * 40_000)


@pytest.mark.parametrize(
    "end",
    [
        b"\x12",  # a tag alone
        b"\x12\x05abc",  # shorter than it says
        b"\x12\x02\x1a\x05abc",  # shorter than a part of it says
        b"\x2d\x00",  # four bytes are two
        b"\x29\x00",  # eight bytes are two
        b"\x2b\x2c",  # a group
        b"\x28" + b"\xff" * 11,  # a number without an end
    ],
)
def test_what_is_no_message_is_refused(host, end):
    whole = a_request(host, block=3, entries=MOST_ENTRIES)
    with pytest.raises(MalformedRequestError):
        check(host, whole + end)


def test_every_kind_of_field_is_passed_over(host):
    whole = a_request(host, block=3, entries=MOST_ENTRIES)
    eight, four = b"\x29" + b"\xff" * 8, b"\x2d" + b"\xff" * 4
    check(host, whole + b"\x28\x80\x01" + eight + four + b"\x7a\x01x")
