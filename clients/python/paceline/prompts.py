"""Prompts that are more than a text or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of a text. The parts are tokenised as one text.

    Attributes:
        text: What stands there; not empty.
        parse_special_tokens: Whether special tokens written in it are parsed as such: a template's
            are, what people say is not.
    """

    text: str
    parse_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class FillIn:
    """Two texts, between which text is wanted. The model's tokenizer has to have tokens for that.

    Attributes:
        prefix: What comes before.
        suffix: What comes after.
    """

    prefix: str
    suffix: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[PromptPart] | FillIn
"""Text, token ids, parts of a text, or two texts with a gap."""
