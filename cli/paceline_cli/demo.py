"""`paceline demo`: everything once, on this machine, in two minutes."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field
from rich.console import Console

from paceline import AsyncClient, Strategy
from paceline_bench.variants import parameter_count
from paceline_cli.comparison import STRATEGIES, Asked, compare
from paceline_cli.demo_chat import answer, shown_prompts
from paceline_cli.streamed_text import TextStream, statistics_line
from paceline_cli.timeline import write_timeline
from paceline_local.bundled import find_served_models, find_smollm2
from paceline_local.models import NOTHING_KEPT, model_arguments
from paceline_local.options import read_options
from paceline_local.running import running_system
from paceline_local.screen import progress
from paceline_local.system import LocalSystemConfig
from paceline_serving.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import GenerateOptions
    from paceline_cli.comparison import Comparison
    from paceline_local.bundled import BundledModels, ServedModels
    from paceline_local.system import LocalSystem

_EXAMPLES = """
paceline demo
paceline demo --models models                     the bundled models, which continue Python code
paceline demo --models models --prompts 12 --max-tokens 128
paceline demo --output-directory /tmp/demo
"""

_PROMPT = '''\
class Stack:
    """A stack of items, the last one first."""

    def __init__(self, items=()):
        self._items = list(items)

    def push(self, item):
        """'''

# Table 2 of the DSI paper, Vicuna-13B with Vicuna-68M on CNN-DM: a forward takes so many seconds,
# the first one so many times as long.
_TARGET_SECONDS, _TARGET_FIRST = 0.0377, 5.36
_DRAFTER_SECONDS, _DRAFTER_FIRST = 0.0025, 1.04
_ACCEPTANCE = 0.63
_NODE_TARGETS, _NODE_TOKENS, _NODE_PROMPTS = 7, 50, 3

_PAPER_SPEED_UP = 1.47  # of DSI over SI, in that row

_REAL_NOTE, _SIMULATED_NOTE = "real models on this machine", "SIMULATED node with 8 GPUs"
_REAL_TARGETS = 2
_PICTURE_TOKENS = 48
_PAGE = "127.0.0.1:8000"
# A small model repeats itself when it is greedy; sampling with a seed is just as repeatable.
_STREAMED: GenerateOptions = {
    "strategy": Strategy.DISTRIBUTED,
    "max_tokens": 96,
    "temperature": 0.7,
    "top_p": 0.95,
    "seed": 4,
}


class DemoSettings(Settings):
    """Show everything once: real text, equal outputs, speed, and the timeline of a request.

    The first part runs real models in real processes on this machine: SmolLM2-135M-Instruct, which
    answers questions, with its drafter, if `make smollm2` fetched it, otherwise the bundled
    models. The second part simulates a node with 8 GPUs: each forward is a wait, as in the DSI
    paper. The exit code is 0 if every output was identical to plain decoding, otherwise 1.
    """

    prompts: int = Field(6, ge=1, le=100, description="most prompts to compare on")
    max_tokens: int = Field(48, ge=2, le=400, description="most tokens of each completion")
    models: Path | None = Field(
        None,
        description="folder of the bundled models, or of one model; without it build/smollm2, or"
        " the installed one",
    )
    output_directory: Path = Field(Path("demo-output"), description="directory for the pictures")


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(DemoSettings, arguments, program="paceline demo", examples=_EXAMPLES)
    found = find_smollm2() if settings.models is None else None
    models = found or find_served_models(settings.models)
    if models.bundled is None and (os.cpu_count() or 1) <= _REAL_TARGETS:
        # A drafter would take the targets' time: looking drafts up is faster there (bench/LOG.md).
        models = replace(models, drafter=None)
    settings.output_directory.mkdir(parents=True, exist_ok=True)
    return asyncio.run(_demo(settings, models))


async def _demo(settings: DemoSettings, models: ServedModels) -> int:
    drafts = "drafts from the text itself (Max-Gram)"
    if models.drafter is not None:
        beside = "" if models.bundled else " beside Max-Gram"
        drafts = f"a drafter of {_size(models.drafter)} million weights{beside}"
    _heading(
        f"1. Real models, in real processes on this machine: {_REAL_TARGETS} targets of"
        f" {_size(models.target)} million weights ({models.target.name}), and {drafts}"
    )
    async with running_system(_real_system(models)) as system:
        real = await _show_real(system, settings, models)
    _heading(
        f"2. SIMULATED: a node with 8 GPUs, {_NODE_TARGETS} of them targets "
        "(Vicuna-13B and a 68M drafter, Table 2 of the DSI paper)"
    )
    async with running_system(_simulated_node()) as system:
        simulated = await _show_simulated(system, settings)
    return _conclude(real, simulated, models=models, folder=settings.models)


async def _show_real(
    system: LocalSystem, settings: DemoSettings, models: ServedModels
) -> Comparison:
    async with AsyncClient(system.orchestrator_address) as client:
        if models.bundled is None:
            shown = await shown_prompts(client, has_drafter=models.drafter is not None)
            asked = [each.asked for each in shown[: settings.prompts]]
            comparison = await answer(
                client, shown[: settings.prompts], max_tokens=settings.max_tokens
            )
            Console(highlight=False).print(comparison.table())
        else:
            await _stream(client)
            texts = _held_out_prompts(models.bundled, settings.prompts)
            asked = [*map(Asked.to_continue, texts)]
            comparison = await _compare(client, asked, max_tokens=settings.max_tokens)
        picture = settings.output_directory / "timeline.svg"
        await _draw(client, asked[_busiest_prompt(comparison)], picture, note=_REAL_NOTE)
    return comparison


async def _show_simulated(system: LocalSystem, settings: DemoSettings) -> Comparison:
    async with AsyncClient(system.orchestrator_address) as client:
        texts = [f"Summarize article {number}:" for number in range(1, _NODE_PROMPTS + 1)]
        prompts = [*map(Asked.to_continue, texts)]
        comparison = await _compare(client, prompts, max_tokens=_NODE_TOKENS)
        picture = settings.output_directory / "timeline-simulated.svg"
        await _draw(client, prompts[_busiest_prompt(comparison)], picture, note=_SIMULATED_NOTE)
    return comparison


async def _stream(client: AsyncClient) -> None:
    stream = client.generate(_PROMPT, **_STREAMED)
    if not sys.stdout.isatty():
        print("The target's own tokens stand in [brackets].\n")
    with TextStream(sys.stdout, show_origins=True) as text:
        print(_PROMPT, end="", flush=True)
        async for chunk in stream:
            text.write(chunk)
    print(f"\n{statistics_line(await stream.collect())}\n")


async def _compare(client: AsyncClient, prompts: Sequence[Asked], *, max_tokens: int) -> Comparison:
    runs = len(prompts) * len(STRATEGIES)
    with progress(f"{len(prompts)} prompts x {max_tokens} tokens", total=runs) as step:
        comparison = await compare(client, prompts, max_tokens=max_tokens, on_run=step)
    Console(highlight=False).print(comparison.table())
    return comparison


async def _draw(client: AsyncClient, asked: Asked, path: Path, *, note: str) -> None:
    options: GenerateOptions = {
        **asked.options,
        "strategy": Strategy.DISTRIBUTED,
        "max_tokens": _PICTURE_TOKENS,
        "include_timeline": True,
    }
    stream = client.generate(asked.prompt, **options)
    write_timeline(path, await stream.collect(), note=note)
    print(f"\ntimeline of one DSI request: {path}")


def _busiest_prompt(comparison: Comparison) -> int:
    """Choose the prompt for the picture: the one with the most calls that a rejection ended."""
    runs = comparison.completions[Strategy.DISTRIBUTED]
    return max(
        range(len(runs)), key=lambda index: runs[index].finished.statistics.cancelled_rpc_count
    )


def _conclude(
    real: Comparison, simulated: Comparison, *, models: ServedModels, folder: Path | None
) -> int:
    identical = real.all_identical and simulated.all_identical
    cores = os.cpu_count()
    processes = _REAL_TARGETS + (models.drafter is not None)
    print()
    if identical:
        print("Every output was identical to plain decoding.")
    else:
        print("AN OUTPUT DIFFERED from plain decoding: please report it.")
    plain, si = (real.forwards(each) for each in (Strategy.AUTOREGRESSIVE, Strategy.SPECULATIVE))
    print(
        f"Each draft token that is right saves a forward of the target: SI took {si} forwards for"
        f" what plain decoding took {plain} for."
    )
    _judge(
        "On this machine",
        real,
        reason=f"{processes} model processes share {cores} cores; DSI wants one device for each.",
    )
    _judge(
        "On the simulated node",
        simulated,
        reason=f"forwards only wait there, but the calls of {_NODE_TARGETS + 2} processes share "
        f"{cores} cores.",
    )
    print(
        f"The paper measured {_PAPER_SPEED_UP:.2f}x for DSI over SI on that node. Its published SI"
        " is slower than ours:\nit pays one more target forward at each rejection"
        " (docs/performance.md)."
    )
    used = models.target if models.bundled is None else models.bundled.folder
    print(
        "\nTo watch them race in a browser, with prompts of your own:\n"
        f"  {_program()} up --http {_PAGE} --models {folder or _short(used)}\n"
        f"and open http://{_PAGE}/"
    )
    return 0 if identical else 1


def _short(path: Path) -> Path:
    """Write a path as it is from here, if it is below here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _program() -> str:
    """Return the command by which the user can run this program, even if it is not on PATH."""
    return os.path.relpath(Path(sys.executable).with_name("paceline"))


def _judge(where: str, comparison: Comparison, *, reason: str) -> None:
    """Say in one line how fast DSI was, with the reason if it was slow."""
    dsi, si = (comparison.speed_up(each) for each in (Strategy.DISTRIBUTED, Strategy.SPECULATIVE))
    slow = dsi < max(1.0, si)
    over = f", DSI over SI is {dsi / si:.2f}x" if si else ""
    print(f"{where} DSI ran at {dsi:.2f}x, SI at {si:.2f}x{over}{f': {reason}' if slow else '.'}")


def _real_system(models: ServedModels) -> LocalSystemConfig:
    # In 16 bits rounding can decide near-ties differently in a larger forward.
    options = (NOTHING_KEPT, "--dtype=float32")
    return LocalSystemConfig(
        targets=_REAL_TARGETS,
        drafters=1 if models.drafter else 0,
        target_arguments=(*model_arguments(models.target), *options),
        drafter_arguments=(*model_arguments(models.drafter), *options),
    )


def _simulated_node() -> LocalSystemConfig:
    def arguments(seconds: float, first: float) -> tuple[str, ...]:
        return (
            "--backend=simulated",
            f"--simulated-tpot-seconds={seconds}",
            f"--simulated-ttft-seconds={seconds * first:.6f}",
        )

    return LocalSystemConfig(
        targets=_NODE_TARGETS,
        drafters=1,
        target_arguments=arguments(_TARGET_SECONDS, _TARGET_FIRST),
        drafter_arguments=(
            *arguments(_DRAFTER_SECONDS, _DRAFTER_FIRST),
            f"--simulated-acceptance-rate={_ACCEPTANCE}",
        ),
    )


def _size(model: Path) -> str:
    """Say how many million weights a model has."""
    files = [model] if model.is_file() else [*model.glob("*.safetensors"), *model.glob("*.gguf")]
    return f"{sum(map(parameter_count, files)) / 1e6:.0f}"


def _held_out_prompts(models: BundledModels, count: int) -> list[str]:
    """Choose prompts, from different files if there are enough."""
    by_file = {prompt["file"]: prompt["text"] for prompt in models.held_out()}
    return list(by_file.values())[:count]


def _heading(words: str) -> None:
    Console(highlight=False).print(f"\n[bold]{words}[/]\n", soft_wrap=True)
