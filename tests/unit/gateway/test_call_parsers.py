"""Calls, reasoning and content are found in an answer's text, the same for any cut of it."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_gateway.conversations.answer_parts import Answer, ArgumentsDelta, ToolCallBegin
from paceline_gateway.conversations.conversation import Tool
from paceline_gateway.dialects.call_parser import CallParser
from paceline_gateway.dialects.family import FAMILIES, Shape, Tags
from paceline_gateway.dialects.harmony import ENDS, MARKS, MESSAGE, HarmonyParser
from paceline_gateway.dialects.reader import PartsParser
from paceline_gateway.dialects.reasoning import REASONINGS, ReasoningParser, Stage, stage_after
from support.written_calls import written_calls

BY_NAME = {it.name: it for it in FAMILIES}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = (Tool(name="weather", parameters=SCHEMA), Tool(name="now"))
ARGUMENTS = {"city": "K\u00f6ln } \" ' ] )\n{", "n": [1, {"x": None}], "y": {"z": -0.5}}


def parser_of(family, **more):
    return PartsParser(None, CallParser(family, TOOLS, **more))


def read(parser, *pieces):
    """Return the answer in these pieces, without the calls' random ids."""
    parts = [part for piece in pieces for part in parser.feed(piece)]
    answer = Answer.of([*parts, *parser.finish()])
    calls = [(it.name, it.arguments) for it in answer.tool_calls]
    return answer.reasoning, answer.content, calls


def cut_up(text, places):
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize("name", BY_NAME)
def test_calls_are_found_with_their_names_ids_and_arguments(name):
    family = BY_NAME[name]
    text = written_calls(family, [("weather", ARGUMENTS), ("now", {}), ("weather", {"n": 1})])
    said = "" if family.starts_answer else "Let me see."
    parser = parser_of(family)
    parts = [*parser.feed(f"{said}\n\n{text}\n"), *parser.finish()]
    answer = Answer.of(parts)
    assert (answer.content, answer.reasoning) == (said, "")
    assert [it.name for it in answer.tool_calls] == ["weather", "now", "weather"]
    assert [json.loads(it.arguments) for it in answer.tool_calls] == [ARGUMENTS, {}, {"n": 1}]
    begins = [it for it in parts if isinstance(it, ToolCallBegin)]
    assert [it.index for it in begins] == [0, 1, 2] == [*range(parser.call_count)]
    assert len({it.id for it in begins}) == 3


def fragments_of(family):
    """Return texts of which a call of the family can be made, or nearly."""
    whole = written_calls(family, [("weather", ARGUMENTS), ("now", {})])
    texts = [it for it in family.texts() if it]
    halves = [it[: len(it) // 2] for it in texts] + [it[len(it) // 2 :] for it in texts]
    others = [
        "weather",
        "functions.now:0",
        "{",
        "}",
        '"',
        "\\",
        " ",
        "\n",
        "a",
        "(",
        ")",
        ", ",
        "[1]",
    ]
    objects = ['{"name": "now", "id": 1, "arguments": "{}"}', '{"parameters": {}, "name": "now"}']
    return [whole, *texts, *halves, *others, *objects]


@given(st.sampled_from(FAMILIES), st.data())
def test_the_parts_are_the_same_for_any_cut_and_without_a_call_nothing_is_lost(family, data):
    fragments = st.lists(st.sampled_from(fragments_of(family)), max_size=12)
    text = "".join(data.draw(fragments))
    whole = read(parser_of(family), text)
    assert read(parser_of(family), *text) == whole
    places = data.draw(st.lists(st.integers(0, 1000), max_size=6))
    assert read(parser_of(family), *cut_up(text, places)) == whole
    _, content, calls = whole
    if not calls:
        assert content == text


@pytest.mark.parametrize("name", BY_NAME)
def test_a_call_that_is_cut_is_told_as_far_as_it_was_there(name):
    family = BY_NAME[name]
    text = written_calls(family, [("weather", {"city": "Bonn", "n": 1})])
    whole = '{"city": "Bonn", "n": 1}'
    seen = set()
    for end in range(len(text) + 1):
        _, content, calls = read(parser_of(family), text[:end])
        if not calls:
            assert content == text[:end]
            continue
        ((called, arguments),) = calls
        assert (called, content) == ("weather", "")
        assert whole.startswith(arguments)
        seen.add(arguments)
    assert whole in seen
    assert len(seen) > 2


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_cut_of_a_demanded_call_is_never_content(name):
    family = BY_NAME[name]
    text = written_calls(family, [("weather", {"city": "Bonn", "n": 1})])
    seen = set()
    for end in range(len(text) + 1):
        parser = parser_of(family, is_demanded=True)
        _, content, calls = read(parser, text[:end])
        assert content == ""
        seen.update(calls)
        assert [name for name, _ in calls] in ([], ["weather"])
        is_whole = [arguments for _, arguments in calls] == ['{"city": "Bonn", "n": 1}']
        assert parser.is_within_call == (bool(calls) and not is_whole)
    assert ("weather", "") in seen  # from where its name is certain


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>{"arguments":{"n":1},"name":"now"}</tool_call>', ['{"n": 1}']),
        ("hermes", '<tool_call>{"name":"now","arguments":"{\\"n\\":1}"}</tool_call>', ['{"n":1}']),
        ("hermes", '<tool_call> { "name" : "now" , "arguments" : null } </tool_call>', ["{}"]),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": {}, "id": {"a": 1}}</tool_call>',
            ["{}"],
        ),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}', ["{}"]),
        ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>', ["{}"]),
        ("mistral", '[TOOL_CALLS]now{"n": 1}', ['{"n": 1}']),
        ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', ["{}"]),
        ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', ["{}"]),
        ("qwen3_coder", "<tool_call><function=now></function></tool_call>", ["{}"]),
        ("glm45", "<tool_call>now</tool_call>", ["{}"]),
        (
            "pythonic",
            "[now(n=None, ok=True, x='a, b)')]",
            ['{"n": null, "ok": true, "x": "a, b)"}'],
        ),
    ],
)
def test_calls_that_are_not_written_quite_as_they_should_be_are_calls(name, text, calls):
    assert read(parser_of(BY_NAME[name]), text) == ("", "", [("now", it) for it in calls])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Use <tool_call> to call; end with </tool_call>."),
        ("hermes", '<tool_call>\n{"title": "no call"}\n</tool_call>'),
        ("hermes", "a <tool_call"),
        ("mistral", "[TOOL_CALLS] are written so."),
        ("llama3_json", '{"name": "Anna", "age": 7}'),
        ("llama3_json", 'Call {"name": "now", "parameters": {}}'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[see(above)] for more"),
        ("deepseek_v31", "a < b \uff5c c"),
        ("glm45", "<tool_call>what is this?</tool_call>"),
    ],
)
def test_what_only_looks_like_a_call_is_content(name, text):
    assert read(parser_of(BY_NAME[name]), *text) == ("", text, [])


def test_values_in_tags_are_what_the_schema_says():
    family = BY_NAME["glm45"]
    text = written_calls(family, [("weather", {"city": "123", "n": 5, "other": "true"})])
    assert read(parser_of(family), text)[2] == [
        ("weather", '{"city": "123", "n": 5, "other": true}')
    ]


def test_numbers_that_json_lacks_are_texts():
    family = BY_NAME["glm45"]
    text = written_calls(family, [("weather", {"n": "NaN", "other": "[1e999]"})])
    assert read(parser_of(family), text)[2] == [("weather", '{"n": "NaN", "other": "[1e999]"}')]


def test_values_whose_tags_say_what_they_are_are_that():
    family = BY_NAME["deepseek_v32"]
    text = written_calls(family, [("weather", {"city": 5, "n": "5", "other": "\ntrue\n"})])
    assert read(parser_of(family), text)[2] == [
        ("weather", '{"city": 5, "n": "5", "other": "\\ntrue\\n"}')
    ]


def test_arguments_come_piece_by_piece_where_a_family_writes_json():
    parser = parser_of(BY_NAME["hermes"])
    text = written_calls(BY_NAME["hermes"], [("now", {"city": "Bonn"})])
    deltas = [part for letter in text for part in parser.feed(letter)]
    pieces = [it.text for it in deltas if isinstance(it, ArgumentsDelta)]
    assert len(pieces) == len('{"city": "Bonn"}')


@pytest.mark.parametrize("name", BY_NAME)
def test_of_calls_that_must_not_be_parallel_the_first_is_told(name):
    family = BY_NAME[name]
    text = written_calls(family, [("weather", {"n": 1}), ("now", {})])
    assert read(parser_of(family, most_calls=1), *text) == ("", "", [("weather", '{"n": 1}')])


@pytest.mark.parametrize("reasoning", REASONINGS, ids=lambda it: it.name)
def test_reasoning_is_apart_from_what_follows_it(reasoning):
    def parsed(text, stage=Stage.UNKNOWN):
        calls = CallParser(BY_NAME["hermes"], TOOLS)
        return read(PartsParser(ReasoningParser(reasoning, stage), calls), *text)

    call = written_calls(BY_NAME["hermes"], [("now", {})])
    opened, closed = reasoning.open, reasoning.close
    thought = f"{opened}\nwell, a < b\n\n{closed}\n\n"
    assert parsed(f"{thought}Yes. ") == ("well, a < b", "Yes. ", [])
    assert parsed(f"\n{thought}{call}") == ("well, a < b", "", [("now", "{}")])
    assert parsed(f"hm\n{closed}ok", Stage.REASONING) == ("hm", "ok", [])
    assert parsed("hm\n", Stage.REASONING) == ("hm", "", [])
    assert parsed(f"{opened}hm {closed[:-1]}") == (f"hm {closed[:-1]}", "", [])
    assert parsed(f" no {opened}hm{closed}") == ("", f" no {opened}hm{closed}", [])
    assert parsed(" < 5") == ("", " < 5", [])
    assert parsed("\n\nok", Stage.ANSWER) == ("", "ok", [])
    for end, stage in ((opened, Stage.REASONING), (f"{opened}\n\n{closed}\n\n", Stage.ANSWER)):
        assert stage_after(f"user: {closed}\nassistant:\n{end}\n", reasoning) is stage
    assert stage_after(f"{opened} assistant:", reasoning) is Stage.UNKNOWN


@given(
    st.sampled_from(REASONINGS),
    st.lists(
        st.sampled_from(
            ["<", "think", "/", "[", "THINK", "]", ">", " ", "\n", "a", "OPEN", "CLOSE"]
        )
    ),
    st.sampled_from(Stage),
    st.lists(st.integers(0, 100), max_size=4),
)
def test_reasoning_is_the_same_for_any_cut(reasoning, pieces, stage, places):
    text = "".join({"OPEN": reasoning.open, "CLOSE": reasoning.close}.get(it, it) for it in pieces)
    results = [
        read(PartsParser(ReasoningParser(reasoning, stage), None), *cut)
        for cut in ([text], text, cut_up(text, places))
    ]
    assert results[0] == results[1] == results[2]
    bare = [it for it in "".join(results[0][:2]) if not it.isspace()]
    assert len(bare) >= len("".join(text.split())) - len(reasoning.open + reasoning.close)


HARMONY = (
    "<|channel|>analysis<|message|>It wants the weather.<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Bonn"}<|call|>'
)


def test_channels_are_reasoning_content_and_calls():
    expected = ("It wants the weather.", "I look.", [("weather", '{"city": "Bonn"}')])
    assert read(HarmonyParser(), HARMONY) == read(HarmonyParser(), *HARMONY) == expected
    final = "<|channel|>final<|message|>It is <b>5</b>.<|return|>"
    assert read(HarmonyParser(), *final) == ("", "It is <b>5</b>.", [])
    assert read(HarmonyParser(), "plain") == ("", "plain", [])
    older = "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    assert read(HarmonyParser(), older) == ("", "", [("now", "{}")])


def test_a_call_in_a_channel_is_whole_once_its_arguments_are():
    brace = HARMONY.index("}")
    for end in (*range(HARMONY.index("{"), brace + 2), len(HARMONY)):
        parser = HarmonyParser()
        read(parser, HARMONY[:end])
        assert parser.is_within_call == (end <= brace)


@given(
    st.lists(
        st.sampled_from([*sorted(MARKS), "analysis", "final", " to=functions.now ", "a", "<|", " "])
    ),
    st.lists(st.integers(0, 100), max_size=4),
)
def test_channels_are_the_same_for_any_cut(pieces, places):
    text = f"<|channel|>analysis{MESSAGE}" + "".join(pieces)
    whole = read(HarmonyParser(), text)
    assert whole == read(HarmonyParser(), *text) == read(HarmonyParser(), *cut_up(text, places))


def test_the_records_of_families_are_whole():
    for family in FAMILIES:
        assert family.starts_answer or family.opening
        assert not isinstance(family.arguments, Tags) or family.arguments.value_close.strip()
        assert family.arguments is not Shape.PYTHON or family.starts_answer
        names = family.new_id(0, "now")
        assert family.new_id(1, "now") != names
    for text in BY_NAME["mistral"].new_id(0, "a"), BY_NAME["mistral_list"].new_id(0, "a"):
        assert len(text) == 9
        assert set(text) <= set(string.ascii_letters + string.digits)
    assert set(ENDS) <= MARKS


def test_gemmas_values_are_read_by_their_marks():
    mark = '<|"|>'
    text = (
        f"I look.<|tool_call>call:weather{{city:{mark}a}},b: [{mark},n:2,ok:true,"
        f"x:{{a:[1,{mark}q:r{mark}],{mark}b c{mark}:null}},y:hm}}<tool_call|>"
    )
    found = {"city": "a},b: [", "n": 2, "ok": True, "x": {"a": [1, "q:r"], "b c": None}, "y": "hm"}
    for pieces in ([text], [*text]):
        reasoning, content, ((name, arguments),) = read(parser_of(BY_NAME["gemma4"]), *pieces)
        assert (reasoning, content, name) == ("", "I look.", "weather")
        assert json.loads(arguments) == found


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ('a:"x, y",b:2', {"a": "x, y", "b": 2}),
        ('a:"x, y:z}",b:["]","\\"}"]', {"a": "x, y:z}", "b": ["]", '"}']}),
        ("a:hello, world,b:1", {"a": "hello, world", "b": 1}),
        ('a:5" wide, b:1', {"a": '5" wide', "b": 1}),
        ('a:1, 2, c d:3,<|"|>e f<|"|>:4', {"a": "1, 2, c d:3", "e f": 4}),
        ("a:1,odd key:x,b:2,", {"a": 1, "odd key": "x", "b": 2}),
        ("a:]x,b:2", {"a": "]x", "b": 2}),
        ("a:[1,2", {"a": "[1,2"}),
        ("a:{b:[1,2]", {"a": {"b": [1, 2]}}),
        ("a:hello, :) 1,b:1", {"a": "hello, :) 1", "b": 1}),
        ('a:"x,b:2', {"a": '"x,b:2'}),
        ("a:NaN,b:-Infinity,c:1e999", {"a": "NaN", "b": "-Infinity", "c": "1e999"}),
        ('a:[NaN],"b":x', {"a": "[NaN]", "b": "x"}),
        ('a:<|"|><tool_call|>}<|"|>', {"a": "<tool_call|>}"}),
        ("", {}),
    ],
)
def test_gemmas_arguments_lose_no_text_and_are_json_and_end(written, found):
    tool = Tool(name="f", parameters={"properties": {"odd key": {}}})
    text = f"<|tool_call>call:f{{{written}}}<tool_call|> Behind."
    for pieces in ([text], [*text], [text[:20], text[20:]]):
        _, content, ((_, arguments),) = read(CallParser(BY_NAME["gemma4"], [tool]), *pieces)
        assert content.strip() == "Behind."
        assert json.loads(arguments, parse_constant=pytest.fail) == found


def test_gemmas_arguments_end_without_their_brace():
    text = "<|tool_call>call:f{a:{b:1}<tool_call|> Behind."
    for pieces in ([text], [*text]):
        _, content, ((_, arguments),) = read(parser_of(BY_NAME["gemma4"]), *pieces)
        assert (content.strip(), json.loads(arguments)) == ("Behind.", {"a": {"b": 1}})


@given(
    st.lists(st.sampled_from(["a:", "b", ",", '"', "\\", "{", "[", "]", " ", "1", "NaN", "<"])),
    st.lists(st.integers(0, 99)),
)
def test_gemmas_arguments_are_json_that_ends_whatever_is_written(written, places):
    text = f"<|tool_call>call:f{{{''.join(written)}}}<tool_call|>Behind."
    whole = read(parser_of(BY_NAME["gemma4"]), text)
    assert whole == read(parser_of(BY_NAME["gemma4"]), *text)
    assert whole == read(parser_of(BY_NAME["gemma4"]), *cut_up(text, places))
    _, content, ((_, arguments),) = whole
    assert content == "Behind."
    json.loads(arguments, parse_constant=pytest.fail)
