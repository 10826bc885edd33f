"""An assistant's turn in a conversation: its prompt, its generation, and what reads it.

Messages and responses answer with one turn; chat plans turns here, and may generate several.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from paceline_gateway.dialects.answering import check_tools, plan_answer, unheard
from paceline_gateway.errors import RequestError, naming_grammar
from paceline_gateway.generating.generations import deliver
from paceline_gateway.templates.chat_template import WRITTEN, write_prompt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from paceline import Chunk, GenerateOptions, Grammar, PromptPart
    from paceline_gateway.conversations.answer_parts import AnswerPart, AnswerReader
    from paceline_gateway.conversations.conversation import Conversation
    from paceline_gateway.dialects.answering import Plan
    from paceline_gateway.dialects.dialect import Dialect, Dialects
    from paceline_gateway.fleet.orchestrators import Orchestrators
    from paceline_gateway.generating.generations import Choice, Generations
    from paceline_gateway.http.connection import Connection
    from paceline_gateway.templates.chat_template import ChatTemplates

_COUNT_SECONDS = 30.0

TakeParts: TypeAlias = "Callable[[Sequence[AnswerPart]], Awaitable[None]]"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that is generated.

    Attributes:
        choice: Its generation.
        options: How it is generated, with the defaults.
        reader: Reads it.
        reason: See `Plan`.
        limits_thought: See `Plan`.
    """

    choice: Choice
    options: GenerateOptions
    reader: AnswerReader
    reason: str | None
    limits_thought: bool

    async def deliver(self, take: TakeParts) -> None:
        """Generate the turn; hand over its parts as they become certain.

        `take` is called at the first chunk, with parts or none, so that an answer can begin.

        Raises:
            RequestError: The request's tools or format cannot be enforced.
            Exception: The generation or `take` failed.
        """

        async def read(_choice: Choice, chunk: Chunk | None) -> None:
            await take(self.reader.finish() if chunk is None else self.reader.read(chunk))

        with naming_grammar(self.reason):
            await deliver([self.choice], read)


class Turns:
    """Begins turns.

    Args:
        orchestrators: Know the model and its template.
        templates: Write prompts.
        dialects: Know how the model writes calls and reasoning.
        generations: Make generations.
    """

    def __init__(
        self,
        *,
        orchestrators: Orchestrators,
        templates: ChatTemplates,
        dialects: Dialects,
        generations: Generations,
    ) -> None:
        self.orchestrators = orchestrators
        self._templates = templates
        self._dialects = dialects
        self._generations = generations

    async def write(
        self, conversation: Conversation, *, param: str = "messages"
    ) -> str | list[PromptPart]:
        """Write a conversation as the prompt of its next turn.

        Args:
            param: The name of the messages' parameter.

        Raises:
            RequestError: The model's template does not take the conversation, or its tools.
            PacelineError: The model has no template, or no orchestrator answered.
        """
        # First the template: without tools in it, knowing how calls are written would not help.
        prompt = await write_prompt(
            conversation,
            orchestrators=self.orchestrators,
            templates=self._templates,
            param=param,
        )
        check_tools(conversation, await self._dialect())
        return prompt

    async def count(self, conversation: Conversation) -> int:
        """Count the tokens of a conversation's prompt.

        Raises:
            RequestError: See `write`.
            PacelineError: See `write`; or the prompt has more tokens than the context.
        """
        prompt = await self.write(conversation)
        found = await self.orchestrators.client.tokenize(
            prompt,
            add_special_tokens=WRITTEN["add_special_tokens"],
            parse_special_tokens=WRITTEN["parse_special_tokens"],
            timeout=_COUNT_SECONDS,
        )
        return len(found.token_ids)

    async def plan(
        self, conversation: Conversation, *, wanted: Grammar | None, param: str = "messages"
    ) -> tuple[str | list[PromptPart], Plan]:
        """Write the prompt of a conversation's next turn, and plan the answer.

        Args:
            wanted: What the request says that the turn follows.
            param: The name of the messages' parameter.

        Raises:
            RequestError: See `write`; or tools and format do not go together.
            PacelineError: See `write`.
        """
        prompt = await self.write(conversation, param=param)
        plan = partial(
            plan_answer, conversation, await self._dialect(), prompt=prompt, wanted=wanted
        )
        # Writing a grammar of many tools takes 20 ms, for which no other request waits.
        return prompt, await asyncio.to_thread(plan) if conversation.tools else plan()

    async def begin(
        self,
        connection: Connection,
        conversation: Conversation,
        options: GenerateOptions,
        *,
        wanted: Grammar | None,
        param: str = "messages",
    ) -> Turn:
        """Prepare a turn; `Turn.deliver` generates it.

        Args:
            options: How it is generated; the grammar is replaced where tools or reasoning need it.
            wanted: What the request says that the turn follows.
            param: The name of the messages' parameter.

        Raises:
            RequestError: See `plan`.
            PacelineError: See `plan`.
        """
        prompt, plan = await self.plan(conversation, wanted=wanted, param=param)
        options = self._generations.completed({**options, **WRITTEN})
        if plan.grammar is not None:
            options["grammar"] = plan.grammar
        (choice,) = self._generations.choices([prompt], options, count=1, connection=connection)
        return Turn(
            choice, options, plan.new_reader(), plan.reason, limits_thought=plan.limits_thought
        )

    async def unheard(self, names: Iterable[str]) -> bool:
        """Whether the model's template knows none of these names."""
        asked = list(names)
        template = await self.orchestrators.chat_template()
        return bool(asked) and len(unheard(asked, template.source)) == len(asked)

    async def reasons(self) -> bool:
        """Whether the model marks its reasoning."""
        dialect = await self._dialect()
        return dialect.is_harmony or dialect.reasoning is not None

    async def _dialect(self) -> Dialect:
        return self._dialects.of(await self.orchestrators.chat_template())


def leave_out(names: Mapping[str, bool], connection: Connection) -> None:
    """Name parameters that make no difference here, as with unknown fields.

    Args:
        names: The parameters, and whether each was asked for.

    Raises:
        RequestError: The gateway is strict, and one was asked for.
    """
    asked = [name for name, is_asked in names.items() if is_asked]
    if connection.ignored is not None:
        connection.ignored += [it for it in asked if it not in connection.ignored]
    elif asked:
        raise RequestError(
            f"{asked[0]}: is not supported: it makes no difference here",
            param=asked[0],
            code="unsupported_parameter",
        )
