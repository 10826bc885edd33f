"""The page's data: a generation with its timeline's events, as they happen."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline import Chunk, Strategy
from paceline.errors import NoTargetError, UnsupportedError
from paceline_gateway.bodies.json_body import read
from paceline_gateway.bodies.prompt_schemas import LiveBody
from paceline_gateway.templates.chat_template import WRITTEN, write_prompt

if TYPE_CHECKING:
    from paceline import GenerateOptions, Started
    from paceline.prompts import Prompt
    from paceline_gateway.fleet.orchestrators import Orchestrators
    from paceline_gateway.generating.generations import Choice, Event, Generations
    from paceline_gateway.http.connection import Connection
    from paceline_gateway.templates.chat_template import ChatTemplates

# The strategies that the page offers.
_STRATEGIES = [
    {"name": each.value, "abbreviation": each.abbreviation}
    for each in Strategy
    if each not in {Strategy.AUTO, Strategy.UNKNOWN}
]


async def describe(
    connection: Connection, _content: bytes, *, orchestrators: Orchestrators
) -> None:
    """Send the model, whether it chats, the servers and the possible strategies."""
    info = await orchestrators.info()
    drafts_for_itself = any(each.self_draft_kind for each in info.servers)
    await connection.answer(
        {
            "model": info.model_name,
            "version": info.version,
            "fingerprint": info.model_fingerprint,
            "context_length": info.context_length,
            "chats": await _chats(orchestrators),
            "strategies": [
                each
                for each in _STRATEGIES
                if drafts_for_itself or each["name"] != Strategy.SELF_SPECULATIVE
            ],
            "servers": [
                {"name": each.name, "role": each.role, "ready": each.ready} for each in info.servers
            ],
        }
    )


async def _chats(orchestrators: Orchestrators) -> bool:
    """Whether the model has a template for conversations, as far as a target can say now."""
    try:
        await orchestrators.chat_template()
    except (UnsupportedError, NoTargetError):
        return False
    return True


async def watch(
    connection: Connection,
    content: bytes,
    *,
    orchestrators: Orchestrators,
    templates: ChatTemplates,
    generations: Generations,
) -> None:
    """Continue a prompt or a conversation; send what happens between the chunks, too."""
    body = await read(LiveBody, content, ignored=connection.ignored)
    model = await orchestrators.check_model(body.model)
    options: GenerateOptions = {**body.options(), **model.options}
    prompt: Prompt
    if body.prompt is None:
        prompt = await write_prompt(
            body.conversation, orchestrators=orchestrators, templates=templates
        )
        options = {**options, **WRITTEN}
    else:
        prompt = body.prompt
    (choice,) = generations.choices([prompt], options, count=1, connection=connection)
    await _tell(choice, connection)


async def _tell(choice: Choice, connection: Connection) -> None:
    """Send the stream's messages; `started` again after each resumption."""
    started: Started | None = None
    async with aclosing(choice.events()) as events:
        async for event in events:
            if choice.started is not started:
                if started is None:
                    await connection.begin_events()
                started = choice.started
                await connection.event(asdict(started), name="started")
            await connection.event(_fields(event), name=_name(event))
    finished = asdict(choice.finished)
    del finished["timeline"]  # was sent event by event
    await connection.event(finished, name="finished")
    await connection.end_events()


def _name(event: Event) -> str:
    return "chunk" if isinstance(event, Chunk) else "timeline"


def _fields(event: Event) -> dict[str, Any]:
    fields = asdict(event)
    if isinstance(event, Chunk):
        for name in ("logprobs", "top_logprobs", "token_bytes"):  # the page cannot request them
            del fields[name]
    return fields
