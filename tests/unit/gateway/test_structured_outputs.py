"""The forms in which a request says what its answer has to follow."""

from __future__ import annotations

import json

import pytest

from paceline import Grammar
from paceline.errors import InvalidFieldError
from paceline_gateway.bodies.completion_schemas import ChatBody, CompletionBody
from paceline_gateway.bodies.json_body import parse
from paceline_gateway.bodies.response_schemas import ResponseBody
from paceline_gateway.errors import RequestError, of_paceline

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "p"}
RESPONSE = {"model": "m", "input": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANY_OBJECT = Grammar(json_schema={"type": "object"})


def grammar_of(body_class, base, **fields):
    body = parse(body_class, json.dumps({**base, **fields}).encode())
    return body.options().get("grammar")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, ANY_OBJECT),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            Grammar(json_schema=SCHEMA),
        ),
        (None, None),
    ],
)
def test_a_chats_response_format_is_a_grammar(value, expected):
    assert grammar_of(ChatBody, CHAT, response_format=value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, None),
        ({"format": None}, None),
        ({"format": {"type": "text"}}, None),
        ({"format": {"type": "json_object"}}, ANY_OBJECT),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": False}},
            Grammar(json_schema=SCHEMA),
        ),
    ],
)
def test_a_responses_text_format_is_a_grammar(value, expected):
    assert grammar_of(ResponseBody, RESPONSE, text=value) == expected


@pytest.mark.parametrize(("body_class", "base"), [(ChatBody, CHAT), (CompletionBody, TEXT)])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"json": SCHEMA}, Grammar(json_schema=SCHEMA)),
        ({"json": json.dumps(SCHEMA)}, Grammar(json_schema=json.dumps(SCHEMA))),
        ({"json_object": True}, ANY_OBJECT),
        ({"regex": "a+"}, Grammar(regex="a+")),
        ({"grammar": 'start: "a"'}, Grammar(lark='start: "a"')),
        ({"choice": ["a", "b"]}, Grammar(choices=["a", "b"])),
    ],
)
def test_structured_outputs_have_their_usual_names(body_class, base, value, expected):
    assert grammar_of(body_class, base, structured_outputs=value) == expected


@pytest.mark.parametrize(
    ("body_class", "base", "name", "value"),
    [
        (ChatBody, CHAT, "response_format", "json"),
        (ChatBody, CHAT, "response_format", {"type": "xml"}),
        (ChatBody, CHAT, "response_format", {"type": []}),
        (ChatBody, CHAT, "response_format", {"type": "json_schema"}),
        (ChatBody, CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "n"}}),
        (ChatBody, CHAT, "structured_outputs", {}),
        (ChatBody, CHAT, "structured_outputs", {"regex": "a", "json_object": True}),
        (ChatBody, CHAT, "structured_outputs", {"choice": []}),
        (ChatBody, CHAT, "structured_outputs", {"choice": ["a", 1]}),
        (ChatBody, CHAT, "structured_outputs", {"structural_tag": "x"}),
    ],
)
def test_a_form_that_is_not_known_is_refused_by_name(body_class, base, name, value):
    with pytest.raises(RequestError) as refused:
        grammar_of(body_class, base, **{name: value})
    assert refused.value.body["error"]["param"] == name


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"format": {"type": {}}}, "text.format"),
        ({"format": {"type": "grammar"}}, "text.format"),
        ({"formats": {}}, "text.formats"),
    ],
)
def test_so_it_is_of_a_responses_text(value, param):
    with pytest.raises(RequestError) as refused:
        grammar_of(ResponseBody, RESPONSE, text=value)
    assert refused.value.body["error"]["param"] == param


def test_what_cannot_be_enforced_is_a_fault_of_the_format():
    for field in ("sampling.grammar", "sampling.grammar.json_schema"):
        refusal = of_paceline(InvalidFieldError.of(field, "no"), prompt="messages")
        assert refusal.status == 400
        assert refusal.body["error"]["param"] == "response_format"
        assert refusal.body["error"]["message"] == "response_format: no"
