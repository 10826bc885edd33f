"""`paceline bench self`: targets that draft for themselves, beside plain decoding and SI."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from paceline import AsyncClient, Strategy
from paceline.errors import InvalidFieldError
from paceline_bench.contests import contest_rows, exit_code, held_out_prompts, model_flags
from paceline_bench.options import numbers_to
from paceline_bench.report import load_average, write_json
from paceline_bench.self_drafting.tables import report, sweep_report
from paceline_bench.variants import Variant, parameter_count
from paceline_contract.limits import MOST_LOOKAHEAD
from paceline_engine.terms.validation import MOST_TREE_TOKENS
from paceline_local.bundled import find_models
from paceline_local.options import PictureFile, ResultFile, read_options
from paceline_local.running import running_system
from paceline_local.screen import progress
from paceline_local.system import LocalSystemConfig
from paceline_serving.settings import OneOrMore, RateList, Settings, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_local.bundled import BundledModels

_EXAMPLES = """
paceline bench self --adapter models/python-target-medusa
paceline bench self --adapter ~/medusa --adapter ~/streams --prompts 24 --chart self.png
paceline bench self --adapter ~/streams --sweep --prompts 6 --max-tokens 48 --chart sweep.png
paceline bench self --adapter ~/streams --sweep --widths 1,2 --sizes 4,16 --prune-below 0,0.01
"""
_OF_SWEEPS = ("widths", "sizes", "prune_below")


class SelfSettings(Settings):
    """Decode held-out prompts with a target alone, with a drafter (SI), and by itself.

    One process has the bundled target, and one more for each adapter drafts for itself. All decode
    the same texts in turn, greedily, on one target with one thread. Tokens and rows of a forward do
    not depend on the machine; speeds do, so look at ratios.
    The exit code is 0 if every text equals plain decoding's, otherwise 1.

    With --sweep trees of many sizes and shapes are tried instead, in one process without services:
    all combinations of the best guesses for each reach and width (gamma and k), and the likeliest
    guesses, each with and without pruning if the adapter can. Adapters with streams in different
    numbers of layers are also drawn over these.
    """

    adapter: OneOrMore = Field((), description="directory with an adapter")
    guesses: int = Field(
        0,
        ge=0,
        le=MOST_TREE_TOKENS,
        description="tokens to guess after each verdict; 0: the numbers on the adapters' cards",
    )
    prompts: int = Field(12, ge=1, le=120, description="held-out prompts to decode")
    repeats: int = Field(1, ge=1, le=100, description="how often each method decodes each prompt")
    max_tokens: int = Field(96, ge=2, le=400, description="tokens of each text")
    lookahead: int = Field(
        4, ge=1, le=MOST_LOOKAHEAD, description="draft tokens in a verification of SI"
    )
    sweep: bool = Field(False, description="try many trees, and pruning, in this process")
    widths: Annotated[tuple[int, ...], numbers_to(16)] = Field(
        "1-3", validate_default=True, description="for a sweep: guesses at each position (k)"
    )
    sizes: Annotated[tuple[int, ...], numbers_to(MOST_TREE_TOKENS)] = Field(
        "1,2,4,8,16,32,64",
        validate_default=True,
        description="for a sweep: guesses in trees of the likeliest",
    )
    prune_below: RateList = Field(
        (0.0, 0.001, 0.01),
        min_length=1,
        max_length=8,
        description="for a sweep: thresholds of pruning; 0: none",
    )
    per_gpu: bool = Field(False, description="also tokens/s over the GPUs that would be in use")
    models: Path | None = Field(
        None, description="folder of the bundled models; without it the installed one"
    )
    json_file: ResultFile | None = option(None, description="file for the results", flag="json")
    chart: PictureFile | None = Field(None, description="file for the picture, .svg or .png")

    @model_validator(mode="after")
    def _sweeps_or_not(self) -> Self:
        if self.sweep and not self.adapter:
            raise ValueError("--sweep needs an --adapter")
        if self.sweep and self.per_gpu:
            raise ValueError("--per-gpu does not go with --sweep, which has one device")
        if self.guesses and not self.adapter:
            raise ValueError("--guesses goes with --adapter")
        if self.sweep and self.guesses:
            raise ValueError("--guesses does not go with --sweep, which has --sizes")
        for name in _OF_SWEEPS:
            if not self.sweep and name in self.model_fields_set:
                raise ValueError(f"--{name.replace('_', '-')} goes with --sweep")
        return self


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        SelfSettings, arguments, program="paceline bench self", examples=_EXAMPLES
    )
    models = find_models(settings.models)
    adapters = {path: _parameters(Path(path)) for path in settings.adapter}
    load_at_start = load_average()
    if settings.sweep:
        content = _swept(settings, models)
        print(sweep_report(content), end="")
    else:
        content = asyncio.run(_run(settings, models, adapters))
        print(report(content, by_gpu=settings.per_gpu), end="")
    if settings.json_file is not None:
        write_json(settings.json_file, **content, load_at_start=load_at_start)
    if settings.chart is not None:
        _draw(content, settings)
    return exit_code(content["rows"])


def _draw(content: dict[str, Any], settings: SelfSettings) -> None:
    # Here, because loading them takes most of a second.
    from paceline_bench.charts import save_figure
    from paceline_bench.self_drafting.chart import draw_self_drafting, draw_sweep

    assert settings.chart is not None
    draw = draw_sweep if settings.sweep else draw_self_drafting
    save_figure(draw(content), settings.chart)


def _swept(settings: SelfSettings, models: BundledModels) -> dict[str, Any]:
    # Here, because the services' bench needs no torch in this process.
    from paceline_bench.self_drafting.sweep import SweepPlan, sweep

    plan = SweepPlan(
        widths=settings.widths,
        sizes=settings.sizes,
        thresholds=settings.prune_below,
        max_tokens=settings.max_tokens,
    )
    prompts = held_out_prompts(models)[: settings.prompts]
    adapters = {Path(path).name: Path(path) for path in settings.adapter}
    with progress(
        f"{len(prompts)} texts x {settings.max_tokens} tokens", total=len(prompts)
    ) as step:
        rows = sweep(models.target, adapters, prompts, plan=plan, tell=step)
    return {"rows": rows, "texts": len(prompts), "tokens": settings.max_tokens}


async def _run(
    settings: SelfSettings, models: BundledModels, adapters: dict[str, int]
) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        both = await stack.enter_async_context(running_system(_system(models)))
        client = await stack.enter_async_context(AsyncClient(both.orchestrator_address))
        variants = [
            Variant(name="non-SI", client=client, strategy=Strategy.AUTOREGRESSIVE),
            Variant(
                name=f"SI, lookahead {settings.lookahead}",
                client=client,
                strategy=Strategy.SPECULATIVE,
                lookahead=settings.lookahead,
                extra_parameters=parameter_count(models.drafter / "model.safetensors"),
            ),
        ]
        for path, extra_parameters in adapters.items():
            flags = (f"--adapter={path}", f"--guesses={settings.guesses}")
            system = _system(models, adapter=flags)
            alone = await stack.enter_async_context(running_system(system))
            client = await stack.enter_async_context(AsyncClient(alone.orchestrator_address))
            name = f"self-SI, {Path(path).name}"
            variants.append(
                Variant(
                    name=name,
                    client=client,
                    strategy=Strategy.SELF_SPECULATIVE,
                    extra_parameters=extra_parameters,
                )
            )
        prompts = held_out_prompts(models)[: settings.prompts]
        rows = await contest_rows(
            variants, prompts, max_tokens=settings.max_tokens, repeats=settings.repeats
        )
        return {"rows": rows, "texts": len(prompts), "tokens": settings.max_tokens}


def _system(models: BundledModels, *, adapter: tuple[str, ...] = ()) -> LocalSystemConfig:
    target, drafter = model_flags(models.target), model_flags(models.drafter)
    if adapter:
        return LocalSystemConfig(targets=1, drafters=0, target_arguments=(*target, *adapter))
    return LocalSystemConfig(targets=1, target_arguments=target, drafter_arguments=drafter)


def _parameters(adapter: Path) -> int:
    try:
        return parameter_count(adapter / "adapter.safetensors")
    except (OSError, ValueError) as error:
        raise InvalidFieldError.of("adapter", f"{adapter} has no weights: {error}") from error
