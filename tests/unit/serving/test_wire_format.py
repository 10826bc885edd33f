"""Fields are found on the bytes of a message as the library would find them."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from paceline.v1.call_service_pb2 import CallMessage, ExchangeCallsRequest
from paceline.v1.proposal_pb2 import Proposal
from paceline.v1.sampling_pb2 import SamplingParameters, SparseDistribution
from paceline_serving.wire_format import check_field_count, fields_of, unknown_field, varint


def test_each_field_is_found_with_its_content():
    proposal = Proposal(token_ids=[1, 300], distributions=[SparseDistribution(token_ids=[7])])
    raw = proposal.SerializeToString()
    ids, distribution = fields_of(raw)
    assert raw[ids.content : ids.end] == b"\x01\xac\x02"
    assert (
        SparseDistribution.FromString(raw[distribution.content : distribution.end])
        == (proposal.distributions[0])
    )
    assert (ids.start, ids.end, distribution.end) == (0, distribution.start, len(raw))


def test_fields_of_every_wire_type_are_passed_over():
    raw = SamplingParameters(temperature=0.5, top_k=300).SerializeToString() + b"\x2d" + bytes(4)
    assert [field.tag & 7 for field in fields_of(raw)] == [1, 0, 5]


def test_a_field_of_a_later_version_is_found_wherever_it_stands():
    known = SamplingParameters(top_k=3, logit_bias={7: 1.0}, grammar={"regex": "a"})
    assert unknown_field(known) == ""
    later = SamplingParameters.FromString(b"\xfa\x01\x01x" + known.SerializeToString())
    assert unknown_field(later) == "its field number 31"
    # The library parses what is known of a grammar, and keeps the rest beside it.
    known.grammar.MergeFromString(b"\x78\x01")
    assert unknown_field(known) == "a field of one of its parts"


def test_a_message_within_another_has_its_own_fields():
    inner = CallMessage(number=1, method="m").SerializeToString()
    raw = ExchangeCallsRequest(calls=[CallMessage.FromString(inner)]).SerializeToString()
    (call,) = fields_of(raw)
    within = fields_of(raw, start=call.content, limit=call.end)
    assert [field.tag >> 3 for field in within] == [1, 2]


@pytest.mark.parametrize(
    "raw",
    [
        b"\x0a",
        b"\x0a\x05abc",
        b"\x08",
        b"\x08" + b"\xff" * 11,
        b"\x08" + b"\xff" * 10 + b"\x01",
        b"\x0d123",
        b"\x0b",
        b"\x0f",
    ],
    ids=[
        "no length",
        "cut off",
        "no number",
        "no number's end",
        "a long number",
        "a short float",
        "a group",
        "unknown",
    ],
)
def test_what_is_no_message_is_refused(raw):
    with pytest.raises(DecodeError):
        list(fields_of(raw))


def test_entries_are_counted_one_by_one_and_only_too_many_are_refused():
    check_field_count(ExchangeCallsRequest(calls=[CallMessage()] * 3).SerializeToString(), most=3)
    with pytest.raises(DecodeError, match="more than 3"):
        check_field_count(b"\x0a\x00" * 4, most=3)
    check_field_count(b"", most=0)


def test_the_longest_number_has_ten_bytes():
    assert varint(b"\xff" * 9 + b"\x01", 0) == (2**64 - 1, 10)
