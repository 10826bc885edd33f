"""The list of lies has every field of every answer, and each lie is one."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from paceline.v1.error_reason_pb2 import ErrorReason
from support.lies.conversation import METHODS, conversation_lies
from support.lies.known_fields import KNOWN
from support.lies.list_of_lies import ANSWERS, counts, field_lies, fields_of, row_of
from support.lies.rounds import (
    about_conversations,
    about_each_way,
    about_fields,
    about_long_lists,
)

# No library writes these, and none reads them.
UNDECODABLE = {"not UTF-8", "longer than any number"}
README = Path(__file__).parents[2] / "fault" / "README.md"


def test_every_field_of_every_answer_is_known_and_no_other():
    answered = {row_of(path[-1]) for answer in ANSWERS.values() for path in fields_of(answer)}
    assert answered - KNOWN.keys() == set(), "say in known_fields what their comments forbid"
    assert KNOWN.keys() - answered == set(), "these fields are gone"


def test_every_field_is_lied_about_at_each_place():
    places = {
        (method, ".".join(it.name for it in path))
        for method, answer in ANSWERS.items()
        for path in fields_of(answer)
    }
    assert {(it.method, it.path) for it in field_lies()} == places


def test_every_method_is_known():
    assert ANSWERS.keys() == METHODS.keys()


@pytest.mark.parametrize("method", METHODS)
def test_each_wrong_value_is_written_as_an_answer(method):
    answer = GetMessageClass(ANSWERS[method])
    for lie in field_lies():
        if lie.method != method:
            continue
        written = lie.distort(answer())
        try:
            answer.FromString(written)
            assert lie.kind not in UNDECODABLE, lie
        except DecodeError:
            assert lie.kind in UNDECODABLE, lie


def test_every_status_is_said_with_every_reason_at_every_method():
    statuses = [it for it in conversation_lies() if it.is_status]
    reasons = {name.removeprefix("ERROR_REASON_") for name in [*ErrorReason.keys()]}
    for method in METHODS:
        kinds = {it.kind for it in statuses if it.method == method}
        assert {f"UNAVAILABLE / {reason}" for reason in reasons} <= kinds
        assert sum(" / " in it for it in kinds) == 16 * (len(reasons) + 2)


def test_no_lie_is_on_the_list_twice():
    lies = Counter(map(str, (*field_lies(), *conversation_lies())))
    assert [lie for lie, number in lies.items() if number > 1] == []


def told(lies):
    return [lie for arranged in lies.values() for lie, _ in arranged]


def test_the_brief_round_tells_a_lie_of_each_group_about_each_field_and_each_kind():
    brief = [*told(about_fields()), *told(about_long_lists())]
    assert {it.kind for it in brief} == {it.kind for it in field_lies()}
    groups = {(it.method, it.path, it.group) for it in field_lies()}
    assert {(it.method, it.path, it.group) for it in brief} == groups


def test_the_rounds_leave_out_no_lie_about_a_field():
    assert {*told(about_fields()), *told(about_each_way())} == {*field_lies()}


def test_the_brief_round_tells_each_code_each_reason_and_each_other_end():
    def words(lies):
        kinds = {it.kind for it in lies if it.is_status}
        return {word for kind in kinds for word in re.split(" / | (?=with)|, ", kind)}

    some, others = (told(about_conversations(is_brief=it)) for it in (True, False))
    assert words(some) == words(conversation_lies())
    assert {it.kind for it in (*some, *others)} == {it.kind for it in conversation_lies()}


def test_the_readme_tells_how_long_the_list_is():
    conversations = conversation_lies()
    statuses = {it.kind for it in conversations if it.is_status}
    others = {it.kind for it in conversations if not it.is_status}
    told = {
        **counts(),
        "another end of a call": len(statuses),
        "another course of a call": len(others),
    }
    rows = README.read_text().splitlines()
    for group, count in told.items():
        (row,) = (it for it in rows if it.startswith(f"| {group} |"))
        assert row.startswith(f"| {group} | {count:,} |"), (group, count)
