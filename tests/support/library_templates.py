"""Conversations as transformers writes them: the oracle of our own templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast

from support.fake_text import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMED_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def by_the_library(
    source: str, messages: Sequence[Any], *, add_generation_prompt: bool = True, **more: Any
) -> str:
    """Write a conversation.

    Raises:
        Exception: Whatever the template, or the library, raises.
    """
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **NAMED_TOKENS)
    return tokenizer.apply_chat_template(
        list(messages),
        chat_template=source,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **more,
    )
