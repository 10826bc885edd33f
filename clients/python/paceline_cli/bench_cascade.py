"""`paceline bench cascade`: a drafter with and without Max-Gram below it, and Max-Gram alone."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Any

from pydantic import Field
from tokenizers import Tokenizer

from paceline import AsyncClient, DrafterKind, Strategy
from paceline_bench.cascade.prose import prose_prompts
from paceline_bench.cascade.recipes import CASCADE, GRIDS, MAX_GRAM, SPECULATIVE
from paceline_bench.cascade.search import (
    KnownText,
    Search,
    measured_cost,
    walltime_improvement,
)
from paceline_bench.cascade.tables import report
from paceline_bench.pair.engine import decode
from paceline_bench.report import load_average, write_json
from paceline_bench.ways import Way, parameter_count
from paceline_cli.bundled import find_models
from paceline_cli.contests import contest_rows, exit_code, held_out_prompts, model_flags
from paceline_cli.local_system import LocalSystemConfig
from paceline_cli.options import PictureFile, read_options
from paceline_cli.screen import progress
from paceline_cli.up import running_system
from paceline_engine.loading import LoadOptions, load_backend
from paceline_serving.settings import Settings, option

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline_bench.cascade.recipes import Recipe
    from paceline_bench.report import Row
    from paceline_cli.bundled import BundledModels
    from paceline_cli.local_system import LocalSystem
    from paceline_engine.backends.base import Backend

__all__ = ["CascadeSettings", "main"]

_EXAMPLES = """
paceline bench cascade                                  some ten minutes
paceline bench cascade --prompts 4 --search-prompts 2 --max-tokens 48
paceline bench cascade --json cascade.json --chart cascade.png
"""
_MEASURED, _PARAMETERS = "measured", "parameters"


class CascadeSettings(Settings):
    """Draft for the bundled target with its drafter, with Max-Gram below that, and with Max-Gram.

    Table 2 of the paper on Cascade Speculative Drafting, as far as two models go: on code and on
    prose that no model has seen, each way at its best parameters, found on other prompts by
    halving. SWI is what forwards alone make of it. Everybody decodes the same texts in turn,
    greedily, on one target with one thread. The exit code is 0 if every text was plain decoding's,
    else 1.
    """

    prompts: int = Field(12, ge=1, le=60, description="held-out prompts of each kind to decode")
    search_prompts: int = Field(6, ge=1, le=60, description="other ones to search parameters on")
    repeats: int = Field(1, ge=1, le=100, description="how often each is decoded by everybody")
    max_tokens: int = Field(96, ge=2, le=400, description="tokens of each text")
    models: Path | None = Field(None, description="folder with the bundled models, if elsewhere")
    json_file: Path | None = option(None, description="where to keep the results", flag="json")
    chart: PictureFile | None = Field(None, description="where to draw them, as .svg or .png")


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        CascadeSettings, arguments, program="paceline bench cascade", examples=_EXAMPLES
    )
    models, load_at_start = find_models(settings.models), load_average()
    content = _Bench(settings, models).run()
    print(report(content), end="")
    if settings.json_file is not None:
        write_json(settings.json_file, **content, load_at_start=load_at_start)
    if settings.chart is not None:
        from paceline_bench.cascade.chart import draw_cascade
        from paceline_bench.charts import save_figure

        save_figure(draw_cascade(content), settings.chart)
    return exit_code(content["rows"])


@dataclass(frozen=True, slots=True)
class _Texts:
    """Prompts of one kind: to decode, and to search on."""

    kind: str
    prompts: Sequence[str]
    searched: Sequence[str]


class _Bench:
    """A run: costs first, then for each kind of text a search and a contest."""

    def __init__(self, settings: CascadeSettings, models: BundledModels) -> None:
        self._settings = settings
        self._models = models
        self._target, self._drafter = _load(models.target), _load(models.drafter)
        assert self._target.tokenizer is not None
        self._tokenizer = Tokenizer.from_str(self._target.tokenizer.decode())
        weights = "model.safetensors"
        self._counts = {
            folder: parameter_count(folder / weights) for folder in (models.target, models.drafter)
        }

    def run(self) -> dict[str, Any]:
        """Do it, and return what is told and kept."""
        texts = list(self._texts())
        costs = self._costs(texts[0].prompts[0])
        searched = [row for each in texts for row in self._searched(each, costs)]
        rows = asyncio.run(self._contests(texts, searched, costs))
        return {
            "rows": rows,
            "searched": [{**row, "parameters": str(row["parameters"])} for row in searched],
            "costs": costs,
            "texts": self._settings.prompts,
            "tokens": self._settings.max_tokens,
        }

    def _texts(self) -> Iterator[_Texts]:
        code = held_out_prompts(self._models)
        lines = self._models.prompts.read_text().splitlines()
        prose = prose_prompts(list(dict.fromkeys(json.loads(line)["file"] for line in lines)))
        count, others = self._settings.prompts, self._settings.search_prompts
        for kind, prompts in (("code", code), ("prose", prose)):
            yield _Texts(kind, prompts[:count], prompts[count : count + others])

    def _costs(self, prompt: str) -> dict[str, float]:
        measured = measured_cost(self._target, self._drafter, self._ids(prompt))
        by_parameters = self._counts[self._models.drafter] / self._counts[self._models.target]
        return {_MEASURED: measured, _PARAMETERS: by_parameters}

    def _searched(self, texts: _Texts, costs: Mapping[str, float]) -> Iterator[Row]:
        known = [self._known(prompt) for prompt in texts.searched]
        search = Search(self._drafter, known)
        runs = len(GRIDS) * len(costs)
        with progress(f"parameters for {texts.kind}", total=runs) as step:
            for name, recipes in GRIDS.items():
                for cost_name, cost in costs.items():
                    best = search.best(recipes, cost=cost)
                    step(f"{name}, {cost_name} costs")
                    yield {
                        "texts": texts.kind,
                        "name": name,
                        "cost": cost_name,
                        "parameters": best,
                        "swi": search.tally(best).improvement(cost),
                    }

    def _known(self, prompt: str) -> KnownText:
        ids = self._ids(prompt)
        decoded = decode(self._target, ids, self._settings.max_tokens)
        return KnownText(tuple(ids), decoded.token_ids)

    def _ids(self, prompt: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(prompt).ids
        return ids

    async def _contests(
        self, kinds: Sequence[_Texts], searched: Sequence[Row], costs: Mapping[str, float]
    ) -> list[Row]:
        rows: list[Row] = []
        async with running_system(_system(self._models)) as system:
            for texts in kinds:
                recipes = {
                    row["name"]: row["parameters"]
                    for row in searched
                    if (row["texts"], row["cost"]) == (texts.kind, _MEASURED)
                }
                rows += await self._contest(system, texts, recipes, costs)
        return rows

    async def _contest(
        self,
        system: LocalSystem,
        texts: _Texts,
        recipes: Mapping[str, Recipe],
        costs: Mapping[str, float],
    ) -> list[Row]:
        """Let all ways decode one kind of text; the cascade has a drafter of its own."""
        stacked = _system(
            self._models,
            target=system.targets[0].address,
            drafter_flags=recipes[CASCADE].drafter_flags,
        )
        async with AsyncExitStack() as stack:
            cascade = await stack.enter_async_context(running_system(stacked))
            plain, beside = [
                await stack.enter_async_context(AsyncClient(each.orchestrator_address))
                for each in (system, cascade)
            ]
            rows = await contest_rows(
                list(_ways(recipes, plain=plain, cascade=beside)),
                texts.prompts,
                max_tokens=self._settings.max_tokens,
                repeats=self._settings.repeats,
            )
        return [
            _told(row, texts.kind, recipe=recipes.get(row["name"]), costs=costs) for row in rows
        ]


def _ways(
    recipes: Mapping[str, Recipe], *, plain: AsyncClient, cascade: AsyncClient
) -> Iterator[Way]:
    yield Way(name="non-SI", client=plain, strategy=Strategy.AUTOREGRESSIVE)
    for name, client, drafter in (
        (SPECULATIVE, plain, DrafterKind.SERVER),
        (CASCADE, cascade, DrafterKind.SERVER),
        (MAX_GRAM, plain, DrafterKind.MAX_GRAM),
    ):
        yield Way(
            name=name,
            client=client,
            strategy=Strategy.SPECULATIVE,
            lookahead=recipes[name].lookahead,
            drafter=drafter,
        )


def _told(row: Row, kind: str, *, recipe: Recipe | None, costs: Mapping[str, float]) -> Row:
    improvements = {
        name: walltime_improvement(
            row["tokens"],
            target_forwards=row["target_forwards"],
            drafter_forwards=row["drafter_forwards"],
            cost=cost,
        )
        for name, cost in costs.items()
    }
    parameters = str(recipe) if recipe is not None else ""
    return {**row, "texts": kind, "parameters": parameters, "swi": improvements}


def _system(
    models: BundledModels, *, target: str = "", drafter_flags: Sequence[str] = ()
) -> LocalSystemConfig:
    """Say what to start: a drafter, and a target unless one runs already."""
    return LocalSystemConfig(
        targets=0 if target else 1,
        target_arguments=model_flags(models.target),
        drafter_arguments=(*model_flags(models.drafter), *drafter_flags),
        more_targets=(target,) if target else (),
    )


def _load(directory: Path) -> Backend:
    return load_backend(LoadOptions(model=str(directory), dtype="float32", device="cpu", threads=1))
