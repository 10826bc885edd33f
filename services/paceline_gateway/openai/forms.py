"""The forms of OpenAI's answers: what a completion and a chat call their parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from paceline_gateway.conversations.answer_parts import (
    Answer,
    ArgumentsDelta,
    PlainReader,
    ToolCallBegin,
)
from paceline_gateway.generating.told_choices import finish_reason
from paceline_gateway.generating.told_tokens import likely, name_of, names_of, number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline import Chunk, Usage
    from paceline_gateway.conversations.answer_parts import AnswerPart, AnswerReader
    from paceline_gateway.generating.generations import Choice


class Form(ABC):
    """OpenAI's names for the parts of one kind of answer.

    Attributes:
        prefix: The prefix of the answers' ids.
        whole_object: The kind of a whole answer.
        streamed_object: The kind of an event.
        tells_prompt_in_choice: Whether what is told of a prompt stands in its choices.
    """

    prefix: str
    whole_object: str
    streamed_object: str
    tells_prompt_in_choice = False

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
    tells_prompt_in_choice = True

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
        reason, reader = finish_reason(choice), self._reader(choice.index)
        can_run = reader.call_count and not reader.is_within_call
        return "tool_calls" if reason == "stop" and can_run else reason

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Count tokens; those of the reasoning, if all of them can be counted."""
        counts = usage(choices)
        thought = [self._reader(it.index).reasoning_token_count for it in choices]
        counted = [it for it in thought if it is not None]
        if len(counted) == len(thought):
            of_completion = counts.setdefault("completion_tokens_details", {})
            of_completion["reasoning_tokens"] = sum(counted)
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


def usage(choices: Iterable[Choice]) -> dict[str, Any]:
    """Count tokens: each prompt once, however often it was continued."""
    prompts: dict[int, Usage] = {}
    completion = predicted = accepted = 0
    for choice in choices:
        counts = choice.finished.usage
        prompts.setdefault(choice.prompt_index, counts)
        completion += counts.completion_token_count
        predicted += choice.finished.statistics.predicted_token_count
        accepted += choice.finished.statistics.predicted_accepted_token_count
    total = sum(each.prompt_token_count for each in prompts.values())
    cached = sum(each.cached_prompt_token_count for each in prompts.values())
    counted = {
        "prompt_tokens": total,
        "completion_tokens": completion,
        "total_tokens": total + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if predicted:
        # A part that is copied twice counts twice.
        rejected = max(0, predicted - accepted)
        counted["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        }
    return counted


def _completion_logprobs(chunks: Iterable[tuple[int, Chunk]]) -> dict[str, Any]:
    tokens: dict[str, Any] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    others: list[dict[str, float]] = []
    for offset, chunk in chunks:
        names = names_of(chunk)
        tokens["tokens"] += names
        tokens["token_logprobs"] += map(number, chunk.logprobs)
        tokens["text_offset"] += _offsets(chunk, offset)
        told = zip(names, chunk.logprobs, strict=False)
        others += map(likely, told, chunk.top_logprobs)
    return {**tokens, "top_logprobs": others or None}


def _offsets(chunk: Chunk, start: int) -> list[int]:
    """Return the offsets in a choice's text at which the tokens of a chunk begin."""
    lengths = chunk.text_lengths or (0,) * len(chunk.token_ids)
    return list(accumulate(lengths[:-1], initial=start))


def _chat_logprobs(chunks: Iterable[Chunk]) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for chunk in chunks:
        likeliest = chunk.top_logprobs or ((),) * len(chunk.token_ids)
        contents = chunk.token_bytes or (None,) * len(chunk.token_ids)
        for own, others in zip(
            zip(chunk.token_ids, chunk.logprobs, contents, strict=True), likeliest, strict=True
        ):
            told = [_chat_token(it.token_id, it.logprob, it.token_bytes) for it in others]
            content.append({**_chat_token(*own), "top_logprobs": told})
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, content: bytes | None) -> dict[str, Any]:
    return {
        "token": name_of(token_id, content),
        "logprob": number(logprob),
        "bytes": None if content is None else list(content),
    }
