"""A conversation written as a prompt by the model's own template, in a process apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_gateway.errors import RequestError
from paceline_gateway.template_processes import (
    BeyondLimitsError,
    NoProcessError,
    TemplateProcesses,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import ChatTemplate, GenerateOptions
    from paceline_gateway.bodies import Message

__all__ = ["WRITTEN", "ChatTemplates"]

WRITTEN: GenerateOptions = {"add_special_tokens": False, "parse_special_tokens": True}
"""How a prompt is read that a template wrote: its special tokens are there."""

_NAME_DIGITS = 12


class ChatTemplates:
    """Renders conversations. `close` it in the end: there are processes to end."""

    def __init__(self) -> None:
        self._processes = TemplateProcesses()

    async def prepare(self) -> None:
        """Make ready for the first conversation; without it, that one takes longer."""
        await self._processes.prepare()

    async def close(self) -> None:
        """End the processes."""
        await self._processes.close()

    async def render(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        *,
        most_bytes: int,
        param: str = "messages",
        first: str = "",
    ) -> str:
        """Write a conversation as a prompt that the assistant's next turn continues.

        A message with the text of a special token is refused: parsed with the rest, it would be
        one, and end its own turn.

        Args:
            most_bytes: UTF-8 of the prompt at most: what orchestrators take.
            param: Which parameter the messages are.
            first: Which one the first of them is, if that is another.

        Raises:
            RequestError: The template refuses the conversation, or needs more time, memory or
                space than a template may have; a message could forge a special token; or no process
                renders now.
        """
        _refuse_special_tokens(template, messages, param=param, first=first)
        asked = {
            "source": template.source,
            "named_tokens": dict(template.named_tokens),
            "most_bytes": most_bytes,
            "messages": [{"role": it.role, "content": it.content} for it in messages],
            "add_generation_prompt": True,
        }
        try:
            answer = await self._processes.render(asked, fingerprint=template.fingerprint)
        except BeyondLimitsError as error:
            name = template.fingerprint[:_NAME_DIGITS]
            raise RequestError(
                f"{param}: the model's chat template ({name}) needs more for this than {error}",
                param=param,
                code="chat_template_limit",
            ) from None
        except NoProcessError as error:
            raise RequestError(
                f"conversations cannot be written just now: {error}",
                status=503,
                kind="server_error",
                code="overloaded",
                retry_after_seconds=1,
            ) from None
        if "fault" in answer:
            name = template.fingerprint[:_NAME_DIGITS]
            raise RequestError(
                f"{param}: the model's chat template ({name}) fails: {answer['fault']}",
                param=param,
                code="chat_template_fault",
            )
        if "refusal" in answer:
            raise RequestError(
                f"{param}: the model's chat template refuses it: {answer['refusal']}",
                param=param,
                code="chat_template_refusal",
            )
        text: str = answer["text"]
        return text


def _refuse_special_tokens(
    template: ChatTemplate, messages: Sequence[Message], *, param: str, first: str
) -> None:
    for index, message in enumerate(messages):
        place = f"{param}[{index - bool(first)}].content" if index or not first else first
        for special in template.special_tokens:
            if special in message.content:
                raise RequestError(
                    f"{place}: has {special!r} in it, which is a special token"
                    " of the model: what is said cannot hold one",
                    param=place,
                )
