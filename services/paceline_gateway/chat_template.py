"""A conversation written as a prompt by the model's own template, in a process apart."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import PacelineError, UnsupportedError
from paceline_gateway.content_forms import ContentForms, find_forms
from paceline_gateway.errors import RequestError
from paceline_gateway.special_texts import SpecialTexts
from paceline_gateway.template_processes import (
    BeyondLimitsError,
    NoProcessError,
    TemplateProcesses,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline import ChatTemplate, GenerateOptions, PromptPart
    from paceline_gateway.orchestrators import Orchestrators
    from paceline_gateway.schemas import Message

WRITTEN: GenerateOptions = {"add_special_tokens": False, "parse_special_tokens": True}
"""How a prompt is read that a template wrote: its special tokens are there. Parts say it, too."""

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_NAME_DIGITS = 12
_MOST_FORMS = 8  # models take turns in a rollout, two at a time
_MOST_HERE = 64 * 1024  # letters: looked through in a millisecond
_MOST_PROBE_BYTES = 1 << 20  # of a prompt with a few words


class ChatTemplates:
    """Renders conversations. `close` it in the end: there are processes to end."""

    def __init__(self) -> None:
        self._processes = TemplateProcesses()
        self._forms: dict[str, ContentForms] = {}  # of templates, by fingerprint
        self._looking = asyncio.Lock()

    async def prepare(self) -> None:
        """Make ready for the first conversation; without it, that one takes longer."""
        await self._processes.prepare()

    async def close(self) -> None:
        """End the processes."""
        await self._processes.close()

    async def look_at(self, template: ChatTemplate) -> ContentForms:
        """Find out, once, how a template takes what is said, and log what is wrong with it.

        Raises:
            NoProcessError: No process renders now.
        """
        async with self._looking:
            if template.fingerprint not in self._forms:
                while len(self._forms) >= _MOST_FORMS:
                    del self._forms[next(iter(self._forms))]
                self._forms[template.fingerprint] = await self._find_forms(template)
        return self._forms[template.fingerprint]

    async def render(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        *,
        most_bytes: int,
        param: str = "messages",
    ) -> str | list[PromptPart]:
        """Write a conversation as a prompt that the assistant's next turn continues.

        Where a message has the text of a special token in it, the prompt is in parts: parsed with
        the rest, it would be one, and end its own turn.

        Args:
            most_bytes: UTF-8 of the prompt at most: what orchestrators take.
            param: Which parameter the messages are.

        Raises:
            RequestError: The template refuses the conversation, leaves out what users say, has a
                fault, or needs more time, memory or space than a template may have; or no process
                renders now.
        """
        name = template.fingerprint[:_NAME_DIGITS]
        try:
            forms = await self.look_at(template)
            if "user" in forms.left_out:
                raise RequestError(
                    f"{param}: the model's chat template ({name}) leaves out users' messages: the"
                    " model would answer without them",
                    param=param,
                    code="chat_template_leaves_out",
                )
            written = [forms.written(it) for it in messages]
            size = sum(len("".join(it.content)) for it in messages)
            special = await _done(partial(SpecialTexts, template.special_tokens, written), size)
            answer = await self._answer(template, special.messages, most_bytes=most_bytes)
        except BeyondLimitsError as error:
            raise RequestError(
                f"{param}: the model's chat template ({name}) needs more than {error} for this"
                " conversation",
                param=param,
                code="chat_template_limit",
            ) from None
        except NoProcessError as error:
            raise RequestError(
                f"conversations cannot be rendered just now: {error}",
                status=503,
                kind="server_error",
                code="overloaded",
                retry_after_seconds=1,
            ) from None
        if "fault" in answer:
            raise RequestError(
                f"{param}: the model's chat template ({name}) fails: {answer['fault']}",
                param=param,
                code="chat_template_fault",
            )
        if "refusal" in answer:
            raise RequestError(
                f"{param}: the model's chat template refuses the conversation: {answer['refusal']}",
                param=param,
                code="chat_template_refusal",
            )
        return await _done(partial(special.parts, answer["text"]), len(answer["text"]))

    async def _answer(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        *,
        most_bytes: int = _MOST_PROBE_BYTES,
    ) -> Mapping[str, Any]:
        """Have a process write messages; `template_worker` says what it answers.

        Raises:
            BeyondLimitsError: The template needs too much.
            NoProcessError: No process can be had.
        """
        asked = {
            "source": template.source,
            "named_tokens": dict(template.named_tokens),
            "messages": messages,
            "add_generation_prompt": True,
            "most_bytes": most_bytes,
        }
        return await self._processes.render(asked, fingerprint=template.fingerprint)

    async def _find_forms(self, template: ChatTemplate) -> ContentForms:
        name = template.fingerprint[:_NAME_DIGITS]
        try:
            forms = await find_forms(partial(self._answer, template))
        except BeyondLimitsError as error:
            _log.warning("the model's chat template (%s) needs more than %s", name, error)
            return ContentForms()
        if forms.fault:
            _log.warning("the model's chat template (%s) fails: %s", name, forms.fault)
        for role in forms.left_out:
            _log.warning(
                "the model's chat template (%s) leaves out messages of the role %r%s",
                name,
                role,
                ": conversations are refused" if role == "user" else "",
            )
        return forms


async def write_prompt(
    messages: Sequence[Message],
    *,
    orchestrators: Orchestrators,
    templates: ChatTemplates,
    param: str = "messages",
) -> str | list[PromptPart]:
    """Write a conversation by the template that the model has now.

    Raises:
        RequestError: See `ChatTemplates.render`.
        PacelineError: The model has no template, or nobody could say.
    """
    template = await orchestrators.chat_template()
    most_bytes = await orchestrators.most_request_bytes()
    return await templates.render(template, messages, most_bytes=most_bytes, param=param)


async def look_at_template(*, orchestrators: Orchestrators, templates: ChatTemplates) -> None:
    """Say in the log, before the first conversation, what is wrong with its template."""
    try:
        await templates.look_at(await orchestrators.chat_template())
    except UnsupportedError:
        pass  # the model continues text
    except (PacelineError, NoProcessError) as error:
        _log.info("the model's chat template was not looked at yet: %s", error)


async def _done(work: Callable[[], _T], size: int) -> _T:
    """Do work on so many letters: here if they are few, else beside the loop."""
    return work() if size <= _MOST_HERE else await asyncio.to_thread(work)
