"""/tokenize and /detokenize, in vLLM's form, and /version."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from paceline_gateway.bodies.json_body import read
from paceline_gateway.bodies.prompt_schemas import DetokenizeBody, TokenizeBody
from paceline_gateway.generating.told_tokens import name_of
from paceline_gateway.templates.chat_template import WRITTEN, write_prompt

if TYPE_CHECKING:
    from paceline.generation import Tokens
    from paceline.prompts import Prompt
    from paceline_gateway.fleet.orchestrators import Orchestrators
    from paceline_gateway.http.connection import Connection
    from paceline_gateway.templates.chat_template import ChatTemplates

_SECONDS = 30.0
# So many are named and written within some milliseconds.
_FEW_TOKENS = 8192


async def tokenize(
    connection: Connection,
    content: bytes,
    *,
    orchestrators: Orchestrators,
    templates: ChatTemplates,
) -> None:
    """Send the tokens of a text, or of a conversation as the model's template writes it."""
    body = await read(TokenizeBody, content, ignored=connection.ignored)
    if body.model is not None:
        await orchestrators.check_model(body.model)
    written: dict[str, Any] = {"add_special_tokens": True, "parse_special_tokens": True}
    text: Prompt
    if body.prompt is None:
        text = await write_prompt(
            body.conversation, orchestrators=orchestrators, templates=templates
        )
        written |= WRITTEN
    else:
        text = body.prompt
    if body.add_special_tokens is not None:
        written["add_special_tokens"] = body.add_special_tokens
    found = await orchestrators.client.tokenize(
        text, include_token_bytes=body.return_token_strs, timeout=_SECONDS, **written
    )
    is_large = len(found.token_ids) > _FEW_TOKENS
    names = await _names(found, is_large=is_large)
    await connection.answer(
        {
            "count": len(found.token_ids),
            "max_model_len": (await orchestrators.info()).context_length,
            "tokens": list(found.token_ids),
            "token_strs": names if body.return_token_strs else None,
        },
        is_large=is_large,
    )


async def _names(found: Tokens, *, is_large: bool) -> list[str]:
    """Name tokens; of many on a thread, so that no other request waits for it."""

    def names() -> list[str]:
        return list(map(name_of, found.token_ids, found.token_bytes))

    return await asyncio.to_thread(names) if is_large else names()


async def detokenize(
    connection: Connection, content: bytes, *, orchestrators: Orchestrators
) -> None:
    """Send the text of tokens."""
    body = await read(DetokenizeBody, content, ignored=connection.ignored)
    if body.model is not None:
        await orchestrators.check_model(body.model)
    text = await orchestrators.client.detokenize(body.tokens, timeout=_SECONDS)
    await connection.answer({"prompt": text})


async def version(connection: Connection, _content: bytes, *, orchestrators: Orchestrators) -> None:
    """Send Paceline's version, as an orchestrator says it."""
    await connection.answer({"version": (await orchestrators.info()).version})
