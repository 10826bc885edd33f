"""/v1/responses: a conversation's next turn, whole or as OpenAI's named events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from paceline_gateway.bodies.json_body import read
from paceline_gateway.bodies.parameter_types import ANY_OBJECT
from paceline_gateway.bodies.response_schemas import ResponseBody
from paceline_gateway.conversations.answer_blocks import AnswerBlocks, Began, Ended, Grew, Kind
from paceline_gateway.errors import renamed
from paceline_gateway.generating.told_choices import details, finish_reason
from paceline_gateway.generating.turns import leave_out
from paceline_gateway.openai.forms import usage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline import GenerateOptions
    from paceline_gateway.conversations.answer_blocks import Block
    from paceline_gateway.conversations.answer_parts import AnswerPart
    from paceline_gateway.conversations.conversation import Tool
    from paceline_gateway.generating.turns import Turn, Turns
    from paceline_gateway.http.connection import Connection

_ID_PREFIXES = {Kind.REASONING: "rs", Kind.CONTENT: "msg", Kind.CALL: "fc"}
_NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format"}
_EVENTS = {
    Kind.REASONING: "response.reasoning_text",
    Kind.CONTENT: "response.output_text",
    Kind.CALL: "response.function_call_arguments",
}
# The events of a text have log probabilities, which cannot be requested here.
_LOGPROBS: Mapping[Kind, dict[str, Any]] = {Kind.CONTENT: {"logprobs": []}}


async def respond(connection: Connection, content: bytes, *, turns: Turns) -> None:
    """Answer a conversation, rendered by the model's template; nothing is stored."""
    body = await read(ResponseBody, content, ignored=connection.ignored)
    connection.translate = lambda it: renamed(it, _NAMES)
    model = await turns.orchestrators.check_model(body.model)
    leave_out(await _unheard(body, turns), connection)
    options: GenerateOptions = {**body.options(), **model.options}
    turn = await turns.begin(
        connection, body.conversation, options, wanted=body.grammar, param="input"
    )
    is_limit_unheard = body.thinking_token_budget is not None and not turn.limits_thought
    leave_out({"thinking_token_budget": is_limit_unheard}, connection)
    answer = _Answer(connection, body, turn, model=model.name)
    await turn.deliver(answer.take)
    await answer.end()


async def _unheard(body: ResponseBody, turns: Turns) -> dict[str, bool]:
    """Tell which parameters make no difference."""
    asked = body.reasoning
    effort = {} if asked.effort is None else body.conversation.template_options
    return {
        "reasoning.effort": await turns.unheard(effort),
        "reasoning.summary": asked.summary is not None,
        "reasoning.generate_summary": asked.generate_summary is not None,
        **{f"include.{name}": True for name in body.include},
    }


class _Answer:
    """An answer: a list of items, the last of which grows."""

    def __init__(
        self, connection: Connection, body: ResponseBody, turn: Turn, *, model: str
    ) -> None:
        self._connection = connection
        self._body = body
        self._turn = turn
        self._frame = {
            "id": f"resp_{connection.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._blocks = AnswerBlocks(needs_one=True)
        self._sequence = 0

    async def take(self, parts: Sequence[AnswerPart]) -> None:
        """Keep parts; send them if the answer is streamed."""
        if self._body.stream and not self._connection.status:
            await self._begin()
        for step in self._blocks.take(parts):
            if self._body.stream:
                await self._tell(step, "completed")

    async def end(self) -> None:
        """Send the whole answer, or the last events of the stream."""
        status = "completed" if finish_reason(self._turn.choice) == "stop" else "incomplete"
        for step in self._blocks.finish():
            if self._body.stream:
                await self._tell(step, self._last(status))
        whole = self._response(status)
        if not self._body.stream:
            await self._connection.answer(whole)
            return
        await self._event(f"response.{status}", response=whole)
        await self._connection.end_events()

    async def _begin(self) -> None:
        self._connection.error_event = self._error
        await self._connection.begin_events()
        for name in ("response.created", "response.in_progress"):
            await self._event(name, response=self._response("in_progress"))

    async def _tell(self, step: Began | Grew | Ended, status: str) -> None:
        """Send the events of a step; `status` is that of an item which ends."""
        match step:
            case Began(block):
                item = self._item(block, "in_progress")
                await self._event("response.output_item.added", output_index=block.index, item=item)
                if block.kind is not Kind.CALL:
                    await self._part(block, "response.content_part.added", part=_part(block))
            case Grew(block, text):
                name = f"{_EVENTS[block.kind]}.delta"
                await self._part(block, name, delta=text, **_LOGPROBS.get(block.kind, {}))
            case Ended(block):
                await self._end(block, status)

    async def _end(self, block: Block, status: str) -> None:
        name = f"{_EVENTS[block.kind]}.done"
        if block.kind is Kind.CALL:
            await self._part(block, name, name=block.name, arguments=block.text)
        else:
            await self._part(block, name, text=block.text, **_LOGPROBS.get(block.kind, {}))
            await self._part(block, "response.content_part.done", part=_part(block))
        await self._event(
            "response.output_item.done",
            output_index=block.index,
            item=self._item(block, status),
        )

    async def _part(self, block: Block, event: str, **fields: Any) -> None:
        """Send an event about what is in an item."""
        place: dict[str, Any] = {"item_id": self._id(block), "output_index": block.index}
        if block.kind is not Kind.CALL:
            place["content_index"] = 0  # each item has one part
        await self._event(event, **place, **fields)

    async def _event(self, event: str, **fields: Any) -> None:
        content = {"type": event, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        await self._connection.event(content, name=event)

    def _error(self, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
        """Return an error in this interface's form and in the general one, which packages raise."""
        told = {name: body["error"][name] for name in ("code", "message", "param")}
        return {"type": "error", **told, "sequence_number": self._sequence, **body}, "error"

    def _id(self, block: Block) -> str:
        """Name an item: the first of each kind after the request."""
        number = sum(it.kind is block.kind for it in self._blocks.blocks[: block.index])
        suffix = f"_{number}" if number else ""
        return f"{_ID_PREFIXES[block.kind]}_{self._connection.request_id}{suffix}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """Write an item; one that has just begun is empty."""
        content = [_part(block)] if status != "in_progress" else []
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        match block.kind:
            case Kind.REASONING:
                return {**item, "type": "reasoning", "summary": [], "content": content}
            case Kind.CONTENT:
                return {**item, "type": "message", "role": "assistant", "content": content}
            case Kind.CALL:
                call = {"call_id": block.id, "name": block.name, "arguments": block.text}
                return {**item, "type": "function_call", **call}

    def _items(self, status: str) -> list[dict[str, Any]]:
        """Write all items; only the last one can be cut."""
        blocks, last = self._blocks.blocks, self._last(status)
        return [self._item(it, last if it is blocks[-1] else "completed") for it in blocks]

    def _last(self, status: str) -> str:
        """Return the last item's status: the model itself may end within a call."""
        return "incomplete" if self._turn.reader.is_within_call else status

    def _response(self, status: str) -> dict[str, Any]:
        """Return the answer so far: one in progress has just begun."""
        body, choice = self._body, self._turn.choice
        is_done = status != "in_progress"
        extra: dict[str, Any] = {}
        if is_done and body.paceline is not None:
            extra["paceline"] = {"choices": [details(choice)]}
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._frame,
            "status": status,
            "output": self._items(status) if is_done else [],
            "usage": self._usage() if is_done else None,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions or None,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": self._turn.options["temperature"],
            "text": {"format": _format(body)},
            "tool_choice": _choice(body),
            "tools": [_tool(it) for it in body.conversation.tools],
            "top_p": self._turn.options["top_p"],
            "truncation": "disabled",
            **extra,
        }

    def _usage(self) -> dict[str, Any]:
        counts = usage([self._turn.choice])
        thought = self._turn.reader.reasoning_token_count or 0
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": counts["total_tokens"],
        }


def _part(block: Block) -> dict[str, Any]:
    """Write the one part of an item."""
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _format(body: ResponseBody) -> dict[str, Any]:
    if body.grammar is None:
        return {"type": "text"}
    if body.grammar == ANY_OBJECT:
        return {"type": "json_object"}
    return {"type": "json_schema", "name": "answer", "schema": body.grammar.json_schema}


def _choice(body: ResponseBody) -> str | dict[str, Any]:
    choice = body.tool_choice
    if choice.names is None:
        return choice.mode
    named = [{"type": "function", "name": it} for it in choice.names]
    if choice.mode == "required" and len(named) == 1:
        return named[0]
    return {"type": "allowed_tools", "mode": choice.mode, "tools": named}


def _tool(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
