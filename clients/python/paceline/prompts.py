"""Prompts that are more than a text or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of a text. The parts are tokenised as one text.

    Attributes:
        text: The text; not empty.
        parse_special_tokens: Whether special tokens written in it are parsed as such. A template's
            text is parsed; the text of people is not.
    """

    text: str
    parse_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class FillIn:
    """Two texts with a gap to fill. The model's tokenizer must have tokens for this.

    Attributes:
        prefix: The text before the gap.
        suffix: The text after the gap.
    """

    prefix: str
    suffix: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[PromptPart] | FillIn
"""Text, token ids, parts of a text, or two texts with a gap."""
