"""What a text has to follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence  # noqa: TC003 - pydantic reads them, in users' models
from dataclasses import dataclass, fields
from typing import Any

from paceline.errors import InvalidFieldError

__all__ = ["Grammar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What a text has to follow, from its first token to its end: one of these.

    Attributes:
        json_schema: A JSON schema: the text is one JSON value. `{"type": "object"}` allows any
            object.
        regex: A regular expression in the syntax of Rust's crate regex, for the whole text.
        lark: A context-free grammar in llguidance's form of Lark, or in llama.cpp's (GBNF).
        choices: The text is one of these.

    Raises:
        InvalidFieldError: Not exactly one of them is given, or choices are one text.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    lark: str | None = None
    choices: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if sum(getattr(self, field.name) is not None for field in fields(self)) != 1:
            names = ", ".join(field.name for field in fields(self))
            raise InvalidFieldError.of("grammar", f"must be one of {names}")
        if isinstance(self.choices, str):
            raise InvalidFieldError.of("grammar", "choices must be a list of texts")
