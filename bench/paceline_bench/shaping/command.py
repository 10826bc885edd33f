"""`paceline bench shaping`: the cost of biases, penalties and grammars."""

from __future__ import annotations

import asyncio
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from paceline import AsyncClient, Strategy
from paceline_bench.contests import model_flags
from paceline_bench.options import numbers_to
from paceline_bench.report import load_average, write_json
from paceline_bench.shaping.measurement import COLUMNS, first_tokens, kinds, measure
from paceline_bench.table import markdown
from paceline_local.bundled import find_models
from paceline_local.options import ResultFile, read_options
from paceline_local.running import running_system
from paceline_local.screen import progress
from paceline_local.system import LocalSystemConfig
from paceline_serving.settings import Settings, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import GenerateOptions

_EXAMPLES = """
paceline bench shaping
paceline bench shaping --target build/smollm2 --streams 1,16 --tokens 64 --json shaping.json
"""


class ShapingBenchSettings(Settings):
    """Decode the same texts with each kind of shaping and with none, in turn.

    Plain decoding on one target with one thread, so that each token is one forward and one row of
    logits that is shaped. "over none" is tokens/s beside the turn without shaping. Then the time to
    the first token with a schema that the target does not know, and with the same one again.
    The exit code is 0 if each kind gave the same texts in all its turns, otherwise 1.
    """

    streams: Annotated[tuple[int, ...], numbers_to(1024)] = Field(
        "1,8", validate_default=True, description="requests at the same time"
    )
    tokens: int = Field(64, ge=2, le=1024, description="tokens of each request")
    repeats: int = Field(5, ge=1, le=1000, description="turns of each kind")
    target: Path | None = Field(
        None, description="folder of the target model; without it the bundled one"
    )
    json_file: ResultFile | None = option(None, description="file for the results", flag="json")


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        ShapingBenchSettings, arguments, program="paceline bench shaping", examples=_EXAMPLES
    )
    load_at_start = load_average()
    rows, first = asyncio.run(_run(settings))
    print(markdown(rows, COLUMNS))
    print(
        f"To the first token: {first['none_ms']:.1f} ms; with a new schema"
        f" {first['new_ms']:.1f} ms, with a known one {first['known_ms']:.1f} ms."
    )
    if settings.json_file is not None:
        system = settings.model_dump(mode="json", exclude={"json_file"})
        write_json(
            settings.json_file, rows, first=first, load_at_start=load_at_start, system=system
        )
    return 0 if all(each["identical"] for each in rows) else 1


async def _run(settings: ShapingBenchSettings) -> tuple[list[dict[str, Any]], dict[str, float]]:
    target = settings.target or find_models(None).target
    config = LocalSystemConfig(targets=1, drafters=0, target_arguments=model_flags(target))
    common: GenerateOptions = {
        "strategy": Strategy.AUTOREGRESSIVE,
        "max_tokens": settings.tokens,
        "temperature": 1.0,
        "seed": 1,
    }
    total = len(settings.streams) * settings.repeats * len(kinds(settings.tokens))
    async with (
        running_system(config) as system,
        AsyncClient(system.orchestrator_address) as client,
    ):
        with progress("all kinds in turn", total=total) as step:
            rows = [
                row
                for streams in settings.streams
                for row in await measure(
                    client, common, streams=streams, repeats=settings.repeats, step=step
                )
            ]
        first = await first_tokens(client, {**common, "max_tokens": 2}, repeats=settings.repeats)
    return rows, first
