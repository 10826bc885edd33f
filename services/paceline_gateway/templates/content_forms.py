"""Finds the form in which a template takes contents: as text, in parts, or not at all.

Jinja renders an undefined name as nothing, without an error. So a template that walks through parts
(`{% for part in message.content %}{{ part.text }}`) renders a text as nothing. A template that
writes a text renders parts as Python's code. A template with `message.text` renders both as
nothing, and the model would answer without the message. So each template is tried once with marked
words before its first conversation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline_gateway.templates.tool_forms import ToolForms, find_tool_forms

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from paceline_gateway.conversations.conversation import Message

# No template contains this text, and it is recognisable after a change of case.
_MARK = "zqxvkjwp"
_WORDS = "hello"
# A part rendered as Python or JSON writes it, and not as its text.
_AS_IT_STANDS = re.compile(r"""['"]type['"]\s*:\s*['"]text['"]""", re.IGNORECASE)


Render: TypeAlias = "Callable[..., Awaitable[Mapping[str, Any]]]"
"""Renders messages by a template, with `tools` or without; `worker` tells the answers."""


@dataclass(frozen=True, slots=True)
class Form:
    """The forms in which a template takes the contents of a role; with neither it omits them.

    Attributes:
        takes_text: Whether a content may be text.
        takes_parts: Whether it may be a list of parts.
    """

    takes_text: bool = True
    takes_parts: bool = False

    def written(self, content: str | tuple[str, ...]) -> str | list[dict[str, str]]:
        """Return a content in a form that the template takes, unchanged if possible."""
        if isinstance(content, str):
            return content if self.takes_text or not self.takes_parts else _parts(content)
        return _parts(*content) if self.takes_parts else "".join(content)


@dataclass(frozen=True, slots=True)
class ContentForms:
    """The forms in which a template takes contents.

    Attributes:
        forms: By role.
        tools: The forms of tools and calls.
        developer_role: The role for a developer's messages: older templates know only `system`.
        fault: The fault of a template that renders no conversation at all; otherwise empty.
    """

    forms: Mapping[str, Form] = field(default_factory=dict)
    tools: ToolForms = field(default_factory=ToolForms)
    developer_role: str = "developer"
    fault: str = ""

    @property
    def left_out(self) -> tuple[str, ...]:
        """The roles whose contents do not appear in a prompt."""
        return tuple(it for it, form in self.forms.items() if form == _LEFT_OUT)

    def written(self, message: Message) -> dict[str, Any]:
        """Return a message in the template's form."""
        role = self.developer_role if message.role == "developer" else message.role
        content = "" if message.content is None else message.content
        written: dict[str, Any] = {"role": role, "content": self._form(role).written(content)}
        if message.name:
            written["name"] = message.name
        if message.tool_call_id:
            written["tool_call_id"] = message.tool_call_id
        if message.reasoning:
            written |= dict.fromkeys(_REASONING, message.reasoning)
        return written | self.tools.written_calls(message)

    def _form(self, role: str) -> Form:
        if role == "tool":
            in_parts = self.tools.results_in_parts
            return Form(takes_text=not in_parts, takes_parts=in_parts)
        return self.forms.get(role, Form())


_LEFT_OUT = Form(takes_text=False, takes_parts=False)
# What templates call an assistant's reasoning: the older name, the newer, and that of gpt-oss.
_REASONING = ("reasoning_content", "reasoning", "thinking")


async def find_forms(render: Render) -> ContentForms:
    """Try a template with a few short conversations."""
    answers: list[Mapping[str, Any]] = []

    async def users(content: Any) -> Mapping[str, Any]:
        """Try a user's message alone; if the template refuses it, after a system message."""
        said = {"role": "user", "content": content}
        words = _WORDS if isinstance(content, str) else _parts(_WORDS)
        for conversation in ([said], [{"role": "system", "content": words}, said]):
            answers.append(await render(conversation))
            if "text" in answers[-1]:
                break
        return answers[-1]

    user = await _form(users)
    if user is None:
        return ContentForms(fault=answers[0].get("fault", ""))
    forms = {"user": user}
    hello = {"role": "user", "content": user.written(_WORDS)}
    for role, before in (("system", []), ("developer", []), ("assistant", [hello])):
        form = await _form(partial(_say, render, role, before=before, after=[hello]))
        if form is not None:
            forms[role] = form
    # If the role `developer` is refused or left out, `system` replaces it, if that one is taken.
    is_heard = {role: forms.get(role, _LEFT_OUT) != _LEFT_OUT for role in ("system", "developer")}
    tools = await find_tool_forms(render, hello)
    if is_heard["developer"] or not is_heard["system"]:
        return ContentForms(forms, tools)
    forms.pop("developer", None)
    return ContentForms(forms, tools, developer_role="system")


async def _say(
    render: Render,
    role: str,
    content: Any,
    *,
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
) -> Mapping[str, Any]:
    return await render([*before, {"role": role, "content": content}, *after])


async def _form(say: Callable[[Any], Awaitable[Mapping[str, Any]]]) -> Form | None:
    """Try both forms; None if the template refuses both, so that its own error is reported."""
    answers = [await say(_MARK), await say(_parts(_MARK))]
    if not any("text" in it for it in answers):
        return None
    takes_text, takes_parts = map(_has_mark, answers)
    takes_parts = takes_parts and not _AS_IT_STANDS.search(answers[1]["text"])
    if "text" not in answers[0] and not takes_parts:
        return None
    return Form(takes_text=takes_text, takes_parts=takes_parts)


def _has_mark(answer: Mapping[str, Any]) -> bool:
    return _MARK in answer.get("text", "").lower()


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]
