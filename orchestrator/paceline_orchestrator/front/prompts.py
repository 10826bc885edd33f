"""A request's prompt as token ids: text, parts of a text, or two texts with a gap."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

from paceline.errors import UnsupportedError
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.front.prompt_parts import Part, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline_orchestrator.front.prompt_parts import Piece
    from paceline_orchestrator.front.tokenizer import Codec

# So many are read, or written, in a millisecond.
_PART_TOKENS = 1 << 15


def generation_of(request: pb.TokenizeRequest) -> pb.GenerateRequest:
    """Return a generation with the same text, which is tokenised in the same way."""
    same = pb.GenerateRequest(add_special_tokens=True)
    for field, value in request.ListFields():
        if field.name == "parts":
            same.parts.CopyFrom(request.parts)
        elif field.name != "include_token_bytes":
            setattr(same, field.name, value)
    return same


async def token_ids_of(ids: Sequence[int]) -> tuple[int, ...]:
    """Return a message's tokens; many are read on a thread, where streams do not wait for it."""
    if len(ids) <= _PART_TOKENS:
        return tuple(ids)
    return await asyncio.to_thread(lambda: tuple(_in_parts(ids)))


def tokens_message(
    token_ids: Sequence[int], *, bytes_of: Callable[[int], bytes] | None
) -> pb.TokenizeResponse:
    """Write tokens down, in parts: other threads run between them.

    Args:
        token_ids: The tokens.
        bytes_of: Returns the bytes of a token; None if they are not told.
    """
    message = pb.TokenizeResponse()
    for start in range(0, len(token_ids), _PART_TOKENS):
        part = token_ids[start : start + _PART_TOKENS]
        message.token_ids.extend(part)
        if bytes_of is not None:
            message.token_bytes.extend(map(bytes_of, part))
    return message


def _in_parts(ids: Sequence[int]) -> Iterator[int]:
    for start in range(0, len(ids), _PART_TOKENS):
        yield from ids[start : start + _PART_TOKENS]


def prompt_size(request: pb.GenerateRequest) -> int:
    """Return how many characters a prompt has; 0 if it is token ids."""
    return sum(map(len, _texts(request)))


def is_prompt_longer(request: pb.GenerateRequest, most_bytes: int) -> bool:
    """Whether a prompt has more than so many bytes of UTF-8, all its texts together."""
    texts = _texts(request)
    return sum(map(len, texts)) > most_bytes or sum(len(it.encode()) for it in texts) > most_bytes


def encode_prompt(
    request: pb.GenerateRequest, codec: Codec, *, fim_token_ids: tuple[int, ...]
) -> tuple[int, ...]:
    """Tokenise a prompt, whichever kind it is; see GenerateRequest for the options.

    Args:
        request: What to tokenise.
        codec: With what.
        fim_token_ids: The model's tokens for a gap; see GetModelInfoResponse.

    Concurrency: other threads run meanwhile.

    Raises:
        InvalidFieldError: The tokenizer gives up on this text.
        UnsupportedError: The model has no tokens for a gap.
    """
    if request.HasField("token_ids"):
        return tuple(request.token_ids.ids)
    add = not request.HasField("add_special_tokens") or request.add_special_tokens
    parse = request.parse_special_tokens
    if request.HasField("text"):
        return codec.encode(request.text, add_special_tokens=add, parse_special_tokens=parse)
    pieces: list[Piece]
    if request.HasField("fill_in"):
        fill_in = request.fill_in
        before, between, last = map(Token, _fim_tokens(codec, fim_token_ids))
        prefix, suffix = Part(fill_in.prefix, parse), Part(fill_in.suffix, parse)
        pieces = [before, prefix, between, suffix, last]
    else:
        pieces = [Part(it.text, it.parse_special_tokens) for it in request.parts.parts]
    return codec.encode_pieces(pieces, add_special_tokens=add)


def _fim_tokens(codec: Codec, token_ids: tuple[int, ...]) -> list[str]:
    texts = [text for it in token_ids if (text := codec.added_text(it))]
    if not texts or len(texts) < len(token_ids):
        raise UnsupportedError(
            "fill_in: the model's tokenizer has no tokens that ask for what is between two texts"
        )
    return texts


def _texts(request: pb.GenerateRequest) -> Sequence[str]:
    if request.HasField("fill_in"):
        return (request.fill_in.prefix, request.fill_in.suffix)
    return (request.text, *(it.text for it in request.parts.parts))


def request_key(request: pb.GenerateRequest, *, share: str) -> str:
    """Name what a client asks for: the same however often it is resumed, or sent again.

    Cost: the prompt is copied, some milliseconds for the longest.
    """
    same = type(request)()
    same.CopyFrom(request)
    # What clients change when they send it again, to resume it or from its beginning.
    same.ClearField("resume_token_ids")
    same.ClearField("seed")
    same.ClearField("request_id")
    same.ClearField("prompt_logprobs")
    same.ClearField("include_prompt")
    asked = same.SerializeToString(deterministic=True)
    return hashlib.sha256(share.encode() + b" " + asked).hexdigest()
