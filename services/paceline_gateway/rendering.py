"""Answers to completions and chat: whole, or as a stream of events."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from paceline import FinishReason
from paceline_gateway.answer_parts import (
    Answer,
    ArgumentsDelta,
    PlainReader,
    ToolCallBegin,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline import Chunk, Usage
    from paceline_gateway.answer_parts import AnswerPart, AnswerReader
    from paceline_gateway.connection import Connection
    from paceline_gateway.generations import Choice
    from paceline_gateway.schemas import Body

# The text of a single token is not known here, only that of a chunk: its id stands for it.
_BY_NUMBER = "token_id:{}"
# OpenAI's value of a log probability that is not known.
_NO_LOGPROB = -9999.0


class Form(ABC):
    """OpenAI's names for the parts of one kind of answer.

    Attributes:
        prefix: The prefix of the answers' ids.
        whole_object: The kind of a whole answer.
        streamed_object: The kind of an event.
    """

    prefix: str
    whole_object: str
    streamed_object: str

    @abstractmethod
    def opening(self) -> dict[str, Any] | None:
        """The first event of a streamed choice, before its text, if there is one."""

    @abstractmethod
    def part(
        self, chunk: Chunk, *, index: int = 0, offset: int, logprobs: bool
    ) -> dict[str, Any] | None:
        """A piece of a streamed choice, if there is one.

        Args:
            chunk: What came.
            index: The number of the choice.
            offset: How many characters came before it.
            logprobs: Whether log probabilities are told.
        """

    def rest(self, _index: int) -> dict[str, Any] | None:
        """What was held back of a streamed choice until its end, if anything was."""
        return None

    @abstractmethod
    def ending(self) -> dict[str, Any]:
        """The last event of a streamed choice, besides the reason."""

    @abstractmethod
    def whole(self, chunks: Sequence[Chunk], *, index: int = 0, logprobs: bool) -> dict[str, Any]:
        """A whole choice."""

    def finish_reason(self, choice: Choice) -> str:
        """Say why a choice ended."""
        return finish_reason(choice)

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Count tokens."""
        return usage(choices)


class CompletionForm(Form):
    """/v1/completions."""

    prefix, whole_object, streamed_object = "cmpl", "text_completion", "text_completion"

    def opening(self) -> None:
        """Nothing."""
        return

    def part(
        self, chunk: Chunk, *, index: int = 0, offset: int, logprobs: bool
    ) -> dict[str, Any] | None:
        """The piece's text."""
        del index
        if not chunk.text and not logprobs:
            return None
        told = _completion_logprobs([(offset, chunk)]) if logprobs else None
        return {"text": chunk.text, "logprobs": told}

    def ending(self) -> dict[str, Any]:
        """No more text."""
        return {"text": "", "logprobs": None}

    def whole(self, chunks: Sequence[Chunk], *, index: int = 0, logprobs: bool) -> dict[str, Any]:
        """The whole text."""
        del index
        placed, offset = [], 0
        for chunk in chunks:
            placed.append((offset, chunk))
            offset += len(chunk.text)
        text = "".join(chunk.text for chunk in chunks)
        return {"text": text, "logprobs": _completion_logprobs(placed) if logprobs else None}


class ChatForm(Form):
    """/v1/chat/completions.

    Args:
        new_reader: Makes what reads an answer; each choice has its own.
    """

    prefix = "chatcmpl"
    whole_object, streamed_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, new_reader: Callable[[], AnswerReader] = PlainReader) -> None:
        self._new_reader = new_reader
        self._readers: dict[int, AnswerReader] = {}

    def opening(self) -> dict[str, Any]:
        """The role."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def part(
        self, chunk: Chunk, *, index: int = 0, offset: int, logprobs: bool
    ) -> dict[str, Any] | None:
        """The piece's parts."""
        del offset
        parts = self._reader(index).read(chunk)
        if not parts and not logprobs:
            return None
        told = _chat_logprobs([chunk]) if logprobs else None
        return {"delta": _delta(parts), "logprobs": told}

    def rest(self, index: int) -> dict[str, Any] | None:
        """What the reader held back: it could have been the beginning of something else."""
        parts = self._reader(index).finish()
        return {"delta": _delta(parts), "logprobs": None} if parts else None

    def ending(self) -> dict[str, Any]:
        """No more text."""
        return {"delta": {}, "logprobs": None}

    def whole(self, chunks: Sequence[Chunk], *, index: int = 0, logprobs: bool) -> dict[str, Any]:
        """The whole message."""
        reader = self._reader(index)
        parts = [part for chunk in chunks for part in reader.read(chunk)]
        return {
            "message": _message(Answer.of([*parts, *reader.finish()])),
            "logprobs": _chat_logprobs(chunks) if logprobs else None,
        }

    def finish_reason(self, choice: Choice) -> str:
        """Say why a choice ended: also for calls, which their client has to run."""
        reason = finish_reason(choice)
        return (
            "tool_calls" if reason == "stop" and self._reader(choice.index).call_count else reason
        )

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Count tokens; those of the reasoning, if all of them can be counted."""
        counts = usage(choices)
        thought = [self._reader(it.index).reasoning_token_count for it in choices]
        counted = [it for it in thought if it is not None]
        if len(counted) == len(thought):
            told = counts.get("completion_tokens_details", {})
            counts["completion_tokens_details"] = {**told, "reasoning_tokens": sum(counted)}
        return counts

    def _reader(self, index: int) -> AnswerReader:
        if index not in self._readers:
            self._readers[index] = self._new_reader()
        return self._readers[index]


def _message(answer: Answer) -> dict[str, Any]:
    """Write a whole message as OpenAI does, and its reasoning under both usual names."""
    others = bool(answer.tool_calls or answer.reasoning)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if others and not answer.content else answer.content,
        "refusal": None,
    }
    if answer.reasoning:
        message |= _reasoning(answer.reasoning)
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": it.id,
                "type": "function",
                "function": {"name": it.name, "arguments": it.arguments},
            }
            for it in answer.tool_calls
        ]
    return message


def _delta(parts: Sequence[AnswerPart]) -> dict[str, Any]:
    """Write parts as one delta: what is of one kind, or of one call, together."""
    answer = Answer.of(parts)
    delta: dict[str, Any] = {"content": answer.content} if answer.content or not parts else {}
    if answer.reasoning:
        delta |= _reasoning(answer.reasoning)
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case ToolCallBegin(index, id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": id, "type": "function", "function": function}
            case ArgumentsDelta(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    return delta | ({"tool_calls": [*calls.values()]} if calls else {})


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning under its older and its newer name."""
    return {"reasoning_content": text, "reasoning": text}


class _Answer:
    """The common part of whole and streamed answers.

    Args:
        connection: The client's connection.
        form: The kind of answer.
        body: The request's body.
        model: The model's name.
    """

    def __init__(self, connection: Connection, form: Form, body: Body, *, model: str) -> None:
        self._connection = connection
        self._form = form
        self._body = body
        self._frame = {
            "id": f"{form.prefix}-{connection.request_id}",
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs = bool(body.options().get("logprobs"))

    def _details(self, choices: Iterable[Choice]) -> dict[str, Any]:
        """Return the extension field, if it was requested."""
        if self._body.paceline is None:
            return {}
        return {"paceline": {"choices": [details(choice) for choice in choices]}}


class WholeAnswer(_Answer):
    """An answer that is sent at the end."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._chunks: dict[int, list[Chunk]] = {}

    async def take(self, choice: Choice, chunk: Chunk | None) -> None:
        """Keep a chunk."""
        kept = self._chunks.setdefault(choice.index, [])
        if chunk is not None:
            kept.append(chunk)

    async def end(self, choices: Sequence[Choice]) -> None:
        """Send the answer."""
        await self._connection.answer(
            {
                **self._frame,
                "object": self._form.whole_object,
                "system_fingerprint": choices[0].started.model_fingerprint,
                "choices": [
                    {
                        "index": choice.index,
                        **self._form.whole(
                            self._chunks[choice.index], index=choice.index, logprobs=self._logprobs
                        ),
                        "finish_reason": self._form.finish_reason(choice),
                    }
                    for choice in choices
                ],
                "usage": self._form.usage(choices),
                **self._details(choices),
            }
        )


class StreamedAnswer(_Answer):
    """An answer in events. The status is sent with the first chunk, so errors can have another."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._offsets: dict[int, int] = {}  # characters sent, by choice

    async def take(self, choice: Choice, chunk: Chunk | None) -> None:
        """Send a chunk, or the end of a choice."""
        if not self._connection.status:
            await self._connection.begin_events()
        if choice.index not in self._offsets:
            self._offsets[choice.index] = 0
            if (opening := self._form.opening()) is not None:
                await self._send(choice, opening, finish=None)
        if chunk is None:
            if (rest := self._form.rest(choice.index)) is not None:
                await self._send(choice, rest, finish=None)
            ending = self._form.ending()
            reason = self._form.finish_reason(choice)
            await self._send(choice, ending, finish=reason, is_last=True)
            return
        offset = self._offsets[choice.index]
        self._offsets[choice.index] += len(chunk.text)
        part = self._form.part(chunk, index=choice.index, offset=offset, logprobs=self._logprobs)
        if part is not None:
            await self._send(choice, part, finish=None)

    async def end(self, choices: Sequence[Choice]) -> None:
        """Send the usage, if requested, and the stream's end."""
        if self._body.includes_usage:
            await self._event(choices[0], [], usage=self._form.usage(choices))
        await self._connection.event("[DONE]")
        await self._connection.end_events()

    async def _send(
        self, choice: Choice, entry: dict[str, Any], *, finish: str | None, is_last: bool = False
    ) -> None:
        whole = {"index": choice.index, **entry, "finish_reason": finish}
        extra = self._details([choice]) if is_last else {}
        if self._body.includes_usage:
            extra["usage"] = None
        await self._event(choice, [whole], **extra)

    async def _event(self, choice: Choice, entries: list[dict[str, Any]], **extra: Any) -> None:
        await self._connection.event(
            {
                **self._frame,
                "object": self._form.streamed_object,
                "system_fingerprint": choice.started.model_fingerprint,
                "choices": entries,
                **extra,
            }
        )


def finish_reason(choice: Choice) -> str:
    """Say why a choice ended."""
    return "length" if choice.finished.finish_reason is FinishReason.LENGTH else "stop"


def usage(choices: Iterable[Choice]) -> dict[str, Any]:
    """Count tokens: each prompt once, however often it was continued."""
    prompts: dict[int, Usage] = {}
    completion = 0
    for choice in choices:
        counts = choice.finished.usage
        prompts.setdefault(choice.prompt_index, counts)
        completion += counts.completion_token_count
    total = sum(each.prompt_token_count for each in prompts.values())
    cached = sum(each.cached_prompt_token_count for each in prompts.values())
    return {
        "prompt_tokens": total,
        "completion_tokens": completion,
        "total_tokens": total + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def details(choice: Choice) -> dict[str, Any]:
    """Describe how a choice was decoded."""
    started, finished = choice.started, choice.finished
    return {
        "index": choice.index,
        "request_id": started.request_id,
        "seed": started.seed,
        "strategy": started.strategy,
        "rule": finished.promise,
        "lookahead": finished.lookahead,
        "width": started.width,
        "branches": started.branches,
        "targets_used": finished.targets_used,
        "plan_note": started.plan_note,
        "finish_reason": finished.finish_reason,
        "statistics": asdict(finished.statistics),
    }


def _completion_logprobs(chunks: Iterable[tuple[int, Chunk]]) -> dict[str, Any]:
    tokens: dict[str, Any] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    others: list[dict[str, float]] = []
    for offset, chunk in chunks:
        names = [_BY_NUMBER.format(it) for it in chunk.token_ids]
        tokens["tokens"] += names
        tokens["token_logprobs"] += map(_number, chunk.logprobs)
        tokens["text_offset"] += _offsets(chunk, offset)
        for name, logprob, likeliest in zip(
            names, chunk.logprobs, chunk.top_logprobs, strict=False
        ):
            told = {_BY_NUMBER.format(it.token_id): _number(it.logprob) for it in likeliest}
            others.append({name: _number(logprob)} | told)
    return {**tokens, "top_logprobs": others or None}


def _offsets(chunk: Chunk, start: int) -> list[int]:
    """Return the offsets in a choice's text at which the tokens of a chunk begin."""
    lengths = chunk.text_lengths or (0,) * len(chunk.token_ids)
    return list(accumulate(lengths[:-1], initial=start))


def _chat_logprobs(chunks: Iterable[Chunk]) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for chunk in chunks:
        likeliest = chunk.top_logprobs or ((),) * len(chunk.token_ids)
        for token_id, logprob, others in zip(
            chunk.token_ids, chunk.logprobs, likeliest, strict=True
        ):
            told = [_chat_token(it.token_id, it.logprob) for it in others]
            content.append({**_chat_token(token_id, logprob), "top_logprobs": told})
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": _BY_NUMBER.format(token_id), "logprob": _number(logprob), "bytes": None}


def _number(logprob: float) -> float:
    """Return a log probability that JSON can hold: JSON has neither NaN nor infinities."""
    return logprob if math.isfinite(logprob) else _NO_LOGPROB
