"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_gateway.chat_template import WRITTEN, write_prompt
from paceline_gateway.errors import RequestError
from paceline_gateway.generations import deliver
from paceline_gateway.json_body import parse
from paceline_gateway.rendering import ChatForm, CompletionForm, StreamedAnswer, WholeAnswer
from paceline_gateway.schemas import ChatBody, CompletionBody

if TYPE_CHECKING:
    from paceline_gateway.chat_template import ChatTemplates
    from paceline_gateway.connection import Connection
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
    generations: Generations,
) -> None:
    """Continue a conversation, rendered by the model's template."""
    body = parse(ChatBody, content, ignored=connection.ignored)
    model = await orchestrators.check_model(body.model)
    if body.conversation.offered_tools:
        raise RequestError("tools: is not supported", param="tools", code="unsupported_parameter")
    prompt = await write_prompt(body.conversation, orchestrators=orchestrators, templates=templates)
    choices = generations.choices(
        [prompt], {**body.options(), **WRITTEN}, count=body.n, connection=connection
    )
    answer_class = StreamedAnswer if body.stream else WholeAnswer
    answer = answer_class(connection, ChatForm(), body, model=model)
    await deliver(choices, answer.take)
    await answer.end(choices)
