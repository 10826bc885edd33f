"""What a demanded answer follows is what its parser reads, for every family and every tokenizer."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer

from paceline import ChatTemplate, Grammar
from paceline_contract.sampling import Grammar as EngineGrammar
from paceline_contract.sampling import GrammarKind
from paceline_engine.deciding.grammars import GrammarCompiler
from paceline_gateway.conversations.answer_parts import Answer
from paceline_gateway.conversations.conversation import Conversation, Message, Tool, ToolChoice
from paceline_gateway.dialects import harmony
from paceline_gateway.dialects.answering import plan_answer
from paceline_gateway.dialects.dialect import find_dialect
from paceline_gateway.dialects.enforceable import enforceable
from paceline_gateway.dialects.family import FAMILIES
from paceline_gateway.dialects.names import ReasoningParser, ToolParser
from paceline_gateway.dialects.reasoning import REASONINGS
from paceline_gateway.errors import RequestError
from support.fake_text import byte_tokenizer
from support.written_calls import written_calls

END = "<|eos|>"
BY_NAME = {it.name: it for it in FAMILIES}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bo", "K\u00f6 a"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER, NOW = Tool(name="weather", parameters=SCHEMA), Tool(name="now", parameters={**SCHEMA})
STRICT = Tool(name="weather", parameters=SCHEMA, strict=True)
GOOD = [("weather", {"city": "Bo", "n": 1})]
WRONG = [("weather", {"city": "Bo", "n": 12})]
UNKNOWN = [("other", {"city": "Bo"})]


class Model:
    """A model whose marks are special tokens, added tokens, or only text."""

    def __init__(self, name, kind="special", *, thinks=False):
        self.family = BY_NAME.get(name)
        texts = sorted(harmony.MARKS) if self.family is None else [*self.family.texts()]
        marks = [it.strip() for it in texts if it.strip()[:1] in "<[" and len(it.strip()) > 4]
        marks = [it for it in marks if "=" not in it and it.endswith((">", "]"))]
        if any("DSML" in it for it in texts):
            marks = ["\uff5cDSML\uff5c"]  # a token within the marks
        marks += ["<think>", "</think>"]
        self.tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
        self.tokenizer.add_special_tokens([END])
        if kind != "text":
            is_special = kind == "special"
            self.tokenizer.add_tokens([AddedToken(it, special=is_special) for it in marks])
        decoder = self.tokenizer.get_added_tokens_decoder()
        self.added = {it.content: token_id for token_id, it in decoder.items()}
        self.special = tuple(it.content for it in decoder.values() if it.special)
        self.size = self.tokenizer.get_vocab_size()
        self.name, self.thinks = name, thinks

    def plan(self, *tools, mode="required", wanted=None, prompt="", **more):
        template = ChatTemplate(
            model_fingerprint="m",
            fingerprint="t",
            source="</think>" if self.thinks else "",
            named_tokens={},
            special_tokens=self.special,
            added_token_ids=self.added,
        )
        dialect = find_dialect(template, tool_parser=self.name)
        choice = more.pop("tool_choice", ToolChoice(mode=mode))
        conversation = Conversation(
            messages=(Message(role="user", content="x"),), tools=tools, tool_choice=choice, **more
        )
        return plan_answer(conversation, dialect, prompt=prompt, wanted=wanted)

    def path(self, plan):
        compiler = GrammarCompiler(
            self.tokenizer.to_str().encode(),
            vocabulary_size=self.size,
            eos_token_ids=[self.added[END]],
        )
        return compiler.path(EngineGrammar(GrammarKind.LARK, plan.grammar.lark))

    def takes(self, plan, text):
        """Tell whether an answer may be this, to its end."""
        path = self.path(plan)
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        path.add(tokens)
        return path.length == len(tokens) and bool(path.allowed()[self.added[END]])

    def random_answer(self, plan, seed):
        """Answer at random by the grammar, and read it."""
        source, path, tokens = random.Random(seed), self.path(plan), []
        while len(tokens) < 3000:
            allowed = path.allowed()
            tokens.append(source.choice(allowed.nonzero()[0].tolist()))
            if tokens[-1] == self.added[END]:
                return self.tokenizer.decode(tokens[:-1], skip_special_tokens=False)
            path.add(tokens[-1:])
            assert path.length == len(tokens)
        raise AssertionError(self.tokenizer.decode(tokens))


KINDS = ("special", "added", "text")
LOOSE = {"gemma4", "pythonic"}
"""The families whose values have no schema."""

STRICT_ONES = [it.name for it in FAMILIES if it.name not in LOOSE]


def answer_of(plan, text):
    # As the gateway sees it where marks are no special tokens.
    from paceline_gateway.dialects.reader import DialectReader

    reader = plan.new_reader()
    assert isinstance(reader, DialectReader)
    parser = reader._parser
    return Answer.of([*parser.feed(text), *parser.finish()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_demanded_call_is_one_that_the_parser_reads(name, kind):
    model = Model(name, kind)
    plan = model.plan(WEATHER, NOW)
    text = model.random_answer(plan, name)
    answer = answer_of(plan, text)
    assert answer.content == ""
    assert answer.tool_calls
    for call in answer.tool_calls:
        assert call.name in {"weather", "now"}
        found = json.loads(call.arguments)
        if name not in LOOSE:
            assert found.keys() <= {"city", "n"}
            assert found.get("n", 0) in range(10)
            assert found["city"] in {"Bo", "K\u00f6 a"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STRICT_ONES)
def test_calls_follow_the_choice_the_schemas_and_whether_there_may_be_several(name, kind):
    model = Model(name, kind)
    family = model.family
    one, two = written_calls(family, GOOD), written_calls(family, GOOD * 2)
    wrong, unknown = written_calls(family, WRONG), written_calls(family, UNKNOWN)
    of_now = written_calls(family, [("now", {"city": "Bo"})])
    required = model.plan(WEATHER, NOW)
    assert model.takes(required, one)
    assert model.takes(required, two)
    assert model.takes(required, of_now)
    for refused in (wrong, unknown, "", "no"):
        assert not model.takes(required, refused)
    single = model.plan(WEATHER, NOW, parallel_tool_calls=False)
    assert (model.takes(single, one), model.takes(single, two)) == (True, False)
    named = model.plan(WEATHER, NOW, tool_choice=ToolChoice(mode="required", names=("weather",)))
    assert (model.takes(named, one), model.takes(named, of_now)) == (True, False)
    loose = model.plan(Tool(name="weather", parameters=SCHEMA, strict=False))
    if not hasattr(family.arguments, "key_open"):
        assert model.takes(loose, wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STRICT_ONES)
def test_with_a_strict_tool_an_answer_is_text_or_calls_that_are_right(name, kind):
    model = Model(name, kind)
    family = model.family
    one, two = written_calls(family, GOOD), written_calls(family, GOOD * 2)
    plan = model.plan(STRICT, mode="auto")
    before = "" if family.starts_answer else "Let me < see.\n"
    for taken in ("", "Hello [you] <b>", before + one, before + two):
        assert model.takes(plan, taken), taken
    for refused in (written_calls(family, WRONG), written_calls(family, UNKNOWN)):
        assert not model.takes(plan, before + refused)
    single = model.plan(STRICT, mode="auto", parallel_tool_calls=False)
    assert model.takes(single, before + one)
    assert not model.takes(single, before + two)
    assert model.plan(WEATHER, mode="auto").grammar is None
    allowed = model.plan(WEATHER, NOW, tool_choice=ToolChoice(mode="auto", names=("now",)))
    assert not model.takes(allowed, before + one)


@pytest.mark.parametrize("kind", KINDS)
def test_reasoning_may_be_before_what_is_demanded(kind):
    model = Model("hermes", kind, thinks=True)
    one = written_calls(model.family, GOOD)
    plan = model.plan(WEATHER)
    for taken in (one, f"<think>\nhm\n</think>\n\n{one}", f"\n<think></think>{one}"):
        assert model.takes(plan, taken), taken
    assert not model.takes(plan, f"<think>{one}")
    opened = model.plan(WEATHER, prompt="<|im_start|>assistant\n<think>\n")
    assert model.takes(opened, f"hm\n</think>\n\n{one}")
    assert not model.takes(opened, one)
    closed = model.plan(WEATHER, prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert model.takes(closed, one)
    assert not model.takes(closed, f"<think></think>{one}")


@pytest.mark.parametrize("kind", ["special", "added"])
@pytest.mark.parametrize("is_free", [False, True])
def test_reasoning_ends_after_so_many_tokens(kind, is_free):
    model = Model("hermes", kind, thinks=True)
    answer = "Hi <tool_call>" if is_free else written_calls(model.family, GOOD)
    tools = {"mode": "auto"} if is_free else {}
    for most in (0, 1, 7):
        plan = model.plan(WEATHER, most_thought=most, **tools)
        assert plan.limits_thought
        thought = "\n" * most  # one token each
        assert model.takes(plan, f"<think>{thought}</think>\n\n{answer}")
        assert not model.takes(plan, f"<think>{thought}\n</think>\n\n{answer}")
        assert model.takes(plan, answer), "it need not think"
        assert not model.takes(plan, f"{answer}<think>{thought}\n</think>"), "nor begin again"
        opened = model.plan(WEATHER, most_thought=most, prompt="<think>\n", **tools)
        assert model.takes(opened, f"{thought}</think>{answer}")
        assert not model.takes(opened, f"{thought}\n</think>{answer}")
        path = model.path(opened)
        path.add(model.tokenizer.encode("\n" * (most + 3)).ids)
        assert path.length == most
        assert path.allowed().nonzero()[0].tolist() == [model.added["</think>"]]


def test_no_limit_of_reasoning_is_lowered_to_less_than_a_long_context():
    model = Model("hermes", thinks=True)
    for most, kept in ((20_000_000, 20_000_000), ((1 << 32) - 1, (1 << 31) - 1)):
        plan = model.plan(WEATHER, most_thought=most)
        assert f"{{0,{kept}}}" in plan.grammar.lark
        thought = "\n" * 20
        assert model.takes(plan, f"<think>{thought}</think>\n\n{written_calls(model.family, GOOD)}")


def test_reasoning_that_is_over_does_not_begin_again_where_it_is_limited():
    model = Model("hermes", thinks=True)
    plan = model.plan(mode="none", most_thought=3, prompt="<think>\n\n</think>\n\n")
    assert model.takes(plan, "Hi")
    assert not model.takes(plan, "<think>Hi</think>")


def test_a_limit_of_reasoning_stands_before_a_format():
    model = Model("hermes", thinks=True)
    wanted = Grammar(json_schema=SCHEMA)
    for soft in (True, False):
        plan = model.plan(mode="none", wanted=wanted, most_thought=2, limits_free_thought=not soft)
        assert (plan.limits_thought, plan.reason) == (True, "response_format")
        assert model.takes(plan, '<think>\n\n</think>{"city": "Bo"}')
        assert not model.takes(plan, '<think>\n\n\n</think>{"city": "Bo"}')


def test_gpt_oss_thinks_so_many_tokens_before_what_is_demanded():
    model = Model("gpt_oss")
    plan = model.plan(WEATHER, most_thought=2)
    begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bo"}'
    assert plan.limits_thought
    assert model.takes(plan, f"{begin}\n\n{end}{call}")
    assert not model.takes(plan, f"{begin}\n\n\n{end}{call}")


def test_a_limit_of_reasoning_that_cannot_hold_is_refused_or_left_out():
    text = Model("hermes", "text", thinks=True)
    for model in (text, Model("gpt_oss")):
        with pytest.raises(RequestError) as refused:
            model.plan(mode="none", most_thought=2)
        assert refused.value.body["error"]["param"] == "thinking_token_budget"
    for model in (text, Model("gpt_oss"), Model("hermes", thinks=True)):
        soft = model.plan(mode="none", most_thought=2, limits_free_thought=False)
        assert (soft.grammar, soft.limits_thought) == (None, False)
    never = Model("hermes").plan(mode="none", most_thought=2)
    assert (never.grammar, never.limits_thought) == (None, False)


@pytest.mark.parametrize(
    ("wanted", "good"),
    [
        (Grammar(json_schema=SCHEMA), '{"city": "Bo"}'),
        (Grammar(json_schema=json.dumps(SCHEMA)), '{"city": "Bo"}'),
        (Grammar(regex="a/b|c"), "a/b"),
        (Grammar(choices=["yes", 'no "q"']), 'no "q"'),
    ],
)
def test_a_format_begins_behind_the_reasoning(wanted, good):
    model = Model("hermes", thinks=True)
    plan = model.plan(mode="none", wanted=wanted)
    assert model.takes(plan, good)
    assert model.takes(plan, f"<think>\nhm\n</think>\n\n{good}")
    assert not model.takes(plan, f"<think>\nhm\n</think>\n\n{good}x")
    assert not model.takes(plan, f"hm{good}")
    assert model.plan(mode="none", wanted=wanted, prompt="<think></think>").grammar == wanted
    assert Model("hermes").plan(mode="none", wanted=wanted).grammar == wanted


def test_beside_tools_an_answer_has_its_format_or_is_a_call():
    model = Model("hermes")
    wanted = Grammar(json_schema={"type": "object", "properties": {"x": {"type": "integer"}}})
    plan = model.plan(WEATHER, mode="auto", wanted=wanted)
    assert model.takes(plan, '{"x": 1}')
    assert model.takes(plan, written_calls(model.family, GOOD))
    assert not model.takes(plan, "hello")
    for other, unlike, param in (
        (model, Grammar(regex="a"), "structured_outputs"),
        (Model("llama3_json"), wanted, "response_format"),
    ):
        with pytest.raises(RequestError) as refused:
            other.plan(WEATHER, mode="auto", wanted=unlike)
        assert refused.value.body["error"]["param"] == param
    demanded = Model("llama3_json").plan(WEATHER, wanted=wanted)
    assert Model("llama3_json").takes(demanded, written_calls(BY_NAME["llama3_json"], GOOD))


def test_gpt_oss_thinks_and_then_calls_or_answers():
    model = Model("gpt_oss")
    think = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bo"}'
    final = "<|channel|>final<|message|>"
    required = model.plan(WEATHER)
    assert model.takes(required, call)
    assert model.takes(required, think + call)
    assert not model.takes(required, f"{think}{final}hello")
    free = model.plan(STRICT, mode="auto")
    assert model.takes(free, think + call)
    assert model.takes(free, f"{think}{final}hello")
    assert not model.takes(free, call.replace("Bo", "Bonn"))
    formatted = model.plan(mode="none", wanted=Grammar(json_schema=SCHEMA))
    assert model.takes(formatted, f'{think}{final}{{"city": "Bo"}}')
    assert not model.takes(formatted, f"{think}{final}hello")


@pytest.mark.parametrize("name", sorted(LOOSE))
def test_a_strict_tool_whose_form_has_no_grammar_of_values_is_refused(name):
    with pytest.raises(RequestError) as refused:
        Model(name).plan(STRICT)
    error = refused.value.body["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")


def test_tools_that_are_too_large_lose_their_schemas_unless_they_are_strict():
    about = {"type": "object", "properties": {"a": {"enum": ["x" * 9000]}}}
    many = [Tool(name=f"t{it}", parameters=about) for it in range(9)]
    model = Model("hermes")
    assert model.takes(model.plan(*many), written_calls(model.family, [("t1", {"b": 1})]))
    with pytest.raises(RequestError) as refused:
        model.plan(*(Tool(name=it.name, parameters=about, strict=True) for it in many))
    assert refused.value.body["error"]["param"] == "tools"


@pytest.mark.parametrize(
    "about",
    [
        {"not": {"type": "string"}},
        {"type": "string", "format": "phone"},
        {"oneOf": [{"type": "string"}, {"minLength": 1}]},
        {"$ref": "#/$defs/none"},
        {"$ref": "https://example.com/schema"},
        {"type": "string", "pattern": "(?=a)b"},
        {"uniqueItems": True},
        {"type": "any"},
        {"type": []},
        {"enum": []},
        {"minimum": "1"},
        {"properties": []},
        {"items": [{"type": "string"}]},
    ],
)
def test_a_told_schema_that_is_not_sure_to_be_enforced_is_any_object(about):
    schema = {"type": "object", "properties": {"a": about}}
    assert enforceable(schema) is None
    model = Model("hermes")
    plan = model.plan(Tool(name="weather", parameters=schema))
    assert model.takes(plan, written_calls(model.family, [("weather", {"b": [1]})]))


def test_arguments_that_are_not_listed_are_not_written_unless_the_schema_allows_them():
    model = Model("hermes")
    text = written_calls(model.family, [("weather", {"a": 1, "b": 2})])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for more, is_taken in (({}, False), ({"additionalProperties": True}, True)):
        for strict in (None, True):
            plan = model.plan(Tool(name="weather", parameters=schema | more, strict=strict))
            assert model.takes(plan, text) is is_taken


def test_a_told_schema_that_is_sure_to_be_enforced_is():
    defs = {"P": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}
    schema = {
        "$schema": "nonsense",
        "$id": "https://example.com/x",
        "title": "T",
        "type": "object",
        "$defs": defs,
        "properties": {
            "p": {"anyOf": [{"$ref": "#/$defs/P"}, {"type": "null"}], "default": None},
            "q": {"type": "array", "items": {"type": "string", "pattern": "^a+$"}, "maxItems": 2},
            "r": {"type": ["integer", "null"], "minimum": 1, "description": "d"},
            "s": {"allOf": [{"$ref": "#/$defs/P"}]},
            "t": {"type": "string", "format": "date", "examples": ["x"]},
        },
        "additionalProperties": False,
    }
    model = Model("hermes")
    plan = model.plan(Tool(name="weather", parameters=schema))
    whole = {"p": {"x": 1}, "q": ["a"], "r": None, "s": {"x": 2}, "t": "2026-01-31"}
    for arguments, is_taken in (
        (whole, True),
        ({}, True),
        ({"p": None}, True),
        ({"p": {}}, False),
        ({"q": ["b"]}, False),
        ({"r": 0}, False),
        ({"t": "today"}, False),
        ({"z": 1}, False),
    ):
        text = written_calls(model.family, [("weather", arguments)])
        assert model.takes(plan, text) is is_taken, arguments


def test_settings_name_every_dialect():
    tools, reasonings = ToolParser.__args__, ReasoningParser.__args__
    assert set(tools) == {"auto", "none", harmony.NAME, *BY_NAME}
    assert set(reasonings) == {"auto", "none", harmony.NAME, *(it.name for it in REASONINGS)}
