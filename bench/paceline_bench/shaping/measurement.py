"""Kinds of shaping in turn: the time of a token with each, and what a schema adds to the first."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline import Grammar
from paceline_bench.table import SAME_OUTPUT, Column, times

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline import AsyncClient, GenerateOptions

NONE = "none"
_TIMEOUT_SECONDS = 600.0
_BIASED = 64  # tokens
_MOST_CHARACTERS = 100_000  # more than any answer here has
_STRINGS = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 500}


def kinds(max_tokens: int) -> dict[str, GenerateOptions]:
    """Return what each kind asks for; no answer ends before its last token."""
    grammars = {
        "regular expression": Grammar(regex=rf"[\s\S]{{{_MOST_CHARACTERS}}}"),
        "JSON schema": Grammar(json_schema=_STRINGS),
    }
    return {
        NONE: {"ignore_eos": True},
        "bias": {"ignore_eos": True, "logit_bias": dict.fromkeys(range(2, 2 + _BIASED), 0.5)},
        "penalties": {
            "ignore_eos": True,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.2,
            "repetition_penalty": 1.1,
        },
        "min_tokens": {"min_tokens": max_tokens},
        **{name: {"grammar": grammar} for name, grammar in grammars.items()},
    }


@dataclass(frozen=True, slots=True)
class Heard:
    """A text, and how long its first token and each later one took, in seconds."""

    token_ids: tuple[int, ...]
    first_seconds: float
    token_seconds: float


async def listen(client: AsyncClient, prompt: str, options: GenerateOptions) -> Heard:
    """Read a text to its end, and time it.

    Raises:
        PacelineError: The request failed.
    """
    started, first = time.perf_counter(), 0.0
    token_ids: list[int] = []
    async for chunk in client.generate(prompt, timeout=_TIMEOUT_SECONDS, **options):
        if not first:
            first, first_count = time.perf_counter(), len(chunk.token_ids)
        token_ids += chunk.token_ids
    later_count = max(1, len(token_ids) - first_count)
    return Heard(tuple(token_ids), first - started, (time.perf_counter() - first) / later_count)


async def take_turn(
    client: AsyncClient, options: GenerateOptions, *, streams: int
) -> tuple[Heard, ...]:
    """Ask for as many texts at once."""
    prompts = [f"def request_{index}(" for index in range(streams)]
    return tuple(await asyncio.gather(*(listen(client, it, options) for it in prompts)))


async def measure(
    client: AsyncClient,
    common: GenerateOptions,
    *,
    streams: int,
    repeats: int,
    step: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Let the kinds take turns; the first of each compiles and warms up, and is not counted."""
    asked = kinds(common["max_tokens"])
    turns: dict[str, list[tuple[Heard, ...]]] = {name: [] for name in asked}
    for number in range(repeats + 1):
        # Who begins changes: what the turn before left behind is shared fairly.
        for name in [*asked][:: 1 if number % 2 else -1]:
            took = await take_turn(client, {**common, **asked[name]}, streams=streams)
            if number:
                turns[name].append(took)
                step(f"{name}, {streams} at once")
    return rows(turns, streams=streams)


def rows(turns: Mapping[str, Sequence[tuple[Heard, ...]]], *, streams: int) -> list[dict[str, Any]]:
    """Sum up each kind beside none, turn by turn."""
    seconds = {
        name: [median(it.token_seconds for it in turn) for turn in own]
        for name, own in turns.items()
    }
    return [
        {
            "kind": name,
            "stream_count": streams,
            "identical": all([it.token_ids for it in turn] == texts for turn in own),
            "tokens_per_second": streams / median(seconds[name]),
            "ratios": sorted(
                plain / shaped for plain, shaped in zip(seconds[NONE], seconds[name], strict=True)
            ),
        }
        for name, own in turns.items()
        if (texts := [it.token_ids for it in own[0]])
    ]


async def first_tokens(
    client: AsyncClient, common: GenerateOptions, *, repeats: int
) -> dict[str, float]:
    """Return the median ms to the first token: without a schema, with a new one, with that again.

    A new one has a property's name that no schema had before.
    """
    found: dict[str, list[float]] = {"none_ms": [], "new_ms": [], "known_ms": []}
    numbers = count(time.time_ns())
    for number in range(repeats + 1):
        name = f"p{next(numbers)}"
        value = {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"}
        properties = {name: value, "date": {"type": "string", "format": "date"}}
        schema = {"type": "object", "properties": properties, "required": [name, "date"]}
        shaped: GenerateOptions = {**common, "grammar": Grammar(json_schema=schema)}
        plain: GenerateOptions = {**common, "ignore_eos": True}
        for key, options in (("none_ms", plain), ("new_ms", shaped), ("known_ms", shaped)):
            heard = await listen(client, "def request(", options)
            if number:
                found[key].append(heard.first_seconds * 1e3)
    return {key: median(own) for key, own in found.items()}


def _ratio(row: dict[str, Any]) -> str:
    ratios = row["ratios"]
    return f"{times(median(ratios))} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


COLUMNS = (
    Column("shaping", "kind"),
    Column("streams", "stream_count"),
    Column("tokens/s", "tokens_per_second", "{:.1f}"),
    Column("over none", _ratio),
    SAME_OUTPUT,
)
