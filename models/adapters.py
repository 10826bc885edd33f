"""Train the bundled target's adapters: `python models/adapters.py streams` (or medusa).

A quarter of the text is the standard library's sources and a quarter its tests, as the pair's is;
half is what the target itself goes on with from beginnings in both, greedily. The streams are
trained in stages, each of which has more of the target's own texts and goes on from the one before.
Hit rates are measured on held-out files. An interrupted run goes on where it was, from what is in
the work folder.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from card import write_adapters
from corpus import load_corpus
from paceline_engine.model_files.files import find_model_files
from paceline_engine.torch_backend.adapters.files import WEIGHTS_FILE
from paceline_training.continuations import continue_text
from paceline_training.run import AdapterSizes, TextPlan, run_training
from paceline_training.training import TrainingPlan
from recipe import TARGET_FOLDER
from train import keep_freed_memory
from vocabulary import token_stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_FOLDER = Path(__file__).resolve().parent
_WINDOW = 256
_BATCH = 4
_PROMPT_LENGTH = 64
_OWN_TEXTS_AT_ONCE = 64

SIZES = {
    "medusa": AdapterSizes(kind="medusa", reach=4, layers=0, rank=0, exit_rank=0, tree_nodes=16),
    "streams": AdapterSizes(kind="streams", reach=4, layers=8, rank=32, exit_rank=8, tree_nodes=16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A training run, which goes on from what the stage before it made.

    Attributes:
        own_texts: With how many beginnings the target goes on.
        seed: Of all that is random in the run.
        plan: How it learns.
    """

    own_texts: int
    seed: int
    plan: TrainingPlan


def _plan(*, steps: int, rate: float) -> TrainingPlan:
    return TrainingPlan(
        steps=steps,
        rate=rate,
        decay="linear",
        warm_up_share=0.05,
        labels="model",
        precision="bfloat16",
        checkpoint_steps=20,
        report_steps=100,
    )


STAGES = {
    "medusa": [Stage(own_texts=1024, seed=1, plan=_plan(steps=1000, rate=1e-3))],
    "streams": [
        Stage(own_texts=1024, seed=1, plan=_plan(steps=2400, rate=2e-3)),
        Stage(own_texts=2048, seed=2, plan=_plan(steps=2000, rate=2e-3)),
        Stage(own_texts=3072, seed=3, plan=_plan(steps=2400, rate=2e-3)),
        Stage(own_texts=4096, seed=4, plan=_plan(steps=1200, rate=2e-3)),
    ],
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(SIZES))
    parser.add_argument("--output", type=Path, help="where the adapter goes; else beside the pair")
    parser.add_argument(
        "--work",
        type=Path,
        default=_FOLDER.parent / ".cache" / "adapters",
        help="the target's own text, and checkpoints; remove it to start afresh",
    )
    options = parser.parse_args(arguments)
    # More threads hardly help with models of this size, and the number of them changes rounding.
    torch.set_num_threads(1)
    target = _FOLDER / TARGET_FOLDER
    tokenizer = AutoTokenizer.from_pretrained(target)
    corpus = load_corpus()
    parts = (corpus.training, corpus.tests, corpus.held_out)
    training, tests, held_out = (token_stream(part, tokenizer=tokenizer) for part in parts)
    text = torch.cat((training, tests))
    output = options.output or _FOLDER / f"{TARGET_FOLDER}-{options.kind}"
    stages = STAGES[options.kind]
    earlier = None
    for number, stage in enumerate(stages, start=1):
        made = options.work / f"{options.kind}-{number}" if number < len(stages) else output
        if made is output or not (made / WEIGHTS_FILE).exists():
            own = _own_text(target, text, count=stage.own_texts, folder=options.work)
            run_training(
                find_model_files(str(target)),
                sizes=SIZES[options.kind],
                text=TextPlan(
                    streams=[training, tests if len(tests) else training, *own.chunk(2)],
                    validation=held_out,
                    window=_WINDOW,
                    batch=_BATCH,
                    seed=stage.seed,
                ),
                plan=stage.plan,
                checkpoint=options.work / f"{options.kind}-{number}.pt",
                out=made,
                device="cuda" if torch.cuda.is_available() else "cpu",
                tell=lambda line: print(line, flush=True),
                go_on_from=earlier,
            )
        earlier = made
    if options.output is None:
        write_adapters(_FOLDER)


def _own_text(target: Path, stream: Tensor, *, count: int, folder: Path) -> Tensor:
    """Have the target go on with beginnings of the text, or read what it said before."""
    path = folder / f"own-text-{count}.safetensors"
    if not path.exists():
        model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
        own = continue_text(
            model,
            stream,
            count=count,
            prompt_length=_PROMPT_LENGTH,
            length=_WINDOW - _PROMPT_LENGTH,
            at_once=_OWN_TEXTS_AT_ONCE,
            tell=lambda done: print(f"own text: {done} of {count}", flush=True),
        )
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"token_ids": own}, path)
    return load_file(path)["token_ids"]


if __name__ == "__main__":
    keep_freed_memory()
    main()
