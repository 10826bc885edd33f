r"""What is told of single tokens: their texts, the prompt before its answer, and their ids.

A token's text comes as bytes, which may be a part of a character: `bytes:\xe2\x80` then, as in
OpenAI's completions. `token_id:N` stands for a token whose bytes did not come: because the client
asked for that, or because the model has no tokenizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline import Chunk, PromptChunk, TokenLogprob
    from paceline_gateway.generating.generations import Choice

_BY_NUMBER = "token_id:{}"
# OpenAI's value of a log probability that is not known.
_NO_LOGPROB = -9999.0
# Tokens of a streamed echo in one event. With twenty likeliest tokens each they are some 100 KB.
_PIECE_TOKENS = 256
# Chunks of a prompt, 256 tokens each, that are written in some 20 ms.
_FEW_CHUNKS = 4


def names_of(chunk: Chunk | PromptChunk) -> list[str]:
    """Name the tokens of a chunk."""
    given = chunk.token_bytes or (None,) * len(chunk.token_ids)
    return [name_of(*each) for each in zip(chunk.token_ids, given, strict=True)]


def name_of(token_id: int, content: bytes | None) -> str:
    """Return a token's text; what is none is told by its bytes, or by its number."""
    if content is None:
        return _BY_NUMBER.format(token_id)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def number(logprob: float) -> float:
    """Return a log probability that JSON can hold: JSON has neither NaN nor infinities."""
    return logprob if math.isfinite(logprob) else _NO_LOGPROB


def likely(own: tuple[str, float], others: Iterable[TokenLogprob]) -> dict[str, float]:
    """Return the likeliest tokens at a position by name, with the token that is there."""
    name, logprob = own
    told = {name_of(it.token_id, it.token_bytes): number(it.logprob) for it in others}
    return {name: number(logprob)} | told


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of a prompt.

    Attributes:
        logprob: None for the first token, or if it was not asked for.
    """

    token_id: int
    content: bytes | None
    logprob: float | None
    others: tuple[TokenLogprob, ...]

    @property
    def name(self) -> str:
        """How it is told."""
        return name_of(self.token_id, self.content)


def prompt_tokens(choice: Choice) -> Iterator[PromptToken]:
    """Yield the tokens of a choice's prompt, as far as they are told."""
    for chunk in choice.prompt_chunks:
        count = len(chunk.token_ids)
        yield from map(
            PromptToken,
            chunk.token_ids,
            chunk.token_bytes or (None,) * count,
            chunk.logprobs or (None,) * count,
            chunk.top_logprobs or ((),) * count,
        )


def prompt_ids(choice: Choice) -> list[int]:
    """Return the ids of a prompt's tokens."""
    return list(chain.from_iterable(chunk.token_ids for chunk in choice.prompt_chunks))


def prompt_logprobs(choice: Choice, *, most: int) -> list[dict[str, Any] | None]:
    """Return vLLM's form of a prompt's log probabilities: by token id, the first one null.

    Of a token that is none of the likeliest ones the rank is not known: null.
    """
    told: list[dict[str, Any] | None] = []
    for token in prompt_tokens(choice):
        if token.logprob is None:
            told.append(None)
            continue
        entry = {
            str(it.token_id): _ranked(it.token_id, it.token_bytes, it.logprob, rank=rank)
            for rank, it in enumerate(token.others[:most], start=1)
        }
        own = _ranked(token.token_id, token.content, token.logprob, rank=None)
        told.append({str(token.token_id): own} | entry)
    return told


def _ranked(
    token_id: int, content: bytes | None, logprob: float, *, rank: int | None
) -> dict[str, Any]:
    text = name_of(token_id, content)
    return {"logprob": number(logprob), "rank": rank, "decoded_token": text}


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt in front of its answer, as OpenAI's completions have it.

    Attributes:
        text: The prompt as it was written, or what its tokens say.
        logprobs: In the form of completions; None: they were not asked for.
    """

    text: str
    logprobs: dict[str, Any] | None

    def pieces(self) -> Iterator[EchoedPrompt]:
        """Yield it in pieces of few tokens, for a stream."""
        told = self.logprobs
        if told is None or not told["tokens"]:
            yield self
            return
        offsets: list[int] = told["text_offset"]
        for start in range(0, len(offsets), _PIECE_TOKENS):
            end = start + _PIECE_TOKENS
            to = offsets[end] if end < len(offsets) else len(self.text)
            logprobs = {name: each and each[start:end] for name, each in told.items()}
            yield EchoedPrompt(self.text[offsets[start] if start else 0 : to], logprobs)


def is_large(choice: Choice) -> bool:
    """Whether so much is told of a prompt that the event loop should not write it."""
    return len(choice.prompt_chunks) > _FEW_CHUNKS


def echo(
    choice: Choice, *, written: str | None, logprobs: int | None, by_number: bool
) -> EchoedPrompt:
    """Return the prompt of a choice that has begun.

    Args:
        written: The prompt, if it was text; None: it was token ids.
        logprobs: How many likeliest tokens are told at each position; None: no log probabilities.
        by_number: Whether tokens are told by their numbers, though their bytes are known.
    """
    tokens = list(prompt_tokens(choice))
    contents = [token.content or b"" for token in tokens]
    if by_number:
        tokens = [replace(it, content=None, others=_by_number(it.others)) for it in tokens]
    text = b"".join(contents).decode(errors="replace") if written is None else written
    if logprobs is None:
        return EchoedPrompt(text, None)
    others = [
        None if it.logprob is None else likely((it.name, it.logprob), it.others[:logprobs])
        for it in tokens
    ]
    told = {
        "tokens": [it.name for it in tokens],
        "token_logprobs": [None if it.logprob is None else number(it.logprob) for it in tokens],
        "text_offset": _offsets(contents, text),
        "top_logprobs": others if logprobs else None,
    }
    return EchoedPrompt(text, told)


def with_echo(entry: dict[str, Any], echoed: EchoedPrompt) -> dict[str, Any]:
    """Put a prompt in front of a whole choice of completions."""
    whole = {**entry, "text": echoed.text + entry["text"]}
    if echoed.logprobs is not None and entry["logprobs"] is not None:
        own = entry["logprobs"]
        offsets = [len(echoed.text) + it for it in own["text_offset"]]
        joined = {
            name: told + (offsets if name == "text_offset" else own[name] or [])
            for name, told in echoed.logprobs.items()
            if told is not None
        }
        whole["logprobs"] = {"top_logprobs": None, **joined}
    return whole


def by_number(chunk: Chunk) -> Chunk:
    """Return a chunk whose tokens are told by their numbers."""
    if not chunk.token_bytes:
        return chunk
    others = tuple(map(_by_number, chunk.top_logprobs))
    return replace(chunk, token_bytes=(), top_logprobs=others)


def _by_number(likeliest: Iterable[TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(replace(it, token_bytes=None) for it in likeliest)


def _offsets(contents: Sequence[bytes], text: str) -> list[int]:
    """Return the offsets in a text at which tokens begin.

    A token that is not there as it reads alone, such as one that the tokenizer adds in front, or
    whose leading space it adds, takes no more room than there is.
    """
    encoded, position, length, offsets = text.encode(errors="replace"), 0, 0, []
    for content in contents:
        offsets.append(length)
        for form in (content, content.removeprefix(b" ")):
            if form and encoded.startswith(form, position):
                # A part of a character counts with the part that ends the character.
                end = position + len(form)
                length += _characters(encoded[position:end])
                position = end
                break
    return offsets


def _characters(content: bytes) -> int:
    """Count the characters that begin in some bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in content)
