"""/v1/messages: Anthropic's interface, whole or as its named events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from paceline import FinishReason
from paceline.errors import ContextLengthExceededError
from paceline_gateway.anthropic.errors import name_parameters
from paceline_gateway.bodies.json_body import read
from paceline_gateway.bodies.message_schemas import CountBody, MessagesBody
from paceline_gateway.conversations.answer_blocks import AnswerBlocks, Began, Ended, Grew, Kind
from paceline_gateway.generating.told_choices import details
from paceline_gateway.generating.turns import leave_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import GenerateOptions
    from paceline_gateway.conversations.answer_blocks import Block
    from paceline_gateway.conversations.answer_parts import AnswerPart
    from paceline_gateway.generating.turns import Turn, Turns
    from paceline_gateway.http.connection import Connection

_BUDGET = "thinking.budget_tokens"


async def answer_messages(connection: Connection, content: bytes, *, turns: Turns) -> None:
    """Answer a conversation; nothing is stored."""
    body = await read(MessagesBody, content, ignored=connection.ignored)
    name_parameters(connection)
    model = await turns.orchestrators.check_model(body.model)
    leave_out(await _unheard(body, turns), connection)
    options: GenerateOptions = {**body.options(), **model.options}
    turn = await _begin(connection, body, options, turns=turns)
    try:
        await _deliver(connection, body, turn, model=model.name)
    except ContextLengthExceededError as error:
        if not turn.choice.lacks_room(error):
            raise
        # As with Anthropic's newer models, the whole room is used.
        room = (await turns.orchestrators.info()).context_length
        options["max_tokens"] = max(1, room - await turns.count(body.conversation))
        turn = await _begin(connection, body, options, turns=turns)
        await _deliver(connection, body, turn, model=model.name)


async def count_tokens(connection: Connection, content: bytes, *, turns: Turns) -> None:
    """Count the tokens that a conversation has as a prompt."""
    body = await read(CountBody, content, ignored=connection.ignored)
    name_parameters(connection)
    await turns.orchestrators.check_model(body.model)
    leave_out(await _unheard(body, turns) | {_BUDGET: _has_budget(body)}, connection)
    await connection.answer({"input_tokens": await turns.count(body.conversation)})


async def _begin(
    connection: Connection, body: MessagesBody, options: GenerateOptions, *, turns: Turns
) -> Turn:
    turn = await turns.begin(connection, body.conversation, options, wanted=body.grammar)
    if not turn.limits_thought:
        leave_out({_BUDGET: _has_budget(body)}, connection)
    return turn


async def _deliver(connection: Connection, body: MessagesBody, turn: Turn, *, model: str) -> None:
    answer = _Answer(connection, body, turn, model=model)
    await turn.deliver(answer.take)
    await answer.end()


def _has_budget(body: CountBody) -> bool:
    return body.thinking is not None and body.thinking.budget_tokens is not None


async def _unheard(body: CountBody, turns: Turns) -> dict[str, bool]:
    """Tell which parameters about thinking make no difference with this model."""
    thinking = body.thinking
    options = {} if thinking is None else thinking.template_options
    # A model that always or never thinks may do what is asked, although its template has no name.
    does_so = thinking is not None and (thinking.type == "enabled") == await turns.reasons()
    return {
        "thinking": not does_so and await turns.unheard(options),
        "thinking.display": thinking is not None and thinking.display is not None,
        "output_config.effort": body.effort is not None
        and await turns.unheard(["reasoning_effort"]),
    }


class _Answer:
    """An answer: a list of blocks, which grows."""

    def __init__(
        self, connection: Connection, body: MessagesBody, turn: Turn, *, model: str
    ) -> None:
        self._connection = connection
        self._body = body
        self._turn = turn
        self._frame = {
            "id": f"msg_{connection.request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._blocks = AnswerBlocks()

    async def take(self, parts: Sequence[AnswerPart]) -> None:
        """Keep parts; send them if the answer is streamed."""
        if self._body.stream and not self._connection.status:
            await self._begin()
        await self._put(parts)

    async def end(self) -> None:
        """Send the whole answer, or the last events of the stream."""
        rest = list(self._blocks.finish())
        if not self._body.stream:
            await self._connection.answer(
                {
                    **self._frame,
                    "content": [_whole(it) for it in self._blocks.blocks],
                    **self._ending(),
                    "usage": self._usage(),
                    **self._details(),
                }
            )
            return
        for step in rest:
            await self._tell(step)
        await self._event("message_delta", delta=self._ending(), usage=self._usage())
        await self._event("message_stop", **self._details())
        await self._connection.end_events()

    async def _begin(self) -> None:
        await self._connection.begin_events()
        started = self._turn.choice.started
        message: dict[str, Any] = {
            **self._frame,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # What was computed before is known at the end; the last usage counts.
            "usage": _counts(started.prompt_token_count, cached=0, generated=0),
        }
        await self._event("message_start", message=message)
        await self._event("ping")

    async def _put(self, parts: Sequence[AnswerPart]) -> None:
        for step in self._blocks.take(parts):
            if self._body.stream:
                await self._tell(step)

    async def _tell(self, step: Began | Grew | Ended) -> None:
        index = step.block.index
        match step:
            case Began(block):
                await self._event("content_block_start", index=index, content_block=_begun(block))
            case Grew(block, text):
                await self._event("content_block_delta", index=index, delta=_delta(block, text))
            case Ended():
                await self._event("content_block_stop", index=index)

    async def _event(self, name: str, **fields: Any) -> None:
        await self._connection.event({"type": name, **fields}, name=name)

    def _ending(self) -> dict[str, Any]:
        """Say why the answer ended."""
        finished = self._turn.choice.finished
        reason, sequence = "end_turn", None
        if finished.finish_reason is FinishReason.LENGTH:
            is_full = finished.usage.completion_token_count < self._body.max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif finished.finish_reason is FinishReason.STOP_STRING:
            reason, sequence = "stop_sequence", finished.stop_string
        elif self._turn.reader.call_count and not self._turn.reader.is_within_call:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        counts = self._turn.choice.finished.usage
        usage = _counts(
            counts.prompt_token_count,
            cached=counts.cached_prompt_token_count,
            generated=counts.completion_token_count,
        )
        thought = self._turn.reader.reasoning_token_count
        if thought is not None:
            usage["output_tokens_details"] = {"thinking_tokens": thought}
        return usage

    def _details(self) -> dict[str, Any]:
        if self._body.paceline is None:
            return {}
        return {"paceline": {"choices": [details(self._turn.choice)]}}


def _counts(prompt: int, *, cached: int, generated: int) -> dict[str, Any]:
    """Count tokens as Anthropic does: the input is what had to be computed now."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


def _begun(block: Block) -> dict[str, Any]:
    """Write a block that has just begun."""
    match block.kind:
        case Kind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Kind.CONTENT:
            return {"type": "text", "text": ""}
        case Kind.CALL:
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _delta(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case Kind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case Kind.CONTENT:
            return {"type": "text_delta", "text": text}
        case Kind.CALL:
            return {"type": "input_json_delta", "partial_json": text}


def _whole(block: Block) -> dict[str, Any]:
    begun = _begun(block)
    match block.kind:
        case Kind.REASONING:
            return {**begun, "thinking": block.text}
        case Kind.CONTENT:
            return {**begun, "text": block.text}
        case Kind.CALL:
            return {**begun, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """Read a call's arguments; of arguments that are cut, or no object, what can be read."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
