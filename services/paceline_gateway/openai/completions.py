"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_gateway.bodies.completion_schemas import ChatBody, CompletionBody
from paceline_gateway.bodies.conversation_schemas import with_effort
from paceline_gateway.bodies.json_body import read
from paceline_gateway.errors import RequestError, naming_grammar, renamed
from paceline_gateway.generating.generations import deliver
from paceline_gateway.generating.turns import leave_out
from paceline_gateway.openai.forms import ChatForm, CompletionForm
from paceline_gateway.openai.rendering import StreamedAnswer, WholeAnswer
from paceline_gateway.templates.chat_template import WRITTEN

if TYPE_CHECKING:
    from paceline import GenerateOptions
    from paceline_gateway.fleet.orchestrators import Orchestrators
    from paceline_gateway.generating.generations import Generations
    from paceline_gateway.generating.turns import Turns
    from paceline_gateway.http.connection import Connection


async def complete(
    connection: Connection,
    content: bytes,
    *,
    orchestrators: Orchestrators,
    generations: Generations,
) -> None:
    """Continue prompts."""
    body = await read(CompletionBody, content, ignored=connection.ignored)
    connection.translate = lambda it: renamed(it, body.given_names)
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise RequestError(
            "max_tokens: must be 1 or more, unless `echo` or `prompt_logprobs` is there",
            param="max_tokens",
        )
    model = await orchestrators.check_model(body.model)
    choices = generations.choices(
        body.prompts,
        {**body.options(), **model.options},
        count=body.n,
        connection=connection,
        default_max_tokens=body.default_max_tokens,
    )
    answer_class = StreamedAnswer if body.stream else WholeAnswer
    answer = answer_class(connection, CompletionForm(), body, model=model.name)
    await deliver(choices, answer.take)
    await answer.end(choices)


async def chat(
    connection: Connection, content: bytes, *, turns: Turns, generations: Generations
) -> None:
    """Continue a conversation, rendered by the model's template."""
    body = await read(ChatBody, content, ignored=connection.ignored)
    connection.translate = lambda it: renamed(it, body.given_names)
    model = await turns.orchestrators.check_model(body.model)
    leave_out(await _unheard(body, turns), connection)
    prompt, plan = await turns.plan(body.conversation, wanted=body.grammar)
    is_limit_unheard = body.thinking_token_budget is not None and not plan.limits_thought
    leave_out({"thinking_token_budget": is_limit_unheard}, connection)
    options: GenerateOptions = {**body.options(), **model.options, **WRITTEN}
    if plan.grammar is not None:
        options["grammar"] = plan.grammar
    choices = generations.choices([prompt], options, count=body.n, connection=connection)
    answer_class = StreamedAnswer if body.stream else WholeAnswer
    answer = answer_class(connection, ChatForm(plan.new_reader), body, model=model.name)
    with naming_grammar(plan.reason):
        await deliver(choices, answer.take)
    await answer.end(choices)


async def _unheard(body: ChatBody, turns: Turns) -> dict[str, bool]:
    """Tell what was asked of the template that the template does not know."""
    asked = {f"chat_template_kwargs.{it}": [it] for it in body.chat_template_kwargs}
    asked["reasoning_effort"] = [*with_effort({}, body.reasoning_effort)]
    return {name: await turns.unheard(options) for name, options in asked.items()}
