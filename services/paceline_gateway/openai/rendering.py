"""Answers to completions and chat: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, TypeVar

from paceline_gateway.generating import told_tokens
from paceline_gateway.generating.told_choices import details

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline import Chunk
    from paceline_gateway.bodies.request_schemas import Body
    from paceline_gateway.generating.generations import Choice
    from paceline_gateway.generating.told_tokens import EchoedPrompt
    from paceline_gateway.http.connection import Connection
    from paceline_gateway.openai.forms import Form

_T = TypeVar("_T")


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

    def _named(self, chunk: Chunk) -> Chunk:
        """Return a chunk with the names that its tokens shall have."""
        by_number = self._body.return_tokens_as_token_ids
        return told_tokens.by_number(chunk) if by_number else chunk

    def _echo(self, choice: Choice) -> EchoedPrompt | None:
        """Return the prompt in front of a choice, if it was requested."""
        if not self._body.echoes:
            return None
        return told_tokens.echo(
            choice,
            written=self._body.written_prompt(choice.prompt_index),
            logprobs=self._body.echoed_logprobs,
            by_number=self._body.return_tokens_as_token_ids,
        )

    def _ids(self, chunks: Iterable[Chunk]) -> dict[str, Any]:
        """Return vLLM's field with the tokens of an answer, if it was requested."""
        if not self._body.return_token_ids:
            return {}
        return {"token_ids": [token for chunk in chunks for token in chunk.token_ids]}

    def _of_prompt(self, choice: Choice, *, in_choice: bool) -> dict[str, Any]:
        """Return vLLM's fields about a prompt, which chat has beside the choices."""
        if in_choice != self._form.tells_prompt_in_choice:
            return {}
        told: dict[str, Any] = {}
        if self._body.return_token_ids:
            told["prompt_token_ids"] = told_tokens.prompt_ids(choice)
        if (most := self._body.prompt_logprobs) is not None:
            told["prompt_logprobs"] = told_tokens.prompt_logprobs(choice, most=most)
        return told

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
            kept.append(self._named(chunk))

    async def end(self, choices: Sequence[Choice]) -> None:
        """Send the answer; what is told of a long prompt is written on a thread."""
        is_large = any(map(told_tokens.is_large, choices))
        content = await _done(lambda: self._content(choices), is_large=is_large)
        await self._connection.answer(content, is_large=is_large)

    def _content(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            **self._frame,
            "object": self._form.whole_object,
            "system_fingerprint": choices[0].started.model_fingerprint,
            "choices": [self._whole(choice) for choice in choices],
            "usage": self._form.usage(choices),
            **self._of_prompt(choices[0], in_choice=False),
            **self._details(choices),
        }

    def _whole(self, choice: Choice) -> dict[str, Any]:
        chunks = self._chunks[choice.index]
        entry = self._form.whole(chunks, index=choice.index, logprobs=self._logprobs)
        if (echoed := self._echo(choice)) is not None:
            entry = told_tokens.with_echo(entry, echoed)
        return {
            "index": choice.index,
            **entry,
            "finish_reason": self._form.finish_reason(choice),
            **self._ids(chunks),
            **self._of_prompt(choice, in_choice=True),
        }


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
            await self._open(choice)
        if chunk is None:
            if (rest := self._form.rest(choice.index)) is not None:
                await self._send(choice, rest, finish=None)
            ending = self._form.ending()
            reason = self._form.finish_reason(choice)
            await self._send(choice, ending, finish=reason, is_last=True)
            return
        offset = self._offsets[choice.index]
        self._offsets[choice.index] += len(chunk.text)
        part = self._form.part(
            self._named(chunk), index=choice.index, offset=offset, logprobs=self._logprobs
        )
        ids = self._ids([chunk])
        if part is None and ids:
            part = self._form.ending()
        if part is not None:
            await self._send(choice, {**part, **ids}, finish=None)

    async def _open(self, choice: Choice) -> None:
        """Send what comes before a choice's text."""
        of_prompt = self._of_prompt(choice, in_choice=True)
        if (opening := self._form.opening()) is not None:
            await self._send(choice, {**opening, **of_prompt}, finish=None, is_first=True)
            return
        is_large = told_tokens.is_large(choice)
        echoed = await _done(lambda: self._echo(choice), is_large=is_large)
        if echoed is not None:
            self._offsets[choice.index] = len(echoed.text)
            for piece in echoed.pieces():
                entry = {"text": piece.text, "logprobs": piece.logprobs}
                await self._send(choice, {**entry, **of_prompt}, finish=None)
                of_prompt = {}
        elif of_prompt:
            await self._send(choice, {**self._form.ending(), **of_prompt}, finish=None)

    async def end(self, choices: Sequence[Choice]) -> None:
        """Send the usage, if requested, and the stream's end."""
        if self._body.includes_usage:
            await self._event(choices[0], [], usage=self._form.usage(choices))
        await self._connection.event("[DONE]")
        await self._connection.end_events()

    async def _send(
        self,
        choice: Choice,
        entry: dict[str, Any],
        *,
        finish: str | None,
        is_first: bool = False,
        is_last: bool = False,
    ) -> None:
        whole = {"index": choice.index, **entry, "finish_reason": finish}
        extra = self._details([choice]) if is_last else {}
        if is_first:
            extra |= self._of_prompt(choice, in_choice=False)
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


async def _done(work: Callable[[], _T], *, is_large: bool) -> _T:
    """Do work at once, or on a thread if the event loop would notice."""
    return await asyncio.to_thread(work) if is_large else work()
