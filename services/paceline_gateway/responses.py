"""/v1/responses: text in, text out, whole or as OpenAI's named events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from paceline_gateway.chat_template import WRITTEN, write_prompt
from paceline_gateway.generations import deliver
from paceline_gateway.json_body import parse
from paceline_gateway.rendering import details, finish_reason, usage
from paceline_gateway.schemas import ResponseBody

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline import Chunk, GenerateOptions
    from paceline_gateway.chat_template import ChatTemplates
    from paceline_gateway.connection import Connection
    from paceline_gateway.generations import Choice, Generations
    from paceline_gateway.orchestrators import Orchestrators


async def respond(
    connection: Connection,
    content: bytes,
    *,
    orchestrators: Orchestrators,
    templates: ChatTemplates,
    generations: Generations,
) -> None:
    """Answer a conversation, rendered by the model's template; nothing is stored."""
    body = parse(ResponseBody, content, ignored=connection.ignored)
    model = await orchestrators.check_model(body.model)
    prompt = await write_prompt(
        body.conversation, orchestrators=orchestrators, templates=templates, param="input"
    )
    options = generations.completed({**body.options(), **WRITTEN})
    (choice,) = generations.choices([prompt], options, count=1, connection=connection)
    answer = _Answer(connection, body, options=options, model=model)
    await deliver([choice], answer.take)
    await answer.end(choice)


class _Answer:
    """An answer: one message that grows."""

    def __init__(
        self, connection: Connection, body: ResponseBody, *, options: GenerateOptions, model: str
    ) -> None:
        self._connection = connection
        self._body = body
        self._options = options
        self._message_id = f"msg_{connection.request_id}"
        self._frame = {
            "id": f"resp_{connection.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._texts: list[str] = []
        self._sequence = 0

    async def take(self, _choice: Choice, chunk: Chunk | None) -> None:
        """Keep a chunk; send it if the answer is streamed."""
        if self._body.stream and not self._connection.status:
            await self._begin()
        if chunk is None or not chunk.text:
            return
        self._texts.append(chunk.text)
        if self._body.stream:
            await self._part("response.output_text.delta", delta=chunk.text, logprobs=[])

    async def end(self, choice: Choice) -> None:
        """Send the whole answer, or the last events of the stream."""
        status = "completed" if finish_reason(choice) == "stop" else "incomplete"
        whole = self._response(status, choice)
        if not self._body.stream:
            await self._connection.answer(whole)
            return
        text = "".join(self._texts)
        await self._part("response.output_text.done", text=text, logprobs=[])
        await self._part("response.content_part.done", part=_part(text))
        await self._event(
            "response.output_item.done", output_index=0, item=self._message(status, [_part(text)])
        )
        await self._event(f"response.{status}", response=whole)
        await self._connection.end_events()

    async def _begin(self) -> None:
        self._connection.error_event = self._error
        await self._connection.begin_events()
        for name in ("response.created", "response.in_progress"):
            await self._event(name, response=self._response("in_progress", None))
        item = self._message("in_progress", [])
        await self._event("response.output_item.added", output_index=0, item=item)
        await self._part("response.content_part.added", part=_part(""))

    async def _part(self, name: str, **fields: Any) -> None:
        """Send an event about the one part of the one message."""
        await self._event(name, item_id=self._message_id, output_index=0, content_index=0, **fields)

    async def _event(self, name: str, **fields: Any) -> None:
        content = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        await self._connection.event(content, name=name)

    def _error(self, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
        """Return an error in this interface's form and in the general one, which packages raise."""
        told = {name: body["error"][name] for name in ("code", "message", "param")}
        return {"type": "error", **told, "sequence_number": self._sequence, **body}, "error"

    def _message(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": parts,
        }

    def _response(self, status: str, choice: Choice | None) -> dict[str, Any]:
        """Return the answer so far; without a choice, an answer that has just begun."""
        body = self._body
        parts = [_part("".join(self._texts))]
        extra: dict[str, Any] = {}
        if choice is not None and body.paceline is not None:
            extra["paceline"] = {"choices": [details(choice)]}
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._frame,
            "status": status,
            "output": [self._message(status, parts)] if choice is not None else [],
            "usage": _usage(choice) if choice is not None else None,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions or None,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._options["temperature"],
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": self._options["top_p"],
            "truncation": "disabled",
            **extra,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(choice: Choice) -> dict[str, Any]:
    counts = usage([choice])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
