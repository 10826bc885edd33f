"""Grammars of many tools: neither a model's many tokens nor long descriptions make them dear."""

from __future__ import annotations

import json
import re
import threading
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import ChatTemplate, Grammar
from paceline_gateway.bodies.completion_schemas import ChatBody, CompletionBody
from paceline_gateway.bodies.json_body import parse
from paceline_gateway.bodies.response_schemas import ResponseBody
from paceline_gateway.bodies.schema_notes import without_notes
from paceline_gateway.conversations.conversation import Conversation, Message, Tool, ToolChoice
from paceline_gateway.dialects.answering import plan_answer
from paceline_gateway.dialects.dialect import find_dialect
from paceline_gateway.dialects.grammar import AnswerGrammar
from paceline_gateway.dialects.grammar_rules import Tokens, TooLargeError
from paceline_gateway.errors import RequestError
from support.gateway import gateway_over
from support.spoken import CALL, model

USER = (Message(role="user", content="x"),)
NOTES = {"description": "d" * 9000, "title": "t" * 9000, "$comment": "c" * 9000}


class Counted(dict):
    """Tokens that count how often they are looked at."""

    looks = 0

    def __contains__(self, name):
        self.looks += 1
        return super().__contains__(name)

    def __iter__(self):
        for each in super().__iter__():
            self.looks += 1
            yield each


@given(
    st.lists(st.text("<a|>", min_size=1, max_size=4), unique=True, max_size=8),
    st.text("<a|>b", max_size=30),
)
def test_a_text_is_written_with_the_longest_token_at_each_place(names, text):
    tokens = Tokens({name: number for number, name in enumerate(names)})
    pieces = re.findall(r'<\[\d+\]>|"(?:[^"\\]|\\.)*"', tokens.literal(text))
    written = [names[int(it[2:-2])] if it.startswith("<[") else json.loads(it) for it in pieces]
    assert "".join(written) == text
    place = 0
    for piece, what in zip(pieces, written, strict=True):
        if piece.startswith("<["):
            assert what == max((it for it in names if text.startswith(it, place)), key=len)
        else:
            assert not any(
                text.startswith(it, at) for it in names for at in range(place, place + len(what))
            )
        place += len(what)


def test_what_it_takes_to_write_a_text_does_not_depend_on_how_many_tokens_there_are():
    ids = Counted({f"<unused{it:05}>": it for it in range(6000)} | {"<call>": 6000})
    tokens = Tokens(ids)
    assert tokens.literal("<call>") == "<[6000]>"
    ids.looks = 0
    assert tokens.literal("a <call> b <unused00005>") == '"a " <[6000]> " b " <[5]>'
    assert ids.looks < 10


class Watched(list):
    """Tools that count how many of them are read."""

    taken = 0

    def __iter__(self):
        for each in super().__iter__():
            self.taken += 1
            yield each


def tools(count, *, notes, strict=True):
    about = {"type": "string", "enum": ["a", "b"], **notes}
    schema = {"type": "object", "properties": {f"p{it}": about for it in range(6)}, **notes}
    return [
        Tool(name=f"tool_{it}", description="d", parameters=schema, strict=strict)
        for it in range(count)
    ]


def dialect(name="hermes"):
    template = ChatTemplate(
        model_fingerprint="m",
        fingerprint="t",
        source="",
        named_tokens={},
        special_tokens=("<tool_call>",),
        added_token_ids={"<tool_call>": 7},
    )
    return find_dialect(template, tool_parser=name)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gpt_oss"])
def test_nothing_is_written_after_a_grammar_became_too_large(name):
    many, spoken = Watched(tools(512, notes={"enum": ["a" * 9000]})), dialect(name)
    grammar = AnswerGrammar(spoken.tokens)
    if spoken.family is None:
        write = partial(grammar.harmony_calls, many, other=None)
    else:
        write = partial(grammar.calls, spoken.family, many, several=True)
    with pytest.raises(TooLargeError):
        write()
    assert many.taken < 10


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gpt_oss"])
def test_what_tools_say_of_themselves_does_not_count_in_their_grammar(name):
    plans = [
        plan_answer(
            Conversation(
                messages=USER,
                tools=tuple(tools(60, notes=notes, strict=strict)),
                tool_choice=ToolChoice(mode="required"),
            ),
            dialect(name),
            prompt="",
            wanted=None,
        )
        for strict in (True, None)
        for notes in ({}, NOTES)
    ]
    assert len({it.grammar.lark for it in plans}) == 1


SCHEMA = {"type": "object", "properties": {"a": {"type": "string", **NOTES}}, **NOTES}
BARE = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "bare"),
    [
        (SCHEMA, BARE),
        ({"properties": {"title": {"title": "x"}}}, {"properties": {"title": {}}}),
        ({"$defs": {"description": {"description": "x"}}}, {"$defs": {"description": {}}}),
        ({"anyOf": [{"title": "x"}, True]}, {"anyOf": [{}, True]}),
        ({"items": {"$ref": "#/a", "description": "x"}}, {"items": {"$ref": "#/a"}}),
    ],
)
def test_notes_are_left_out_wherever_a_schema_is(schema, bare):
    assert without_notes(schema) == bare


@pytest.mark.parametrize(
    "schema",
    [
        {"const": {"title": "x"}},
        {"enum": [{"description": "x"}]},
        {"default": {"title": "x"}, "$ref": "#/default"},
        {"examples": [{"title": "x"}]},
        {"required": ["title"], "title": {"type": "string"}},
        {"properties": {"title": "no schema"}},
    ],
)
def test_what_only_looks_like_a_note_stays(schema):
    assert without_notes(schema) == schema


@pytest.mark.parametrize("lenient", [False, True])
def test_a_format_is_sent_and_measured_without_its_notes(lenient):
    format_ = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "lenient": lenient}}
    long = {**SCHEMA, "description": "d" * 70_000}
    chat = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
    format_["json_schema"]["schema"] = long
    body = parse(ChatBody, json.dumps({**chat, "response_format": format_}).encode())
    conversation = Conversation(messages=USER)
    plan = plan_answer(conversation, dialect(), prompt="", wanted=body.grammar)
    assert plan.grammar == Grammar(json_schema=BARE)
    asked = {"model": "fake", "prompt": "x", "structured_outputs": {"json": long}}
    options = parse(CompletionBody, json.dumps(asked).encode()).options()
    assert options["grammar"] == Grammar(json_schema=BARE)
    too_much = {**BARE, "enum": ["a" * 70_000]}
    format_["json_schema"]["schema"] = too_much
    with pytest.raises(RequestError, match="a schema of more than 65536 bytes"):
        parse(ChatBody, json.dumps({**chat, "response_format": format_}).encode())


def test_a_response_repeats_a_format_with_its_notes():
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    body = parse(ResponseBody, json.dumps({"model": "m", "input": "x", "text": text}).encode())
    assert body.grammar is not None
    assert body.grammar.json_schema == SCHEMA


async def test_a_grammar_of_tools_is_written_on_a_thread(monkeypatch):
    threads = []

    def watched(*arguments, **options):
        threads.append(threading.get_ident())
        return plan_answer(*arguments, **options)

    monkeypatch.setattr("paceline_gateway.generating.turns.plan_answer", watched)
    tool = {"type": "function", "function": {"name": "weather", "parameters": BARE}}
    asked = {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}
    async with gateway_over(model(CALL)) as gateway:
        answer = await gateway.post("/v1/chat/completions", **asked, tools=[tool])
    assert answer.status_code == 200, answer.text
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
