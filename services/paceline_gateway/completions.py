"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_gateway.chat_template import WRITTEN, write_prompt
from paceline_gateway.conversation_schemas import with_effort
from paceline_gateway.dialects.answering import check_tools, plan_answer, unheard
from paceline_gateway.errors import RequestError, naming_grammar, renamed
from paceline_gateway.generations import deliver
from paceline_gateway.json_body import parse
from paceline_gateway.rendering import ChatForm, CompletionForm, StreamedAnswer, WholeAnswer
from paceline_gateway.schemas import ChatBody, CompletionBody

if TYPE_CHECKING:
    from paceline import GenerateOptions
    from paceline_gateway.chat_template import ChatTemplates
    from paceline_gateway.connection import Connection
    from paceline_gateway.dialects.answering import Dialects
    from paceline_gateway.generations import Generations
    from paceline_gateway.orchestrators import Orchestrators


async def complete(
    connection: Connection,
    content: bytes,
    *,
    orchestrators: Orchestrators,
    generations: Generations,
) -> None:
    """Continue prompts."""
    body = parse(CompletionBody, content, ignored=connection.ignored)
    connection.translate = lambda it: renamed(it, body.given_names)
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise RequestError(
            "max_tokens: must be 1 or more, unless `echo` or `prompt_logprobs` is there",
            param="max_tokens",
        )
    model = await orchestrators.check_model(body.model)
    choices = generations.choices(
        body.prompts,
        body.options(),
        count=body.n,
        connection=connection,
        default_max_tokens=body.default_max_tokens,
    )
    answer_class = StreamedAnswer if body.stream else WholeAnswer
    answer = answer_class(connection, CompletionForm(), body, model=model)
    await deliver(choices, answer.take)
    await answer.end(choices)


async def chat(
    connection: Connection,
    content: bytes,
    *,
    orchestrators: Orchestrators,
    templates: ChatTemplates,
    dialects: Dialects,
    generations: Generations,
) -> None:
    """Continue a conversation, rendered by the model's template."""
    body = parse(ChatBody, content, ignored=connection.ignored)
    connection.translate = lambda it: renamed(it, body.given_names)
    model = await orchestrators.check_model(body.model)
    conversation = body.conversation
    template = await orchestrators.chat_template()
    dialect = dialects.of(template)
    check_tools(conversation, dialect)
    _name_unheard(body, template.source, connection)
    prompt = await write_prompt(conversation, orchestrators=orchestrators, templates=templates)
    plan = plan_answer(conversation, dialect, prompt=prompt, wanted=body.grammar)
    options: GenerateOptions = {**body.options(), **WRITTEN}
    if plan.grammar is not None:
        options["grammar"] = plan.grammar
    choices = generations.choices([prompt], options, count=body.n, connection=connection)
    answer_class = StreamedAnswer if body.stream else WholeAnswer
    answer = answer_class(connection, ChatForm(plan.new_reader), body, model=model)
    with naming_grammar(plan.reason):
        await deliver(choices, answer.take)
    await answer.end(choices)


def _name_unheard(body: ChatBody, source: str, connection: Connection) -> None:
    """Name what was asked of the template, and what the template does not know.

    Raises:
        RequestError: The gateway is strict.
    """
    effort = with_effort({}, body.reasoning_effort)
    names = [f"chat_template_kwargs.{it}" for it in unheard(body.chat_template_kwargs, source)]
    if effort and len(unheard(effort, source)) == len(effort):
        names.append("reasoning_effort")
    if names and connection.ignored is None:
        raise RequestError(
            f"{names[0]}: is not supported: the model's chat template does not know it",
            param=names[0],
            code="unsupported_parameter",
        )
    if connection.ignored is not None:
        connection.ignored += names
