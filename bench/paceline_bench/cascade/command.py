"""`paceline bench cascade`: the bundled models that draft, alone and stacked, with Max-Gram."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Any

from pydantic import Field
from tokenizers import Tokenizer

from paceline import AsyncClient
from paceline_bench.cascade.bundled_variants import contest_of_drafters, running_drafters
from paceline_bench.cascade.prose import prose_prompts
from paceline_bench.cascade.recipes import DRAFTER, GRIDS, TEXT_ALONE, TINY
from paceline_bench.cascade.search import KnownText, Search, measured_cost
from paceline_bench.cascade.tables import report
from paceline_bench.contests import exit_code, held_out_prompts, model_flags
from paceline_bench.pair.contest import Rules, contest, contest_rounds
from paceline_bench.pair.contestants import lookup_variants
from paceline_bench.pair.engine import EnginePair, decode
from paceline_bench.pair.library import LibraryPair
from paceline_bench.pair.results import variant_rows
from paceline_bench.report import load_average, write_json
from paceline_bench.variants import parameter_count
from paceline_contract.limits import MOST_TARGETS
from paceline_engine.loading import LoadOptions, load_backend
from paceline_local.bundled import find_models
from paceline_local.options import PictureFile, ResultFile, read_options
from paceline_local.running import running_system
from paceline_local.screen import progress
from paceline_local.system import LocalSystemConfig
from paceline_serving.settings import Settings, option

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline_bench.cascade.recipes import Recipe
    from paceline_bench.report import Row
    from paceline_engine.terms.backend import Backend
    from paceline_local.bundled import BundledModels
    from paceline_local.system import LocalSystem

_EXAMPLES = """
paceline bench cascade                                  some twenty minutes
paceline bench cascade --prompts 4 --search-prompts 2 --max-tokens 48
paceline bench cascade --json cascade.json --chart cascade.png
"""
_MEASURED, _PARAMETERS = "measured", "parameters"
_NEAR_TIE = 1e-4
"""In float32: `paceline bench pair` has more of them."""


class CascadeSettings(Settings):
    """Draft for the bundled target with both smaller models, alone and stacked, and with Max-Gram.

    Table 2 of the paper on Cascade Speculative Drafting, on the bundled models: on code and on
    prose that no model has seen, each drafter at its best parameters, found on other prompts by
    halving. SWI counts forwards alone. All drafters decode the same texts in turn,
    greedily, each model with one thread: plainly, and with SI and DSI for each drafter. Then
    Max-Gram alone decodes beside the prompt lookup of transformers. The exit code is 0 if every
    text equals plain decoding's, otherwise 1.
    """

    prompts: int = Field(12, ge=1, le=60, description="held-out prompts of each kind to decode")
    search_prompts: int = Field(
        6, ge=1, le=60, description="further prompts of each kind, for the parameter search"
    )
    repeats: int = Field(1, ge=1, le=100, description="how often each method decodes each prompt")
    max_tokens: int = Field(96, ge=2, le=400, description="tokens of each text")
    targets: int = Field(2, ge=1, le=MOST_TARGETS, description="targets that DSI verifies on")
    per_gpu: bool = Field(False, description="also tokens/s over the GPUs that would be in use")
    models: Path | None = Field(
        None, description="folder of the bundled models; without it the installed one"
    )
    json_file: ResultFile | None = option(None, description="file for the results", flag="json")
    chart: PictureFile | None = Field(None, description="file for the picture, .svg or .png")


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        CascadeSettings, arguments, program="paceline bench cascade", examples=_EXAMPLES
    )
    models, load_at_start = find_models(settings.models), load_average()
    content = _Bench(settings, models).run()
    print(report(content, by_gpu=settings.per_gpu), end="")
    if settings.json_file is not None:
        write_json(settings.json_file, **content, load_at_start=load_at_start)
    if settings.chart is not None:
        from paceline_bench.cascade.chart import draw_cascade
        from paceline_bench.charts import save_figure

        save_figure(draw_cascade(content), settings.chart)
    return exit_code([*content["rows"], *content["lookup"]])


@dataclass(frozen=True, slots=True)
class _Texts:
    """Prompts of one kind: to decode, and to search on."""

    kind: str
    prompts: Sequence[str]
    searched: Sequence[str]


class _Bench:
    """A run: costs first, then for each kind of text a search and two contests."""

    def __init__(self, settings: CascadeSettings, models: BundledModels) -> None:
        self._settings = settings
        self._models = models
        self._folders = {DRAFTER: models.drafter, TINY: models.tiny}
        self._target = _load(models.target)
        self._drafters = {name: _load(folder) for name, folder in self._folders.items()}
        assert self._target.tokenizer is not None
        self._tokenizer = Tokenizer.from_str(self._target.tokenizer.decode())

    def run(self) -> dict[str, Any]:
        """Do it, and return what is told and kept."""
        texts = list(self._texts())
        costs = self._costs(texts[0].prompts[0])
        searched = [row for each in texts for row in self._searched(each, costs)]
        rows, lookup = asyncio.run(self._contests(texts, searched, costs))
        return {
            "rows": rows,
            "lookup": lookup,
            "searched": [{**row, "parameters": str(row["parameters"])} for row in searched],
            "costs": costs,
            "texts": self._settings.prompts,
            "tokens": self._settings.max_tokens,
            "targets": self._settings.targets,
        }

    def _texts(self) -> Iterator[_Texts]:
        code = held_out_prompts(self._models)
        prose = prose_prompts(list(dict.fromkeys(it["file"] for it in self._models.held_out())))
        count, others = self._settings.prompts, self._settings.search_prompts
        for kind, prompts in (("code", code), ("prose", prose)):
            yield _Texts(kind, prompts[:count], prompts[count : count + others])

    def _costs(self, prompt: str) -> dict[str, dict[str, float]]:
        ids, size = self._ids(prompt), _size(self._models.target)
        return {
            _MEASURED: {
                name: measured_cost(self._target, model, ids)
                for name, model in self._drafters.items()
            },
            _PARAMETERS: {name: _size(folder) / size for name, folder in self._folders.items()},
        }

    def _searched(self, texts: _Texts, costs: Mapping[str, Mapping[str, float]]) -> Iterator[Row]:
        known = [self._known(prompt) for prompt in texts.searched]
        search = Search(self._drafters, known)
        runs = len(GRIDS) * len(costs)
        with progress(f"parameters for {texts.kind}", total=runs) as step:
            for name, recipes in GRIDS.items():
                for cost_name, each in costs.items():
                    best = search.best(recipes, costs=each)
                    step(f"{name}, {cost_name} costs")
                    yield {
                        "texts": texts.kind,
                        "name": name,
                        "cost": cost_name,
                        "parameters": best,
                        "swi": search.tally(best).improvement(each),
                    }

    def _known(self, prompt: str) -> KnownText:
        ids = self._ids(prompt)
        decoded = decode(self._target, ids, self._settings.max_tokens)
        return KnownText(tuple(ids), decoded.token_ids)

    def _ids(self, prompt: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(prompt).ids
        return ids

    async def _contests(
        self,
        kinds: Sequence[_Texts],
        searched: Sequence[Row],
        costs: Mapping[str, Mapping[str, float]],
    ) -> tuple[list[Row], list[Row]]:
        """Let everybody decode each kind of text; return all rows, and those of lookups."""
        rows: list[Row] = []
        lookup: list[Row] = []
        targets = LocalSystemConfig(
            targets=self._settings.targets,
            drafters=0,
            target_arguments=model_flags(self._models.target),
        )
        async with running_system(targets) as system:
            for texts in kinds:
                recipes = {
                    row["name"]: row["parameters"]
                    for row in searched
                    if (row["texts"], row["cost"]) == (texts.kind, _MEASURED)
                }
                found = await self._contest(system, texts, recipes=recipes, costs=costs)
                rows += [{**row, "texts": texts.kind} for row in found]
                found = await self._lookup(system, texts, recipes[TEXT_ALONE].lookahead)
                lookup += [{**row, "texts": texts.kind} for row in found]
        return rows, lookup

    async def _contest(
        self,
        targets: LocalSystem,
        texts: _Texts,
        *,
        recipes: Mapping[str, Recipe],
        costs: Mapping[str, Mapping[str, float]],
    ) -> list[Row]:
        settings = self._settings
        async with running_drafters(self._folders, recipes, targets=targets) as clients:
            return await contest_of_drafters(
                clients,
                recipes,
                texts.prompts,
                targets=settings.targets,
                max_tokens=settings.max_tokens,
                repeats=settings.repeats,
                costs={
                    name: {self._folders[model].name: cost for model, cost in each.items()}
                    for name, each in costs.items()
                },
            )

    async def _lookup(self, targets: LocalSystem, texts: _Texts, lookahead: int) -> list[Row]:
        """Let everybody draft from the text alone."""
        settings, models = self._settings, self._models
        engine = EnginePair(self._target, self._drafters[DRAFTER])
        library = LibraryPair(
            str(models.target),
            str(models.drafter),
            dtype="float32",
            device="cpu",
            vocabulary_size=self._target.description.vocabulary_size,
        )
        pids = [server.pid for server in targets.servers]
        prompts = [self._ids(prompt) for prompt in texts.prompts]
        rules = Rules(max_tokens=settings.max_tokens, repeats=settings.repeats, near_tie=_NEAR_TIE)
        rounds = contest_rounds(len(prompts), repeats=settings.repeats)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncClient(targets.orchestrator_address))
            step = stack.enter_context(progress(f"lookups in {texts.kind}", total=rounds))
            variants = list(
                lookup_variants(library, engine, client, lookahead=lookahead, pids=pids)
            )
            entries = await contest(variants, prompts, rules=rules, gap=engine.gap, on_run=step)
        return variant_rows(entries)


def _size(folder: Path) -> int:
    return parameter_count(folder / "model.safetensors")


def _load(directory: Path) -> Backend:
    return load_backend(LoadOptions(model=str(directory), dtype="float32", device="cpu", threads=1))
