"""Finds the form in which a template takes tools, calls and results, or that it leaves them out.

As with contents (`content_forms`), a template that does not know tools renders none, without an
error, and the model would answer as if there were none. Templates also differ in two things that no
request tells: some write a call's arguments as an object (`arguments | tojson`), others as the text
that they are; and some write calls only where the content is null, others only where it is text.
So each template is tried with marked words.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from paceline_gateway.conversations.conversation import Message, Tool, ToolCall

# Marked words that no template contains; each says what was rendered.
_OFFERED, _CALLED, _ARGUMENT, _RESULT = (f"zqxvkjwp{letter}" for letter in "abcd")
_CALL_ID = "zqxvkjwpe"  # of nine letters, as some templates demand


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForms:
    """How a template takes what belongs to tools.

    Attributes:
        takes_tools: Whether it writes the tools.
        takes_calls: Whether it writes the assistant's calls.
        takes_results: Whether it writes the results of calls.
        has_objects: Whether a call's arguments are an object; otherwise text.
        has_null: Whether the content of a message with nothing but calls is null; otherwise empty.
        results_in_parts: Whether a result is a list of parts; otherwise text.
    """

    takes_tools: bool = True
    takes_calls: bool = True
    takes_results: bool = True
    has_objects: bool = True
    has_null: bool = False
    results_in_parts: bool = False

    def written_call(self, call: ToolCall) -> dict[str, Any]:
        """Return a call in the template's form; arguments that are no object stay text."""
        found = call.argument_object if self.has_objects else None
        arguments = call.arguments if found is None else found
        function = {"name": call.name, "arguments": arguments}
        written = {"type": "function", "function": function}
        return {"id": call.id, **written} if call.id else written

    def written_calls(self, message: Message) -> dict[str, Any]:
        """Return the fields of an assistant's message that has calls, beside those of any."""
        if not message.tool_calls:
            return {}
        calls = [self.written_call(it) for it in message.tool_calls]
        return {"tool_calls": calls} | ({} if message.content else self._no_content)

    @property
    def _no_content(self) -> dict[str, Any]:
        return {"content": None if self.has_null else ""}


def written_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates take it: as in OpenAI's interface, with what was told of it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = dict(tool.parameters)
    return {"type": "function", "function": function}


async def find_tool_forms(
    render: Callable[..., Awaitable[Mapping[str, Any]]], said: Mapping[str, Any]
) -> ToolForms:
    """Try a template.

    Args:
        render: Renders messages, with `tools` beside them.
        said: A user's message that the template takes.
    """
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    function = {"name": _OFFERED, "description": "a", "parameters": schema}
    tools = [{"type": "function", "function": function}]

    async def rendered(messages: Sequence[Mapping[str, Any]]) -> str:
        answer = await render(messages, tools=tools)
        return str(answer.get("text", ""))

    async def call(*, has_objects: bool, has_null: bool) -> list[Mapping[str, Any]]:
        arguments = {"a": _ARGUMENT} if has_objects else f'{{"a": "{_ARGUMENT}"}}'
        function = {"name": _CALLED, "arguments": arguments}
        made = {"id": _CALL_ID, "type": "function", "function": function}
        content = None if has_null else ""
        return [said, {"role": "assistant", "content": content, "tool_calls": [made]}]

    def result(content: Any) -> Mapping[str, Any]:
        return {"role": "tool", "content": content, "name": _CALLED, "tool_call_id": _CALL_ID}

    takes_tools = _OFFERED in await rendered([said])
    for has_objects, has_null in product((True, False), (False, True)):
        called = await call(has_objects=has_objects, has_null=has_null)
        # Several templates want a call's result behind it.
        text = await rendered([*called, result(_RESULT)])
        in_parts = _RESULT not in text
        if in_parts:
            text = await rendered([*called, result([{"type": "text", "text": _RESULT}])])
        if _is_written_once(text):
            return ToolForms(
                takes_tools=takes_tools,
                takes_results=_RESULT in text,
                has_objects=has_objects,
                has_null=has_null,
                results_in_parts=in_parts and _RESULT in text,
            )
    called = [said, {"role": "assistant", "content": "a"}, result(_RESULT)]
    takes_results = _RESULT in await rendered(called)
    return ToolForms(takes_tools=takes_tools, takes_calls=False, takes_results=takes_results)


def _is_written_once(text: str) -> bool:
    """Whether a call is in a prompt, as JSON that is not quoted a second time."""
    return _CALLED in text and _ARGUMENT in text and f'\\"{_ARGUMENT}' not in text
