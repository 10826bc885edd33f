"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_gateway.chat_template import WRITTEN
from paceline_gateway.generations import deliver
from paceline_gateway.json_body import parse
from paceline_gateway.rendering import ChatForm, CompletionForm, StreamedAnswer, WholeAnswer
from paceline_gateway.schemas import ChatBody, CompletionBody

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import GenerateOptions
    from paceline_gateway.connection import Connection
    from paceline_gateway.gateway import Gateway
    from paceline_gateway.parameter_types import Prompt
    from paceline_gateway.rendering import Form
    from paceline_gateway.schemas import Body

__all__ = ["chat", "complete"]


async def complete(
    gateway: Gateway, connection: Connection, content: bytes, request_id: str
) -> None:
    """Continue prompts."""
    body = parse(CompletionBody, content)
    await _generate(
        gateway,
        connection,
        body,
        CompletionForm(),
        model=await gateway.model(body.model),
        prompts=body.prompts,
        request_id=request_id,
    )


async def chat(gateway: Gateway, connection: Connection, content: bytes, request_id: str) -> None:
    """Continue a conversation, as the model's template writes it."""
    body = parse(ChatBody, content)
    model = await gateway.model(body.model)
    template = await gateway.orchestrators.chat_template()
    most_bytes = await gateway.orchestrators.most_request_bytes()
    prompt = await gateway.templates.render(template, body.messages, most_bytes=most_bytes)
    await _generate(
        gateway,
        connection,
        body,
        ChatForm(),
        model=model,
        prompts=[prompt],
        request_id=request_id,
        written=WRITTEN,
    )


async def _generate(
    gateway: Gateway,
    connection: Connection,
    body: Body,
    form: Form,
    *,
    model: str,
    prompts: Sequence[Prompt],
    request_id: str,
    written: GenerateOptions | None = None,
) -> None:
    options = body.options()
    options.update(written or {})
    choices = gateway.choices(
        prompts,
        options,
        count=body.n,
        request_id=request_id,
        connection=connection,
        default_max_tokens=body.default_max_tokens,
    )
    answer_class = StreamedAnswer if body.stream else WholeAnswer
    answer = answer_class(connection, form, body, request_id=request_id, model=model)
    await deliver(choices, answer.take)
    await answer.end(choices)
