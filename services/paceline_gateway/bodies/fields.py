"""The base of the schemas of requests' bodies, and the errors that they have in common."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

UNKNOWN_KIND = "unknown_kind"
"""The type of the error about a tool of an unknown kind, which may be left out."""

_MOST_KIND = 100


class Fields(BaseModel):
    """The base: strict types, no unknown names; null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: each for name, each in value.items() if each is not None}
        return value

    def check_fields(self, names: Iterable[str]) -> None:
        """Refuse an object that lacks one of some fields, which its kind needs."""
        for name in names:
            if getattr(self, name) is None:
                raise problem("needs the field {name}", name=name)


def problem(words: str, /, **more: Any) -> PydanticCustomError:
    """Return an error about a value; the words have placeholders for the further arguments."""
    # The library wants a literal, to know the placeholders.
    return PydanticCustomError("value", cast("Any", words), more or None)


def unsupported(words: str, /, **more: Any) -> PydanticCustomError:
    """Return the same for a value that means something, and is not supported."""
    return PydanticCustomError("unsupported", cast("Any", words), more or None)


def known_kind(
    kinds: Collection[str], *, thing: str, error: str = "unsupported"
) -> BeforeValidator:
    """Refuse an object of another kind, such as an image; an object without a kind passes.

    Args:
        thing: What the object is, with its article.
        error: The error's type.
    """

    def check(value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            words = f"is {thing} of the kind {{kind}}, which is not supported"
            told = {"kind": json.dumps(kind[:_MOST_KIND])}
            raise PydanticCustomError(cast("Any", error), cast("Any", words), told)
        return value

    return BeforeValidator(check)
