"""A lenient schema: what cannot be enforced is left out and named, and the rest holds."""

from __future__ import annotations

import json

import pytest
from pydantic_core import PydanticCustomError

from paceline.errors import InvalidFieldError
from paceline_contract.sampling import Grammar, GrammarKind
from paceline_engine.deciding.grammars import GrammarCompiler
from paceline_gateway.bodies.completion_schemas import ChatBody, CompletionBody
from paceline_gateway.bodies.json_body import parse
from paceline_gateway.bodies.lenient_schemas import lenient
from paceline_gateway.bodies.message_schemas import MessagesBody
from paceline_gateway.bodies.parameter_types import schema_grammar
from paceline_gateway.bodies.response_schemas import ResponseBody
from paceline_gateway.errors import RequestError
from support.schema_corpus import SCHEMAS
from support.tiny_models import build_tokenizer

COMPILER = GrammarCompiler(
    build_tokenizer(300).to_str().encode(), vocabulary_size=300, eos_token_ids=[0]
)
UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "p"}
RESPONSE = {"model": "m", "input": "hi"}
MESSAGES = {**CHAT, "max_tokens": 1}
PLACES = [
    (
        ChatBody,
        CHAT,
        lambda about: {"response_format": {"type": "json_schema", "json_schema": about}},
        "response_format.json_schema.schema",
    ),
    (
        CompletionBody,
        TEXT,
        lambda about: {"structured_outputs": {"json": about["schema"], "lenient": True}},
        "structured_outputs.json",
    ),
    (
        CompletionBody,
        TEXT,
        lambda about: {
            "structured_outputs": {"json": json.dumps(about["schema"]), "lenient": True}
        },
        "structured_outputs.json",
    ),
    (
        ResponseBody,
        RESPONSE,
        lambda about: {"text": {"format": {"type": "json_schema", **about}}},
        "text.format.schema",
    ),
    (
        MessagesBody,
        MESSAGES,
        lambda about: {"output_config": {"format": {"type": "json_schema", **about}}},
        "output_config.format.schema",
    ),
    (
        MessagesBody,
        MESSAGES,
        lambda about: {"output_format": {"type": "json_schema", **about}},
        "output_format.schema",
    ),
]


def compiles(schema) -> bool:
    try:
        COMPILER.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    except InvalidFieldError:
        return False
    return True


@pytest.mark.parametrize(
    ("schema", "rest", "places"),
    [
        ({"not": {"type": "null"}, "type": "string"}, {"type": "string"}, [".not"]),
        ({"if": {}, "then": {}, "else": {}}, {}, [".if", ".then", ".else"]),
        (UNIQUE, {"type": "array", "items": {"type": "integer"}}, [".uniqueItems"]),
        (
            {"contains": {}, "minContains": 1, "maxContains": 2, "unevaluatedItems": False},
            {},
            [".contains", ".minContains", ".maxContains", ".unevaluatedItems"],
        ),
        (
            {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {}, "dependencies": {}},
            {},
            [".dependentRequired", ".dependentSchemas", ".dependencies"],
        ),
        (
            {"propertyNames": {}, "unevaluatedProperties": False},
            {},
            [".propertyNames", ".unevaluatedProperties"],
        ),
        ({"$dynamicRef": "#a", "$dynamicAnchor": "a"}, {}, [".$dynamicRef", ".$dynamicAnchor"]),
        ({"$recursiveRef": "#", "$recursiveAnchor": True}, {}, None),
        ({"$ref": "https://example.com/it"}, {}, [".$ref"]),
        ({"format": "zip"}, {}, [".format"]),
        ({"type": ["integer", "string"], "format": "zip"}, {"type": ["integer", "string"]}, None),
        ({"type": "integer", "format": "int32"}, {"type": "integer", "format": "int32"}, []),
        ({"type": "string", "pattern": "^(?!a)"}, {"type": "string"}, [".pattern"]),
        ({"type": "string", "pattern": r"(a)\1"}, {"type": "string"}, [".pattern"]),
        ({"type": "string", "pattern": r"\bword\b"}, {"type": "string"}, [".pattern"]),
        *(
            ({"type": "string", "pattern": it}, {"type": "string"}, [".pattern"])
            for it in (
                r"(?P<a>x)(?P=a)",
                "(?>a)",
                r"a\Z",
                r"\cA",
                r"[\b]",
                r"\\\b",
                "(?#c)a",
                r"\0",
            )
        ),
        *(
            ({"type": "string", "pattern": it}, {"type": "string", "pattern": it}, [])
            for it in (
                r"^\\b$",
                r"\(?=a",
                r"^\Aa\z",
                r"(?P<a>x)(?<b>y)(?:z)(?i:w)",
                r"\x41\u0041\pL",
            )
        ),
        ({"$ref": "#here", "$defs": {"a": {}}}, {"$defs": {"a": {}}}, [".$ref"]),
        (
            {"items": {"$ref": "#/not/items"}, "not": {"items": {}}},
            {"items": {}},
            [".not", ".items.$ref"],
        ),
        (
            {
                "properties": {"$ref": {"$ref": "#/$defs/a~1%20b/anyOf/0"}},
                "$defs": {"a/ b": {"anyOf": [{"type": "null"}]}},
            },
            {
                "properties": {"$ref": {"$ref": "#/$defs/a~1%20b/anyOf/0"}},
                "$defs": {"a/ b": {"anyOf": [{"type": "null"}]}},
            },
            [],
        ),
        (
            {"additionalProperties": False, "patternProperties": {"^(?=a)": {}, "^b": {}}},
            {"patternProperties": {"^b": {}}},
            [".additionalProperties", ".patternProperties.^(?=a)"],
        ),
        (
            {"additionalProperties": False, "patternProperties": {"^b": {"not": {}}}},
            {"additionalProperties": False, "patternProperties": {"^b": {}}},
            None,
        ),
        (
            {"patternProperties": {"^(?=a)": {}, "^b": {"not": {}}}},
            {"patternProperties": {"^b": {}}},
            [".patternProperties.^(?=a)", ".patternProperties.^b.not"],
        ),
        (
            {"oneOf": [{"type": "number"}, {"type": "integer"}]},
            {"anyOf": [{"type": "number"}, {"type": "integer"}]},
            [".oneOf"],
        ),
        (
            {
                "oneOf": [{"minimum": 1}, {"minimum": 2}],
                "anyOf": [{"maximum": 9}],
                "allOf": [{"type": "number"}],
            },
            {
                "anyOf": [{"maximum": 9}],
                "allOf": [{"type": "number"}, {"anyOf": [{"minimum": 1}, {"minimum": 2}]}],
            },
            [".oneOf"],
        ),
        (
            {"properties": {"not": UNIQUE}, "anyOf": [{}, {"$defs": {"a": {"if": {}}}}]},
            {
                "properties": {"not": {"type": "array", "items": {"type": "integer"}}},
                "anyOf": [{}, {"$defs": {"a": {}}}],
            },
            [".properties.not.uniqueItems", ".anyOf[1].$defs.a.if"],
        ),
        ({"const": {"not": 1}}, {"const": {"not": 1}}, []),
    ],
)
def test_what_cannot_be_enforced_is_left_out_and_named_and_the_rest_stays(schema, rest, places):
    kept, left_out = lenient(schema)
    assert kept == rest
    assert places is None or left_out == places
    assert not left_out or not compiles(schema), "it could have been enforced"
    assert compiles(kept)


def test_nothing_but_alternatives_is_left_out_of_schemas_that_can_be_enforced():
    for known in SCHEMAS:
        kept, places = lenient(known.schema)
        assert all(it.endswith(".oneOf") for it in places), known.about
        assert places or kept == known.schema


@pytest.mark.parametrize(("body_class", "base", "written", "place"), PLACES)
def test_a_request_says_it_beside_the_schema_and_is_told_the_places(
    body_class, base, written, place
):
    ignored = []
    content = json.dumps(
        {**base, "unheard_of": 1, **written({"schema": UNIQUE, "name": "n", "lenient": True})}
    ).encode()
    if body_class is MessagesBody:
        content = content.replace(b'"name": "n", ', b"")
    body = parse(body_class, content, ignored=ignored)
    assert body.grammar.json_schema == {"type": "array", "items": {"type": "integer"}}
    assert ignored == ["unheard_of", f"{place}.uniqueItems"]


def test_without_the_word_the_schema_stays_as_it_is():
    for said in ({}, {"lenient": False}, {"strict": False}):
        formed = {"type": "json_schema", "json_schema": {"schema": UNIQUE, **said}}
        ignored = []
        body = parse(ChatBody, json.dumps({**CHAT, "response_format": formed}).encode())
        assert body.grammar.json_schema == UNIQUE
        assert ignored == []


def test_a_strict_gateway_refuses_what_would_be_left_out_by_its_place():
    formed = {"type": "json_schema", "json_schema": {"schema": UNIQUE, "lenient": True}}
    with pytest.raises(RequestError) as refused:
        parse(ChatBody, json.dumps({**CHAT, "response_format": formed}).encode())
    error = refused.value.body["error"]
    assert error["param"] == "response_format.json_schema.schema.uniqueItems"
    assert error["code"] == "unsupported_parameter"


def test_null_counts_as_if_it_were_not_there():
    formed = {"type": "json_schema", "json_schema": {"schema": UNIQUE, "lenient": None}}
    structured = {"json": UNIQUE, "lenient": None, "regex": None}
    for more in ({"response_format": formed}, {"structured_outputs": structured}):
        body = parse(ChatBody, json.dumps({**CHAT, **more}).encode())
        assert body.grammar.json_schema == UNIQUE
    other = {"regex": "a", "json": None, "lenient": None}
    assert parse(ChatBody, json.dumps({**CHAT, "structured_outputs": other}).encode()).grammar.regex


@pytest.mark.parametrize("wanted", ["yes", 1])
def test_it_is_true_or_false(wanted):
    formed = {"type": "json_schema", "json_schema": {"schema": UNIQUE, "lenient": wanted}}
    with pytest.raises(RequestError) as refused:
        parse(ChatBody, json.dumps({**CHAT, "response_format": formed}).encode(), ignored=[])
    assert refused.value.body["error"]["param"] == "response_format"


def test_a_schema_beyond_the_servers_limits_is_left_to_their_words():
    deep = UNIQUE
    for _ in range(70):
        deep = {"items": deep}
    for schema in (deep, {**UNIQUE, "description": "x" * 70_000}):
        assert lenient(schema) == (schema, [])


class Watched(list):
    """A list that counts what is taken out of it."""

    taken = 0

    def __iter__(self):
        for each in super().__iter__():
            self.taken += 1
            yield each


@pytest.mark.parametrize("is_lenient", [False, True])
@pytest.mark.parametrize("is_text", [False, True])
def test_a_schema_beyond_the_limit_is_refused_without_a_look_at_all_of_it(
    monkeypatch, is_text, is_lenient
):
    monkeypatch.setattr("json.loads", lambda _: pytest.fail("all of it is read"))
    values = Watched([[]] * 1_000_000)
    schema = "[" + "[]," * 100_000 + "[]]" if is_text else {"enum": values}
    with pytest.raises(PydanticCustomError, match="a schema of more than 65536 bytes"):
        schema_grammar(schema, "schema", [], wanted=is_lenient)
    assert values.taken < 70_000


def test_a_schema_that_is_no_json_is_told_the_field():
    for more in ({}, {"lenient": True}):
        content = {**TEXT, "structured_outputs": {"json": "{", **more}}
        with pytest.raises(RequestError) as refused:
            parse(CompletionBody, json.dumps(content).encode(), ignored=[])
        error = refused.value.body["error"]
        assert error["param"] == "structured_outputs"
        assert "has a schema that is not JSON" in error["message"]


def test_a_request_with_a_schema_beyond_the_limit_is_told_the_field():
    for more in ({}, {"lenient": True}):
        content = {**TEXT, "structured_outputs": {"json": json.dumps("x" * 70_000), **more}}
        with pytest.raises(RequestError) as refused:
            parse(CompletionBody, json.dumps(content).encode(), ignored=[])
        error = refused.value.body["error"]
        assert error["param"] == "structured_outputs"
        assert "has a schema of more than 65536 bytes" in error["message"]


@pytest.mark.parametrize("wrong", [5, "ab", {"type": "null"}, None])
def test_what_is_no_list_of_schemas_is_left_for_servers_to_refuse(wrong):
    kept, _ = lenient({"oneOf": [{}], "anyOf": [{}], "allOf": wrong})
    assert kept == {"anyOf": [{}], "allOf": wrong}
    assert not compiles(kept)


def test_a_reference_to_nothing_is_left_for_servers_to_refuse():
    for pointer in ("#/$defs/a", "#/anyOf/1", "#/anyOf/" + "9" * 5000, "#/anyOf/a"):
        schema = {"$ref": pointer, "anyOf": [{}]}
        assert lenient(schema) == (schema, [])
