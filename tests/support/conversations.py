"""Conversations as tests write them: as chat's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline_gateway.bodies.completion_schemas import ChatBody

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline_gateway.conversations.conversation import Conversation


def conversation_of(messages: Sequence[Mapping[str, Any]], **more: Any) -> Conversation:
    """Read a conversation as the gateway does."""
    body = {"model": "m", "messages": list(messages), **more}
    return ChatBody.model_validate(body).conversation
