"""How a template takes what is said: as text, or in parts; and whether it takes it at all.

A name that is not there is nothing to Jinja, without a word. So a template that walks through parts
(`{% for part in message.content %}{{ part.text }}`) makes nothing of a text, one that writes a text
makes Python of parts, and one that looks for `message.text` makes nothing of either: the model then
answers whatever it likes. So each template is tried once with marked words, before the first
conversation is written by it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from paceline_gateway.schemas import Message

# No template has it, and filters that change letters' case leave it recognisable.
_MARK = "zqxvkjwp"
_WORDS = "hello"
# A part that was written as Python or JSON writes it, and not taken apart.
_AS_IT_STANDS = re.compile(r"""['"]type['"]\s*:\s*['"]text['"]""", re.IGNORECASE)


Render: TypeAlias = "Callable[[Sequence[Mapping[str, Any]]], Awaitable[Mapping[str, Any]]]"
"""Writes messages by a template: see `template_worker` for what it answers."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a template takes the contents of one role. Neither way: it leaves them out.

    Attributes:
        takes_text: Whether a content may be text.
        takes_parts: Whether it may be a list of parts.
    """

    takes_text: bool = True
    takes_parts: bool = False

    def written(self, content: str | tuple[str, ...]) -> str | list[dict[str, str]]:
        """Return a content as it is taken; as it came, if both forms are."""
        if isinstance(content, str):
            return content if self.takes_text or not self.takes_parts else _parts(content)
        return _parts(*content) if self.takes_parts else "".join(content)


@dataclass(frozen=True, slots=True)
class ContentForms:
    """How a template takes what is said.

    Attributes:
        forms: By role.
        developer_role: As whom a developer speaks: older templates know `system` alone.
        fault: What is wrong with a template that writes no conversation at all; empty else.
    """

    forms: Mapping[str, Form] = field(default_factory=dict)
    developer_role: str = "developer"
    fault: str = ""

    @property
    def left_out(self) -> tuple[str, ...]:
        """The roles of which nothing appears in a prompt."""
        return tuple(it for it, form in self.forms.items() if form == _LEFT_OUT)

    def written(self, message: Message) -> dict[str, Any]:
        """Return a message as the template takes it."""
        role = self.developer_role if message.role == "developer" else message.role
        form = self.forms.get(role, Form())
        written: dict[str, Any] = {"role": role, "content": form.written(message.content)}
        if isinstance(message.name, str):
            written["name"] = message.name
        return written


_LEFT_OUT = Form(takes_text=False, takes_parts=False)


async def find_forms(render: Render) -> ContentForms:
    """Try a template with a few short conversations."""
    answers: list[Mapping[str, Any]] = []

    async def users(content: Any) -> Mapping[str, Any]:
        """Say something first or, where a template refuses that, after a system message."""
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
    # A developer who is refused, or left out, can speak as the system, if that is heard.
    is_heard = {role: forms.get(role, _LEFT_OUT) != _LEFT_OUT for role in ("system", "developer")}
    if is_heard["developer"] or not is_heard["system"]:
        return ContentForms(forms)
    forms.pop("developer", None)
    return ContentForms(forms, developer_role="system")


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
    """Try both forms; None where neither is written: then the template says why, each time."""
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
