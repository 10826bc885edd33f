"""Renders a conversation as a prompt by the model's own template, in a separate process."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import PacelineError, UnsupportedError
from paceline_gateway.errors import RequestError
from paceline_gateway.templates.content_forms import ContentForms, find_forms
from paceline_gateway.templates.processes import (
    BeyondLimitsError,
    NoProcessError,
    TemplateProcesses,
)
from paceline_gateway.templates.special_texts import SpecialTexts, texts_in
from paceline_gateway.templates.tool_forms import written_tool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline import ChatTemplate, GenerateOptions, PromptPart
    from paceline_gateway.conversations.conversation import Conversation, Message
    from paceline_gateway.fleet.orchestrators import Orchestrators
    from paceline_gateway.templates.tool_forms import ToolForms

WRITTEN: GenerateOptions = {"add_special_tokens": False, "parse_special_tokens": True}
"""How a template's prompt is tokenized: it has its special tokens. Parts have their own flag."""

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_NAME_DIGITS = 12
_MOST_FORMS = 8  # in a rollout there are two models
# What stands behind a text that is continued, to find where the template ends it.
_END_MARK = "zqxvkjwpend"
_MOST_HERE = 64 * 1024  # letters: searched in a millisecond
_MOST_PROBE_BYTES = 1 << 20  # of a prompt with a few words


class ChatTemplates:
    """Renders conversations. Call `close` at the end: it ends processes."""

    def __init__(self) -> None:
        self._processes = TemplateProcesses()
        self._forms: dict[str, ContentForms] = {}  # by the template's fingerprint
        self._looking = asyncio.Lock()

    async def prepare(self) -> None:
        """Start a process before the first conversation, which would take longer otherwise.

        A conversation that comes meanwhile waits for this process, and starts no second one.
        """
        async with self._looking:
            await self._processes.prepare()

    async def close(self) -> None:
        """End the processes."""
        await self._processes.close()

    async def look_at(self, template: ChatTemplate) -> ContentForms:
        """Find out, once, in which form a template takes contents, and log its faults.

        Raises:
            NoProcessError: No process is available now.
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
        conversation: Conversation,
        *,
        most_bytes: int,
        param: str = "messages",
    ) -> str | list[PromptPart]:
        """Render a conversation as a prompt that the assistant's next turn continues.

        If a message has the text of a special token in it, the prompt is in parts. Parsed with the
        rest, the text would become a special token, and could end its turn.

        Args:
            most_bytes: Most UTF-8 bytes of the prompt: the orchestrators' limit.
            param: The name of the messages' parameter.

        Raises:
            RequestError: The template refuses the conversation, leaves out users' messages, has a
                fault, or needs more time, memory or space than allowed; or no process is available.
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
            _check_tools(conversation, forms.tools, template=name, param=param)
            _check_options(conversation, template)
            written = [forms.written(it) for it in _with_names(conversation.messages)]
            if conversation.continues_last:
                written[-1]["content"] = _marked(written[-1]["content"])
            others = {
                "add_generation_prompt": conversation.opens_answer
                and not conversation.continues_last,
                "tools": [written_tool(it) for it in conversation.offered_tools],
                "options": dict(conversation.template_options),
            }
            size = sum(map(len, texts_in([written, others])))
            special = await _done(
                partial(SpecialTexts, template.special_tokens, written, others), size
            )
            answer = await self._answer(
                template, special.messages, most_bytes=most_bytes, **special.others
            )
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
        text: str = answer["text"]
        if conversation.continues_last:
            text, mark, _ = text.rpartition(_END_MARK)
            if not mark:
                raise _leaves_out(f"{param}[{len(written) - 1}]", "what is continued", name)
        return await _done(partial(special.parts, text), len(text))

    async def _answer(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        *,
        most_bytes: int = _MOST_PROBE_BYTES,
        **others: Any,
    ) -> Mapping[str, Any]:
        """Have a process render messages; `worker` describes its answers.

        Args:
            others: `tools`, `options`, and `add_generation_prompt`, which is true otherwise.

        Raises:
            BeyondLimitsError: The template needs more than allowed.
            NoProcessError: No process is available.
        """
        asked = {
            "source": template.source,
            "named_tokens": dict(template.named_tokens),
            "messages": messages,
            "add_generation_prompt": True,
            "most_bytes": most_bytes,
            **others,
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
    conversation: Conversation,
    *,
    orchestrators: Orchestrators,
    templates: ChatTemplates,
    param: str = "messages",
) -> str | list[PromptPart]:
    """Render a conversation by the model's current template.

    Raises:
        RequestError: See `ChatTemplates.render`.
        PacelineError: The model has no template, or no orchestrator answered.
    """
    template = await orchestrators.chat_template()
    most_bytes = await orchestrators.most_request_bytes()
    return await templates.render(template, conversation, most_bytes=most_bytes, param=param)


async def look_at_template(*, orchestrators: Orchestrators, templates: ChatTemplates) -> None:
    """Log the faults of the model's template before the first conversation."""
    try:
        await templates.look_at(await orchestrators.chat_template())
    except UnsupportedError:
        pass  # the model has no template
    except (PacelineError, NoProcessError) as error:
        _log.info("the model's chat template was not looked at yet: %s", error)
    except Exception:  # noqa: BLE001 - the gateway serves without this look
        _log.exception("the model's chat template could not be looked at")


def _check_tools(
    conversation: Conversation, forms: ToolForms, *, template: str, param: str
) -> None:
    """Refuse what the template leaves out: the model would answer without it.

    Raises:
        RequestError: The template leaves out tools, calls or results that are in the conversation.
    """
    if conversation.offered_tools and not forms.takes_tools:
        raise _leaves_out("tools", "tools", template)
    for index, message in enumerate(conversation.messages):
        if message.tool_calls and not forms.takes_calls:
            raise _leaves_out(f"{param}[{index}].tool_calls", "calls of tools", template)
        if message.role == "tool" and not forms.takes_results:
            raise _leaves_out(f"{param}[{index}].role", "results of tools", template)


def _leaves_out(param: str, what: str, template: str) -> RequestError:
    return RequestError(
        f"{param}: the model's chat template ({template}) leaves out {what}",
        param=param,
        code="unsupported_parameter",
    )


def _check_options(conversation: Conversation, template: ChatTemplate) -> None:
    """Keep the template's own names from being replaced.

    Raises:
        RequestError: A name is that of a token.
    """
    for name in conversation.template_options:
        if name in template.named_tokens:
            raise RequestError(
                f"chat_template_kwargs: cannot have the name {name!r}: it is a token of the model",
                param="chat_template_kwargs",
            )


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Give results the names of their tools, which some templates write.

    Some models number the calls of each answer anew, so a result's call is the last one before it.
    """
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls if call.id}
        is_unnamed = message.role == "tool" and not message.name
        name = names.get(message.tool_call_id) if is_unnamed else None
        named.append(message if name is None else replace(message, name=name))
    return named


def _marked(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    """Put the mark behind a content."""
    if isinstance(content, str):
        return content + _END_MARK
    return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END_MARK}]


async def _done(work: Callable[[], _T], size: int) -> _T:
    """Do work on so many letters: at once if they are few, otherwise on a thread."""
    return work() if size <= _MOST_HERE else await asyncio.to_thread(work)
