"""What a JSON schema's grammar allows fits the schema, by another library's judgement."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from paceline.errors import InvalidFieldError
from paceline_contract.sampling import Grammar, GrammarKind
from paceline_engine.deciding.grammars import GrammarCompiler
from paceline_engine.deciding.json_schemas import sound_schema
from paceline_engine.deciding.lark_terms import sound_lark
from support.schema_corpus import SCHEMAS, KnownSchema
from support.tiny_models import build_tokenizer

END = 0
TOKENIZER = build_tokenizer(300)
COMPILER = GrammarCompiler(TOKENIZER.to_str().encode(), vocabulary_size=300, eos_token_ids=[END])


def path_of(schema):
    if not isinstance(schema, Grammar):
        schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    return COMPILER.path(schema)


def lark_of(*schemas) -> Grammar:
    """Return a grammar whose texts fit one of some schemas."""
    return Grammar(
        GrammarKind.LARK, "start: " + "\n| ".join(f"%json {json.dumps(it)}" for it in schemas)
    )


def a_text(schema, chance: random.Random) -> str | None:
    """Choose allowed tokens until the text ends; None if that takes long."""
    path, tokens = path_of(schema), []
    while len(tokens) < 150:
        follows = chance.choice([*np.flatnonzero(path.allowed()).tolist()])
        if follows == END:
            return TOKENIZER.decode(tokens)
        tokens.append(follows)
        path.add([follows])
    return None


def allows(schema, text: str) -> bool:
    path, tokens = path_of(schema), TOKENIZER.encode(text).ids
    path.add(tokens)
    return path.length == len(tokens) and bool(path.allowed()[END])


def test_the_corpus_has_all_keywords_that_are_enforced():
    written = json.dumps([it.schema for it in SCHEMAS])
    keywords = (
        "type const enum anyOf oneOf allOf $ref $defs definitions properties required"
        " additionalProperties patternProperties minProperties maxProperties items prefixItems"
        " minItems maxItems minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength"
        " maxLength pattern format"
    )
    assert not [it for it in keywords.split() if f'"{it}":' not in written]
    assert len(SCHEMAS) >= 100
    assert len({json.dumps(it.schema) for it in SCHEMAS}) == len(SCHEMAS)


def test_whatever_is_chosen_of_what_is_allowed_fits_the_schema():
    ended = 0
    for known in SCHEMAS:
        for seed in range(2):
            text = a_text(known.schema, random.Random(seed))
            ended += text is not None
            assert text is None or known.fits(text), (known.about, text)
    assert ended > 1.9 * len(SCHEMAS)


@pytest.mark.parametrize(
    ("schema", "refused", "allowed"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0", "0.25"),
        ({"exclusiveMinimum": 2, "exclusiveMaximum": 2.25}, "2", "2.1"),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, "-1", "-1.1"),
        ({"allOf": [{"exclusiveMinimum": 10}, {"maximum": 10.5}]}, "10", "10.5"),
        # Others are compiled as they are.
        ({"exclusiveMinimum": 0, "maximum": 1.5}, "0", "0.0000000001"),
        ({"exclusiveMinimum": 0, "maximum": 1}, "0", "1"),
    ],
)
def test_a_bound_that_a_number_has_to_be_beyond_is_not_allowed(schema, refused, allowed):
    schema = {"type": "number", **schema}
    for kind in (schema, lark_of(schema, {"type": "null"})):
        assert not allows(kind, refused)
        assert allows(kind, allowed)
    assert not KnownSchema("", schema).fits(refused)
    assert KnownSchema("", schema).fits(allowed)


def test_what_only_looks_like_a_bound_is_data():
    value = {"exclusiveMinimum": 0, "maximum": 0.5}
    assert allows({"const": value}, '{"exclusiveMinimum": 0, "maximum": 0.5}')
    assert allows({"enum": [value]}, '{"exclusiveMinimum": 0, "maximum": 0.5}')
    named = {"type": "object", "properties": {"exclusiveMinimum": {"const": 1}}}
    assert allows(named, '{"exclusiveMinimum": 1}')
    bounds = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
    for name in ("default", "const", "enum", "examples", "properties"):
        own = {"type": "object", "properties": {name: bounds}}
        assert not allows(own, f'{{"{name}": 0}}')
        assert allows(own, f'{{"{name}": 0.25}}')


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 1_000_003},
        {"multipleOf": 10**300 + 1},
        {"allOf": [{"multipleOf": 10_007}, {"multipleOf": 10_009}]},
        {"properties": {"default": {"multipleOf": 1_000_003}}},
        {"items": {"multipleOf": 101}, "properties": {"a": {"multipleOf": 103}}},
    ],
)
def test_divisors_that_take_a_large_automaton_are_refused(schema):
    for kind in (schema, lark_of(schema), lark_of({}, schema)):
        with pytest.raises(InvalidFieldError, match="remainders"):
            path_of(kind)
    for usual in (7, 60, 3600, 100_000, 0.01, 0.25):
        assert allows({"type": "number", "multipleOf": usual}, "0")


def pattern(number: int):
    return {"pattern": f"^a{number}.*b"}


def pairs(count: int, make=pattern):
    return {"allOf": [{"anyOf": [make(2 * it), make(2 * it + 1)]} for it in range(count)]}


def nested(depth: int):
    return {**pattern(depth), **({"anyOf": [nested(depth - 1), {}]} if depth else {})}


def deep(depth: int):
    return {"items": deep(depth - 1)} if depth else {}


def names(*, times: int, each: int):
    groups = [{f"^{it}a{n}": {"type": "null"} for n in range(each)} for it in range(times)]
    return {"type": "object", "allOf": [{"patternProperties": it} for it in groups]}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (names(times=6, each=10), "patterns of names, times"),
        (pairs(7), "meet more than 100 times"),
        ({"$defs": {"it": pairs(3)}, "$ref": "#/$defs/it", **pairs(3)}, "meet more than 100"),
        ({"default": {"a/b": pairs(7)}, "$ref": "#/default/a~1b"}, "meet more than 100"),
        ({"$defs": {"it": {"$anchor": "x", **pairs(3)}}, "$ref": "#x", **pairs(3)}, "meet more"),
        ({"properties": {"default": pairs(7)}}, "meet more than 100"),
        (pairs(20, make=lambda it: {"minLength": it}), "more than 256 alternatives"),
        (
            {
                "allOf": [pattern(it) for it in range(8)],
                "oneOf": [{"minLength": it} for it in range(40)],
            },
            "meet more than 100",
        ),
        (nested(12), "more than 10 patterns for one text"),
    ],
)
def test_merges_that_multiply_are_refused_before_they_are_compiled(schema, reason):
    """Here nothing is compiled at all."""
    with pytest.raises(InvalidFieldError, match=reason):
        sound_schema(json.dumps(schema), field="it")
    with pytest.raises(InvalidFieldError, match=reason):
        sound_lark(lark_of({}, schema).text, field="it")


def test_the_schemas_of_one_grammar_have_the_bounds_of_one_schema_together():
    """100 divisors of 10,000 remainders take 15 s, and 64 KiB has room for 1,000."""
    for reason, schemas in (
        ("remainders together", [{"multipleOf": 901 + 10 * it} for it in range(11)]),
        ("128 patterns of names", [names(times=1, each=10) for _ in range(13)]),
        ("nested deeper than 64", [{}, deep(64)]),
    ):
        with pytest.raises(InvalidFieldError, match=reason):
            sound_lark(lark_of(*schemas).text, field="it")
        usual = lark_of(*schemas[:-1]).text
        assert sound_lark(usual, field="it") == usual


def test_a_schema_that_hides_behind_what_looks_like_another_is_checked():
    hidden = json.dumps({"]": 1, "multipleOf": 1_000_003})
    for before in ('"%json [" ', "/%json {/ ", "// %json {\n"):
        with pytest.raises(InvalidFieldError, match="remainders"):
            sound_lark(f"start: {before} %json {hidden}", field="it")


def test_what_is_merged_without_multiplying_is_allowed():
    own = {f"p{it}": {"type": "string", **pattern(it)} for it in range(20)}
    reference = {"$ref": "#/$defs/word", "description": "a word"}
    choices = {"anyOf": [{"type": "string", **pattern(it)} for it in range(40)]}
    named = {it: {"type": "null"} for it in ("pattern", "allOf", "anyOf", "default")}
    for schema in (
        {"properties": own, "required": ["p0"]},
        {"$defs": {"word": pattern(1)}, "properties": {f"q{it}": reference for it in range(40)}},
        choices,
        names(times=2, each=5),
        {"type": "string", **pairs(3)},
        {
            "$defs": {"it": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/it"}}]}},
            "$ref": "#/$defs/it",
        },
        {
            "allOf": [{"properties": {f"a{n}": {}}} for n in range(12)],
            "properties": {f"o{n}": {"properties": named} for n in range(12)},
        },
    ):
        assert sound_schema(json.dumps(schema), field="it") == json.dumps(schema)


def test_a_schema_that_says_so_in_the_librarys_words_is_enforced_without_what_cannot_be():
    unique = {"type": "array", "items": {"type": "null"}, "uniqueItems": True}
    with pytest.raises(InvalidFieldError, match="uniqueItems"):
        allows(unique, "[null]")
    lenient = {**unique, "x-guidance": {"lenient": True}}
    assert allows(lenient, "[null, null]")
    assert not allows(lenient, "[1]")
