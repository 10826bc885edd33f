"""`paceline bench pair`: a drafter and a target, measured every way there is."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from paceline import AsyncClient
from paceline.errors import InvalidFieldError
from paceline_bench.options import names_of, numbers_to
from paceline_bench.pair.acceptance import common_run
from paceline_bench.pair.contest import Rules, contest, contest_rounds, read_prompts
from paceline_bench.pair.contestants import (
    engine_variants,
    library_variants,
    service_variants,
    sharing_variants,
)
from paceline_bench.pair.engine import EnginePair, decode, measure_latency, measure_rows
from paceline_bench.pair.results import acceptance_row, all_identical, model_row, variant_rows
from paceline_bench.pair.sharing import measure_sharing
from paceline_bench.pair.tables import report
from paceline_bench.report import load_average, write_json
from paceline_contract.limits import MOST_TARGETS
from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.terms.backend import ModelLoadError
from paceline_local.bundled import find_models
from paceline_local.models import NOTHING_KEPT
from paceline_local.options import PictureFile, ResultFile, read_options
from paceline_local.running import running_system
from paceline_local.screen import progress
from paceline_local.system import LocalSystemConfig
from paceline_serving.settings import Settings, StringList, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_bench.pair.acceptance import Block
    from paceline_bench.pair.contest import Contestant
    from paceline_bench.report import Row
    from paceline_engine.terms.backend import Backend

_EXAMPLES = """
paceline bench pair                                     the bundled pair; about ten minutes
paceline bench pair --parts acceptance --acceptance-prompts 10
paceline bench pair --target-model ~/big --drafter-model ~/small --prompts my-prompts.txt
paceline bench pair --device cuda:0 --dtype bfloat16 --json pair.json --chart pair.svg
paceline bench pair --device cuda:0 --dtype bfloat16 --random-target 40x5120 --random-drafter 2x768
"""
_ROW_COUNTS = (1, 2, 3, 5, 9, 17, 33)
_CONTEST = ("transformers", "engine", "services")
_PARTS = ("acceptance", *_CONTEST, "sharing")
_ROW_REPEATS = 20
_RANDOM_PROMPT = [token * 7919 % 32_000 for token in range(128)]
# Scores as close as this may come out either way, measured: forwards over blocks of other shapes
# differ by about 1e-5 in float32 and by a few units of the last place in 16 bits.
_NEAR_TIES = {"float64": 1e-9, "float32": 1e-4, "float16": 0.06, "bfloat16": 0.5}


def _check_shape(words: str | None) -> str | None:
    if words is not None:
        from paceline_bench.pair.random_models import Shape

        Shape.parse(words)
    return words


_Lookaheads = Annotated[tuple[int, ...], numbers_to(_ROW_COUNTS[-1] - 1)]
_Shape = Annotated[str | None, AfterValidator(_check_shape)]


class _Models(Settings):
    """Models."""

    target_model: str | None = Field(
        None, description="directory or hub id of the large model; without it the bundled one"
    )
    drafter_model: str | None = Field(
        None, description="directory or hub id of the small model; without it the bundled one"
    )
    models: Path | None = Field(
        None, description="folder of the bundled models; without it the installed one"
    )
    random_target: _Shape = Field(
        None,
        description="instead: random weights for a Llama of LAYERSxWIDTH, such as 40x5120; then"
        " only latencies are measured",
    )
    random_drafter: _Shape = Field(None, description="the same for the drafter")
    device: str = Field("cpu", description="device of the computation: cpu, cuda:0, ...")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = Field(
        "float32", description="dtype of the computation"
    )
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of each model")
    capture: bool = Field(
        True, description="on CUDA, record our forwards of few rows and replay them"
    )

    @model_validator(mode="after")
    def _both_are_random(self) -> Self:
        if (self.random_target is None) != (self.random_drafter is None):
            raise ValueError("--random-target and --random-drafter go together")
        return self


class PairSettings(_Models):
    """Measure a pair: latencies, acceptance, and all decoding methods in turn, in one run.

    The command compares transformers' own loops, our engine in this process, and real services on
    this machine, with the same models, prompts and threads, greedily. Each of the three loads its
    own models, and so does each process. The machine should be idle: on a busy one the services,
    several processes, get the larger share. The exit code is 0 if every text equals plain
    decoding's, otherwise 1.
    """

    parts: Annotated[StringList, names_of(_PARTS, kind="part")] = Field(
        ",".join(_PARTS), validate_default=True, description="measurements beside latencies"
    )
    prompts: Path | None = Field(
        None,
        description="file with a prompt on each line, as text or JSON; without it held-out code",
    )
    latency_prompts: int = Field(50, ge=1, description="texts on which to measure latencies")
    latency_tokens: int = Field(20, ge=2, description="tokens of each")
    acceptance_prompts: int = Field(50, ge=1, description="texts on which to measure acceptance")
    acceptance_tokens: int = Field(256, ge=1, description="tokens of each")
    contest_prompts: int = Field(12, ge=1, description="texts that every method decodes")
    contest_tokens: int = Field(64, ge=2, description="tokens of each")
    repeats: int = Field(3, ge=1, description="how often every method decodes each text")
    lookaheads: _Lookaheads = Field(
        "2,4,8", validate_default=True, description="lookaheads to compare with"
    )
    targets: int = Field(2, ge=1, le=MOST_TARGETS, description="target processes of the services")
    per_gpu: bool = Field(
        False, description="also tokens/s over the GPUs in use if each server had one"
    )
    json_file: ResultFile | None = option(None, description="file for the results", flag="json")
    chart: PictureFile | None = Field(None, description="file for the picture, .svg or .png")

    @property
    def new_tokens(self) -> int:
        """The most that any text grows by."""
        return max(
            *(self.latency_tokens, self.acceptance_tokens, self.contest_tokens),
            _ROW_COUNTS[-1],
        )


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        PairSettings, arguments, program="paceline bench pair", examples=_EXAMPLES
    )
    load_at_start = load_average()
    try:
        content = _random(settings) if settings.random_target else _Bench(settings).run()
    except ModelLoadError as error:
        raise InvalidFieldError.of("model", str(error)) from error
    per_gpu_targets = settings.targets if settings.per_gpu else None
    print(report(content, per_gpu_targets=per_gpu_targets), end="")
    if settings.json_file is not None:
        write_json(settings.json_file, **content, load_at_start=load_at_start)
    if settings.chart is not None:
        from paceline_bench.charts import save_figure
        from paceline_bench.pair.chart import draw_pair

        save_figure(draw_pair(content), settings.chart)
    return 0 if all_identical(content) else 1


def _random(settings: PairSettings) -> dict[str, Any]:
    from paceline_bench.pair.random_models import RandomModel, Shape

    def measured(shape: str | None) -> Row:
        model = RandomModel(
            Shape.parse(str(shape)),
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.threads,
            capture=settings.capture,
        )
        return _measured(model, [_RANDOM_PROMPT] * settings.latency_prompts, settings)

    return _content(measured(settings.random_target), measured(settings.random_drafter))


def _content(target: Row, drafter: Row) -> dict[str, Any]:
    """Begin what is told and kept: parts that are not measured stay empty."""
    models = {"target": target, "drafter": drafter}
    return {"models": models, "rows": [], "sharing": [], "sharing_strategies": []}


class _Bench:
    """The models of a run, and the prompts as token ids."""

    def __init__(self, settings: PairSettings) -> None:
        self._settings = settings
        # Looked for only where it is needed.
        bundled = partial(find_models, settings.models)
        self._target = settings.target_model or str(bundled().target)
        self._drafter = settings.drafter_model or str(bundled().drafter)
        prompts = read_prompts(settings.prompts or bundled().prompts)
        self._engine = EnginePair(self._load(self._target), self._load(self._drafter))
        self._texts = self._tokenised(prompts)

    def run(self) -> dict[str, Any]:
        """Do all parts that are wanted."""
        settings, engine = self._settings, self._engine
        texts = _evenly_spaced(self._texts, settings.latency_prompts)
        with progress("latencies", total=2) as step:
            target = _measured(engine.target, texts, settings)
            step("target")
            drafter = _measured(engine.drafter, texts, settings)
            step("drafter")
        content = _content(target, drafter)
        if "acceptance" in settings.parts:
            content["acceptance"] = self._acceptance()
        if not {*_CONTEST, "sharing"}.isdisjoint(settings.parts):
            asyncio.run(self._decode(content))
        return content

    def _load(self, model: str) -> Backend:
        settings = self._settings
        return load_backend(
            LoadOptions(
                model=model,
                dtype=settings.dtype,
                device=settings.device,
                threads=settings.threads,
                capture=settings.capture,
            )
        )

    def _tokenised(self, prompts: Sequence[str]) -> list[list[int]]:
        from tokenizers import Tokenizer

        target, drafter = self._engine.target, self._engine.drafter
        if target.tokenizer != drafter.tokenizer or target.tokenizer is None:
            raise InvalidFieldError.of(
                "drafter_model",
                "has another tokenizer than the target; `paceline check-pair` says how they differ,"
                " and measures it with --speak",
            )
        tokenizer = Tokenizer.from_str(target.tokenizer.decode())
        texts = [encoding.ids for encoding in tokenizer.encode_batch(prompts)]
        longest = max(map(len, texts))
        room = min(each.description.context_length for each in (target, drafter))
        if longest + self._settings.new_tokens > room:
            raise InvalidFieldError.of(
                "prompts",
                f"the longest has {longest} tokens; with {self._settings.new_tokens} more they "
                f"exceed the models' context of {room}",
            )
        return texts

    def _acceptance(self) -> Row:
        settings, engine = self._settings, self._engine
        texts = _evenly_spaced(self._texts, settings.acceptance_prompts)
        tokens, lookahead = settings.acceptance_tokens, settings.lookaheads[-1]
        runs: list[int] = []
        blocks: list[Block] = []
        speculative = engine.speculative(lookahead)
        with progress("acceptance", total=len(texts)) as step:
            for number, text in enumerate(texts, 1):
                # The target's own text, whatever the drafter does.
                decoded = speculative(text, tokens)
                drafted = decode(engine.drafter, text, tokens)
                runs.append(common_run(drafted.token_ids, decoded.token_ids))
                blocks.extend(decoded.blocks)
                step(f"text {number} of {len(texts)}")
        return acceptance_row(runs, blocks, tokens=tokens, lookahead=lookahead)

    async def _decode(self, content: dict[str, Any]) -> None:
        """Let everybody decode, and measure what sharing the hardware does."""
        parts = self._settings.parts
        async with AsyncExitStack() as stack:
            variants = self._local_variants()
            if not {"services", "sharing"}.isdisjoint(parts):
                system = await stack.enter_async_context(running_system(self._system()))
                client = await stack.enter_async_context(AsyncClient(system.orchestrator_address))
                pids = [server.pid for server in system.servers]
            if "services" in parts:
                variants += service_variants(client, self._settings.lookaheads, pids=pids)
            if variants:
                content["rows"] = await self._contest(variants)
            if "sharing" in parts:
                content["sharing"] = await measure_sharing(
                    client,
                    self._texts[0],
                    most=self._settings.targets,
                    max_tokens=self._settings.contest_tokens,
                )
                shared = list(sharing_variants(client, self._settings.targets, pids=pids))
                content["sharing_strategies"] = await self._contest(shared)

    def _local_variants(self) -> list[Contestant]:
        settings = self._settings
        variants: list[Contestant] = []
        if "transformers" in settings.parts:
            from paceline_bench.pair.library import LibraryPair

            library = LibraryPair(
                self._target,
                self._drafter,
                dtype=settings.dtype,
                device=settings.device,
                vocabulary_size=self._engine.target.description.vocabulary_size,
            )
            variants += library_variants(library, settings.lookaheads)
        if "engine" in settings.parts:
            variants += engine_variants(self._engine, settings.lookaheads)
        return variants

    async def _contest(self, variants: Sequence[Contestant]) -> list[Row]:
        settings = self._settings
        texts = _evenly_spaced(self._texts, settings.contest_prompts)
        rules = Rules(
            max_tokens=settings.contest_tokens,
            repeats=settings.repeats,
            near_tie=_NEAR_TIES[settings.dtype],
        )
        rounds = contest_rounds(len(texts), repeats=settings.repeats)
        with progress(f"{len(variants)} variants of decoding", total=rounds) as step:
            entries = await contest(variants, texts, rules=rules, gap=self._engine.gap, on_run=step)
        return variant_rows(entries)

    def _system(self) -> LocalSystemConfig:
        settings = self._settings
        flags = (
            f"--device={settings.device}",
            f"--dtype={settings.dtype}",
            f"--threads={settings.threads}",
            "--capture" if settings.capture else "--no-capture",
            NOTHING_KEPT,
        )
        return LocalSystemConfig(
            targets=settings.targets,
            drafters=1,
            target_arguments=(f"--model={self._target}", *flags),
            drafter_arguments=(f"--model={self._drafter}", *flags),
        )


def _measured(model: Backend, texts: Sequence[Sequence[int]], settings: PairSettings) -> Row:
    longest = max(texts, key=len)
    return model_row(
        model.description,
        measure_latency(model, texts, settings.latency_tokens),
        measure_rows(model, longest, _ROW_COUNTS, repeats=_ROW_REPEATS),
        context=len(longest),
    )


def _evenly_spaced(texts: Sequence[list[int]], count: int) -> list[list[int]]:
    """Take so many, evenly: neighbours come from the same file."""
    count = min(count, len(texts))
    return [texts[index * len(texts) // count] for index in range(count)]
