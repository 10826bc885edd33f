"""A conversation written as a prompt, by the model's own template, in a sandbox."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline_gateway.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Template

    from paceline import ChatTemplate, GenerateOptions
    from paceline_gateway.bodies import Message

__all__ = ["WRITTEN", "ChatTemplates"]

WRITTEN: GenerateOptions = {"add_special_tokens": False, "parse_special_tokens": True}
"""How a prompt is read that a template wrote: its special tokens are there."""


class ChatTemplates:
    """Renders conversations; keeps the last template compiled."""

    def __init__(self) -> None:
        self._compiled: tuple[str, Template] | None = None

    async def render(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        *,
        param: str = "messages",
        first: str = "",
    ) -> str:
        """Write a conversation as a prompt that the assistant's next turn continues.

        A message with the text of a special token is refused: parsed with the rest, it would be
        one, and end its own turn.

        Args:
            param: Which parameter the messages are.
            first: Which one the first of them is, if that is another.

        Raises:
            RequestError: The template refuses the conversation, or a message could forge one.
        """
        for index, message in enumerate(messages):
            place = f"{param}[{index - bool(first)}].content" if index or not first else first
            for special in template.special_tokens:
                if special in message.content:
                    raise RequestError(
                        f"{place}: has {special!r} in it, which is a special token"
                        " of the model: what is said cannot hold one",
                        param=place,
                    )
        try:
            return await asyncio.to_thread(self._render, template, messages)
        except Exception as error:
            reason = str(error) if isinstance(error, TemplateError) else type(error).__name__
            raise RequestError(
                f"{param}: the model's chat template refuses it: {reason}", param=param
            ) from error

    def _render(self, template: ChatTemplate, messages: Sequence[Message]) -> str:
        compiled = self._compiled  # another thread may put another one there
        if compiled is None or compiled[0] != template.fingerprint:
            compiled = (template.fingerprint, _environment().from_string(template.source))
            self._compiled = compiled
        return compiled[1].render(
            messages=[{"role": it.role, "content": it.content} for it in messages],
            add_generation_prompt=True,
            tools=None,
            documents=None,
            **template.named_tokens,
        )


def _environment() -> ImmutableSandboxedEnvironment:
    """Make what templates beside models expect: whitespace, loop controls, four names more."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
