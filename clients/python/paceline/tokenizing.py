"""The wire's requests to tokenise a text, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import InvalidFieldError
from paceline.request import build_request
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.prompts import PromptPart


def tokenize_request(
    text: str | Sequence[PromptPart],
    *,
    add_special_tokens: bool,
    parse_special_tokens: bool,
    include_token_bytes: bool,
) -> orchestrator_pb.TokenizeRequest:
    """Build the request for the tokens of a text.

    Raises:
        InvalidFieldError: It is no text.
    """
    prompt = build_request(text, {})
    request = orchestrator_pb.TokenizeRequest(
        add_special_tokens=add_special_tokens,
        parse_special_tokens=parse_special_tokens,
        include_token_bytes=include_token_bytes,
    )
    if prompt.HasField("parts"):
        request.parts.CopyFrom(prompt.parts)
    elif prompt.HasField("text"):
        request.text = prompt.text
    else:
        raise InvalidFieldError.of("text", "must be text, or parts of a text")
    return request


def detokenize_request(token_ids: Sequence[int]) -> orchestrator_pb.DetokenizeRequest:
    """Build the request for the text of tokens.

    Raises:
        InvalidFieldError: They are no token ids.
    """
    try:
        return orchestrator_pb.DetokenizeRequest(token_ids=token_ids)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError.of("token_ids", str(error)) from error
