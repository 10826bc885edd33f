"""The models that a command starts on this machine, and the flags of their servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from paceline.errors import InvalidFieldError
from paceline_serving.settings import OneOrMore, Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

NOTHING_KEPT = "--keep-seconds=0"
"""Options for comparisons on the same texts: no server keeps a text of an earlier request."""


class LocalModelSettings(Settings):
    """Models that are started here."""

    backend: Literal["transformers", "simulated"] = Field(
        "transformers",
        description="real models, or stand-ins that wait as long as real forwards take",
    )
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of each model")
    target_option: OneOrMore = Field(
        (),
        description="further option of the targets, as NAME=VALUE, such as device=cuda:0:"
        " `paceline serve target --help` has them all",
    )
    drafter_option: OneOrMore = Field((), description="the same for the drafters")

    def target_arguments(self, model: str | Path | None) -> tuple[str, ...]:
        """Return a target's flags."""
        own = model_arguments(model, backend=self.backend, threads=self.threads)
        return (*own, *flags(self.target_option))

    def drafter_arguments(self, model: str | Path | None) -> tuple[str, ...]:
        """Return a drafter's flags."""
        own = model_arguments(model, backend=self.backend, threads=self.threads)
        return (*own, *flags(self.drafter_option))


def model_arguments(
    model: str | Path | None, *, backend: str = "transformers", threads: int = 1
) -> tuple[str, ...]:
    """Return a model server's flags for a model."""
    if backend == "simulated":
        return ("--backend=simulated",)
    return (f"--model={model}", f"--threads={threads}")


def flags(options: Iterable[str]) -> Iterator[str]:
    """Turn NAME=VALUE into flags.

    Raises:
        InvalidFieldError: A value is malformed.
    """
    for each in options:
        name, equals, value = each.removeprefix("--").partition("=")
        if not name or not equals:
            raise InvalidFieldError.of("option", f"{each!r} must be NAME=VALUE")
        # An option that is on or off has no value on a command line.
        if value in {"true", "false"}:
            yield f"--{name}" if value == "true" else f"--no-{name}"
        else:
            yield f"--{name}={value}"
