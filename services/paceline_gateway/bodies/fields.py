"""The base of the schemas of requests' bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Fields(BaseModel):
    """The base: strict types, no unknown names; null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: each for name, each in value.items() if each is not None}
        return value
