"""What chat says of messages, tools and choices is one conversation, or refused by name."""

from __future__ import annotations

import json

import pytest

from paceline_gateway.bodies.completion_schemas import ChatBody
from paceline_gateway.bodies.conversation_schemas import MOST_TOOLS
from paceline_gateway.bodies.json_body import parse
from paceline_gateway.conversations.conversation import Message, Tool, ToolCall, ToolChoice
from paceline_gateway.errors import RequestError

USER = {"role": "user", "content": "hi"}


def tool(name="a", **more):
    return {"type": "function", "function": {"name": name, **more}}


def call(arguments="{}", **more):
    return {
        "id": "1",
        "type": "function",
        "function": {"name": "a", "arguments": arguments},
        **more,
    }


def calling(*calls, **more):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def read(*messages, ignored=None, **more):
    body = {"model": "m", "messages": list(messages or [USER]), **more}
    return parse(ChatBody, json.dumps(body).encode(), ignored=ignored).conversation


def refusal_of(*messages, **more):
    with pytest.raises(RequestError) as refused:
        read(*messages, **more)
    return refused.value.body["error"]


def test_messages_of_all_roles_are_read():
    read_ones = read(
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "u"}], "name": "n"},
        calling(call('{"x": 1}'), call({"y": 2}), reasoning_content="because"),
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "assistant", "reasoning": "more"},
    ).messages
    assert read_ones == (
        Message(role="developer", content="d"),
        Message(role="user", content=("u",), name="n"),
        Message(
            role="assistant",
            content=None,
            reasoning="because",
            tool_calls=(ToolCall("1", "a", '{"x": 1}'), ToolCall("1", "a", '{"y": 2}')),
        ),
        Message(role="tool", content="r", tool_call_id="1"),
        Message(role="assistant", content=None, reasoning="more"),
    )


def test_a_calls_arguments_are_an_object_if_they_are_one():
    deep = '{"x": ' * 900 + "1" + "}" * 900
    texts = ('{"x": 1}', "", " ", "[1]", "{", "1", deep)
    found = [ToolCall("", "a", it).argument_object for it in texts]
    assert found == [{"x": 1}, {}, {}, None, None, None, None]


def test_tools_are_read_and_those_that_may_be_called_follow_from_the_choice():
    schema = {"type": "object", "properties": {}}
    tools = [tool("a", description="d", parameters=schema, strict=True), tool("b")]
    a, b = Tool(name="a", description="d", parameters=schema, strict=True), Tool(name="b")
    allowed = {"mode": "auto", "tools": [tool("b")]}
    for choice, mode, offered, callable_ones in (
        ("auto", "auto", (a, b), (a, b)),
        ("none", "none", (), ()),
        ("required", "required", (a, b), (a, b)),
        (tool("b"), "required", (a, b), (b,)),
        ({"type": "function", "name": "b"}, "required", (a, b), (b,)),
        ({"type": "allowed_tools", "allowed_tools": allowed}, "auto", (a, b), (b,)),
        ({"type": "allowed_tools", **allowed}, "auto", (a, b), (b,)),
    ):
        found = read(tools=tools, tool_choice=choice)
        assert found.tool_choice.mode == mode
        assert (found.offered_tools, found.callable_tools) == (offered, callable_ones)
    assert read(tools=tools).tool_choice == ToolChoice(mode="auto")


@pytest.mark.parametrize(
    ("messages", "more", "param"),
    [
        ([{"role": "assistant", "content": None}], {}, "messages[0].content"),
        ([USER, {"role": "tool"}], {}, "messages[1].content"),
        ([{**USER, "tool_calls": [call()]}], {}, "messages[0].tool_calls"),
        ([{**USER, "reasoning_content": "x"}], {}, "messages[0].reasoning_content"),
        ([{**USER, "tool_call_id": "x"}], {}, "messages[0].tool_call_id"),
        ([calling(call(1))], {}, "messages[0].tool_calls[0].function.arguments"),
        ([calling(call(type="custom"))], {}, "messages[0].tool_calls[0].type"),
        ([calling(*[call()] * 513)], {}, "messages[0].tool_calls"),
        ([], {"tools": "a"}, "tools"),
        ([], {"tools": [{"type": "function"}]}, "tools[0].function"),
        ([], {"tools": [tool("")]}, "tools[0].function.name"),
        ([], {"tools": [tool("a b")]}, "tools[0].function.name"),
        ([], {"tools": [tool("a" * 129)]}, "tools[0].function.name"),
        ([], {"tools": [tool("a"), tool("a")]}, "tools"),
        ([], {"tools": [tool(f"a{it}") for it in range(MOST_TOOLS + 1)]}, "tools"),
        ([], {"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ([], {"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ([], {"tools": [tool(parameters={"title": "a" * 65536})]}, "tools[0].function.parameters"),
        ([], {"tool_choice": "required"}, "tool_choice"),
        ([], {"tool_choice": "any", "tools": [tool()]}, "tool_choice"),
        ([], {"tool_choice": tool("b"), "tools": [tool("a")]}, "tool_choice"),
        ([], {"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice"),
        ([], {"tool_choice": {"type": "allowed_tools"}, "tools": [tool()]}, "tool_choice"),
        ([], {"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ([], {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ([], {"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ([], {"chat_template_kwargs": {f"a{it}": 1 for it in range(65)}}, "chat_template_kwargs"),
    ],
)
def test_what_is_wrong_or_too_much_is_refused_by_its_place(messages, more, param):
    error = refusal_of(*messages, **more)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_a_deep_schema_is_refused_by_its_place():
    schema = {}
    for _ in range(70):
        schema = {"items": schema}
    assert refusal_of(tools=[tool(parameters=schema)])["param"] == "tools[0].function.parameters"


def test_tools_of_unknown_kinds_are_left_out_and_named():
    ignored: list[str] = []
    tools = [{"type": "web_search"}, tool("a"), {"type": "custom", "custom": {}}, tool("b")]
    found = read(tools=tools, tool_choice=tool("b"), ignored=ignored, cache_salt="x")
    assert [it.name for it in found.tools] == ["a", "b"]
    assert sorted(ignored) == ["cache_salt", "tools[0]", "tools[2]"]
    error = refusal_of(tools=tools)
    assert (error["param"], error["code"]) == ("tools[0]", "unsupported_parameter")
