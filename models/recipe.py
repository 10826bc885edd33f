"""The stages in their order, what each starts from, and what is written after each."""

from __future__ import annotations

import copy
import dataclasses
import json
import platform
from typing import TYPE_CHECKING

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from corpus import load_corpus
from growth import CONTEXT, build_model, grow, place
from training import Stage, Windows, train_stage
from vocabulary import token_stream, train_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TARGET_FOLDER = "python-target"
DRAFTER_FOLDER = "python-drafter"
TINY_FOLDER = "python-tiny"
TRAINING_LOG = "training.json"

STAGES = (
    Stage(
        name="base",
        layers=2,
        minutes=16,
        matrix_rate=0.02,
        embedding_rate=6e-3,
        decay_share=0.35,
    ),
    Stage(
        name="middle",
        layers=6,
        minutes=33,
        matrix_rate=0.015,
        embedding_rate=3e-3,
        decay_share=0.7,
        with_tests=True,
    ),
    Stage(
        name="target",
        layers=16,
        minutes=110,
        matrix_rate=0.008,
        embedding_rate=1.5e-3,
        decay_share=0.8,
        with_tests=True,
    ),
    Stage(
        name="drafter",
        layers=2,
        minutes=20,
        matrix_rate=0.01,
        embedding_rate=3e-3,
        decay_share=0.7,
        with_tests=True,
    ),
    Stage(
        name="tiny-base",
        layers=1,
        width=96,
        minutes=10,
        matrix_rate=0.02,
        embedding_rate=1e-2,
        decay_share=0.35,
        batch=2,
        with_tests=True,
    ),
    Stage(
        name="tiny",
        layers=1,
        width=96,
        minutes=10,
        matrix_rate=0.01,
        embedding_rate=5e-3,
        decay_share=0.7,
        batch=2,
        with_tests=True,
    ),
)


class Recipe:
    """A run of all stages, or of those that an earlier run has left.

    Args:
        output: Where the model directories and the training log go.
        work: Where finished stages and checkpoints are kept.
        minutes: Wall clock of all stages together; each gets its share of `STAGES`.
        stage_minutes: Budgets of single stages, in place of their share; with 0 a model stays what
            it starts from.
        threads: Numbers of CPU threads to choose from.
        trained: A folder with finished models and their log, from which the training of
            the target and its drafter continues. The tiny model always starts afresh.
    """

    def __init__(
        self,
        *,
        output: Path,
        work: Path,
        minutes: float,
        stage_minutes: dict[str, float],
        threads: tuple[int, ...],
        trained: Path | None = None,
    ) -> None:
        unknown = stage_minutes.keys() - {stage.name for stage in STAGES}
        if unknown:
            raise SystemExit(f"no such stage: {', '.join(sorted(unknown))}")
        share = minutes / sum(stage.minutes for stage in STAGES)
        self._stages = {
            stage.name: dataclasses.replace(
                stage, minutes=stage_minutes.get(stage.name, stage.minutes * share)
            )
            for stage in STAGES
        }
        self._output = output
        self._work = work
        self._threads = threads
        self._trained = trained
        self._earlier = _earlier_stages(trained)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._corpus = load_corpus()
        self._tokenizer = self._load_tokenizer()
        self._training = token_stream(self._corpus.training, tokenizer=self._tokenizer)
        self._tests = token_stream(self._corpus.tests, tokenizer=self._tokenizer)
        self._held_out = token_stream(self._corpus.held_out, tokenizer=self._tokenizer)

    def run(self) -> None:
        """Train every stage that is not finished yet, and write what there is after each."""
        self._describe()
        if self._trained is not None:
            self._train_on(self._trained)
            return
        base = self._stage("base", seed=1, start=lambda: _untrained(self._stages["base"], seed=1))
        self._export(base, target=self._grown(base, "target"))
        middle = self._stage("middle", seed=2, start=lambda: self._grown(base, "middle"))
        self._export(base, target=self._grown(middle, "target"))
        target = self._stage("target", seed=3, start=lambda: self._grown(middle, "target"))
        self._export(base, target=target)
        drafter = self._stage("drafter", seed=4, start=lambda: copy.deepcopy(base), teacher=target)
        self._export(drafter, target=target)
        self._export(drafter, target=target, tiny=self._tiny(target, seed=5))

    def _train_on(self, trained: Path) -> None:
        """Train a finished target further, and teach anew what drafts for it."""
        seed = 3 + len(self._earlier)
        target = self._stage("target", seed=seed, start=lambda: _load(trained / TARGET_FOLDER))
        drafter = self._stage(
            "drafter",
            seed=seed + 1,
            start=lambda: _load(trained / DRAFTER_FOLDER),
            teacher=target,
        )
        self._export(drafter, target=target, tiny=self._tiny(target, seed=seed + 2))

    def _tiny(self, target: LlamaForCausalLM, *, seed: int) -> LlamaForCausalLM | None:
        """Train the smallest model afresh, if at all: on text, which is cheap, then as a pupil."""
        name = "tiny-base"
        if not self._stages["tiny"].minutes:
            return None
        base = self._stage(name, seed=seed, start=lambda: _untrained(self._stages[name], seed=seed))
        return self._stage("tiny", seed=seed + 1, start=lambda: copy.deepcopy(base), teacher=target)

    def _describe(self) -> None:
        held_out = self._corpus.held_out
        print(
            f"Python {platform.python_version()}: {len(self._corpus.training)} training files,"
            f" {len(self._training) / 1e6:.2f} M tokens; {len(self._corpus.tests)} tests,"
            f" {len(self._tests) / 1e6:.2f} M tokens; {len(held_out)} held out,"
            f" {len(self._held_out) / 1e6:.2f} M tokens: {' '.join(file.name for file in held_out)}"
        )
        minutes = ", ".join(f"{stage.name} {stage.minutes:.0f}" for stage in self._stages.values())
        print(f"on {self._device}, minutes: {minutes}", flush=True)

    def _load_tokenizer(self) -> PreTrainedTokenizerFast:
        if self._trained is not None:
            folder = self._trained / TARGET_FOLDER
        else:
            folder = self._work / "tokenizer"
        if not folder.exists():
            train_tokenizer(self._corpus.training, context=CONTEXT).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        return tokenizer

    def _stage(
        self,
        name: str,
        *,
        seed: int,
        start: Callable[[], LlamaForCausalLM],
        teacher: LlamaForCausalLM | None = None,
    ) -> LlamaForCausalLM:
        """Train one stage, or load it when it is finished."""
        stage = self._stages[name]
        if not stage.minutes:
            return place(start(), self._device)
        folder = self._work / name
        weights, result = folder / "weights.pt", folder / "result.json"
        if result.exists():
            model = build_model(layers=stage.layers, width=stage.width)
            model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
            print(f"{name}: finished before")
            return place(model, self._device)
        folder.mkdir(parents=True, exist_ok=True)
        model = place(start(), self._device)
        reached = train_stage(
            model,
            stage=stage,
            windows=Windows(self._streams(stage), batch=stage.batch, seed=seed),
            held_out=self._held_out,
            folder=folder,
            teacher=teacher,
            thread_counts=self._threads,
        )
        torch.save(model.state_dict(), weights)
        result.write_text(json.dumps(dataclasses.asdict(stage) | dataclasses.asdict(reached)))
        print(f"{name}: {reached.tokens / 1e6:.2f} M tokens, held out {reached.held_out_loss:.4f}")
        return model

    def _streams(self, stage: Stage) -> list[torch.Tensor]:
        if stage.with_tests and len(self._tests):
            return [self._training, self._tests]
        return [self._training]

    def _grown(self, source: LlamaForCausalLM, name: str) -> LlamaForCausalLM:
        """Grow to a stage's depth and check that nothing but the depth has changed."""
        grown = grow(source, layers=self._stages[name].layers, seed=0)
        place(grown, self._device)
        probe = self._held_out[None, :64].to(self._device)
        with torch.inference_mode():
            difference = (grown(probe).logits - source(probe).logits).abs().max()
        if difference > 1e-3:
            raise RuntimeError(f"growing {name} changed the logits by {float(difference):.2g}")
        return grown

    def _export(
        self,
        drafter: LlamaForCausalLM,
        *,
        target: LlamaForCausalLM,
        tiny: LlamaForCausalLM | None = None,
    ) -> None:
        """Write the models' directories, and what the finished stages cost and reached."""
        models = {DRAFTER_FOLDER: drafter, TARGET_FOLDER: target, TINY_FOLDER: tiny}
        for name, model in models.items():
            if model is None:
                continue
            folder = self._output / name
            place(copy.deepcopy(model), "cpu", dtype=torch.bfloat16).save_pretrained(folder)
            (folder / "model.safetensors").chmod(0o644)  # Written readable by its owner alone.
            self._tokenizer.save_pretrained(folder)
        finished = (self._work / stage / "result.json" for stage in self._stages)
        log = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": self._device,
            "training_tokens": len(self._training),
            "test_tokens": len(self._tests),
            "held_out_files": [file.name for file in self._corpus.held_out],
            "stages": self._earlier
            + [json.loads(path.read_text()) for path in finished if path.exists()],
        }
        (self._output / TRAINING_LOG).write_text(json.dumps(log, indent=2) + "\n")


def _earlier_stages(trained: Path | None) -> list[dict[str, object]]:
    """Return what the log of finished models says of their stages."""
    if trained is None:
        return []
    stages: list[dict[str, object]] = json.loads((trained / TRAINING_LOG).read_text())["stages"]
    return stages


def _load(folder: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model


def _untrained(stage: Stage, *, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return build_model(layers=stage.layers, width=stage.width)
