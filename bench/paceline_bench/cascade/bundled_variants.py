"""Who competes in `paceline bench cascade`: every drafter, with SI and with DSI."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from paceline import AsyncClient, DrafterKind, Strategy
from paceline_bench.contests import contest_rows, model_flags
from paceline_bench.variants import Variant, walltime_improvement
from paceline_local.running import running_system
from paceline_local.system import LocalSystemConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
    from pathlib import Path

    from paceline_bench.cascade.recipes import Recipe
    from paceline_bench.report import Row
    from paceline_local.system import LocalSystem

_PLAIN = "non-SI"


@asynccontextmanager
async def running_drafters(
    folders: Mapping[str, Path], recipes: Mapping[str, Recipe], *, targets: LocalSystem
) -> AsyncIterator[Mapping[str, AsyncClient]]:
    """Run a drafter with an orchestrator of its own for each recipe, and connect to them.

    Args:
        folders: Where the models are that draft.
        recipes: By who drafts; without models no server does.
        targets: A system without a drafter, whose targets all of them use.
    """
    addresses = tuple(server.address for server in targets.targets)
    async with AsyncExitStack() as stack:
        clients = {}
        for name, recipe in recipes.items():
            system = targets
            if recipe.models:
                config = _beside(addresses, recipe, folders)
                system = await stack.enter_async_context(running_system(config))
            client = AsyncClient(system.orchestrator_address)
            clients[name] = await stack.enter_async_context(client)
        yield clients


def _beside(
    targets: tuple[str, ...], recipe: Recipe, folders: Mapping[str, Path]
) -> LocalSystemConfig:
    own = model_flags(folders[recipe.models[0]])
    return LocalSystemConfig(
        targets=0, drafter_arguments=(*own, *recipe.drafter_flags(folders)), more_targets=targets
    )


async def contest_of_drafters(
    clients: Mapping[str, AsyncClient],
    recipes: Mapping[str, Recipe],
    prompts: Sequence[str],
    *,
    targets: int,
    max_tokens: int,
    repeats: int,
    costs: Mapping[str, Mapping[str, float]],
) -> list[Row]:
    """Let every drafter draft for every prompt, and sum up what became of it.

    Args:
        clients: Of the systems, by who drafts there.
        recipes: With what parameters.
        prompts: The texts' beginnings.
        targets: How many DSI verifies on.
        max_tokens: Tokens of each text.
        repeats: How often each is decoded by everybody.
        costs: For each way to reckon: of the models' forwards, by their names, as parts of the
            target's.
    """
    variants = list(drafted_variants(clients, recipes, targets=targets))
    rows = await contest_rows(
        [variant for variant, _ in variants], prompts, max_tokens=max_tokens, repeats=repeats
    )
    return [
        told_row(row, recipe=recipe, costs=costs)
        for row, (_, recipe) in zip(rows, variants, strict=True)
    ]


def drafted_variants(
    clients: Mapping[str, AsyncClient], recipes: Mapping[str, Recipe], *, targets: int
) -> Iterator[tuple[Variant, Recipe | None]]:
    """Name plain decoding, and SI and DSI for each recipe; DSI with the planner's lookahead."""
    anybody = next(iter(clients.values()))
    yield Variant(name=_PLAIN, client=anybody, strategy=Strategy.AUTOREGRESSIVE), None
    for name, recipe in recipes.items():
        drafter = DrafterKind.SERVER if recipe.models else DrafterKind.MAX_GRAM
        variant = partial(Variant, client=clients[name], drafter=drafter)
        strategy = Strategy.SPECULATIVE
        yield variant(name=f"SI, {name}", strategy=strategy, lookahead=recipe.lookahead), recipe
        strategy = Strategy.DISTRIBUTED
        yield variant(name=f"DSI, {name}", strategy=strategy, targets=targets), recipe


def told_row(row: Row, *, recipe: Recipe | None, costs: Mapping[str, Mapping[str, float]]) -> Row:
    """Add to a variant's row with what parameters it was, and its SWI.

    DSI has none: its forwards overlap, and SWI adds them up.
    """
    if row["strategy"] == Strategy.DISTRIBUTED.abbreviation:
        return {**row, "parameters": _chosen(row, recipe), "swi": None}
    improvements = {
        name: walltime_improvement(
            row["tokens"],
            target_forwards=row["target_forwards"],
            drafter_forwards=row["drafter_models"],
            costs=each,
        )
        for name, each in costs.items()
    }
    return {**row, "parameters": str(recipe) if recipe else "", "swi": improvements}


def _chosen(row: Row, recipe: Recipe | None) -> str:
    """Say what matrix the drafter had, if any, and which lookaheads the planner chose."""
    lookaheads = " or ".join(map(str, row["lookaheads"]))
    stack = f"{recipe.counts}; " if recipe and recipe.counts else ""
    return f"{stack}lookahead {lookaheads}"
