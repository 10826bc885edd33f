"""`paceline train KIND`: train an adapter, with which a target drafts for itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator
from rich.console import Console

from paceline.errors import InvalidFieldError
from paceline.panics import PanicError, taking_panics
from paceline.plain_files import read_plain_text
from paceline_local.options import read_options
from paceline_serving.settings import OneOrMore, Settings, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.model_files.files import ModelFiles
    from paceline_training.objective import Joint
    from paceline_training.run import AdapterSizes
    from paceline_training.training import TrainingPlan

_EXAMPLES = """
paceline train streams --model ~/big --data texts.txt --out ~/big-streams
paceline train medusa --model ~/big --data a.txt --data b.txt --out ~/big-medusa --steps 2000
paceline train streams --model ~/big --data a.txt --validation held-out.txt --out s --rate 2e-3
paceline train streams --model ~/big --data more.txt --go-on-from ~/big-streams --out better
paceline train streams --model ~/big --data texts.txt --fine-tune ~/tuned --out ~/tuned-streams
"""
_MOST_DATA_BYTES = 4 << 30  # of a text: its tokens take several times that in memory
_CHECKPOINT_FILE = "checkpoint.pt"
# Without a validation text, the data's end is kept out of training for this purpose.
_VALIDATION_SHARE = 20
# Speculative Streaming: 5 epochs at 5e-4, linear. Medusa's script: 1 to 2 epochs at 1e-3, cosine,
# warming up for a tenth.
_PAPERS: dict[str, dict[str, Any]] = {
    "medusa": {"epochs": 2, "rate": 1e-3, "decay": "cosine", "warm_up_share": 0.1},
    "streams": {"epochs": 5, "rate": 5e-4, "decay": "linear", "warm_up_share": 0.0},
}
# With --fine-tune. Speculative Streaming: each guess's loss has the weight 0.1. Medusa-2: the
# first head's 0.2, each further one's 0.8 of that; heads learn alone at first (half of the steps,
# since each was an epoch), and four times as fast as the model.
_JOINT_RATE = 5e-4
_JOINT: dict[str, dict[str, float]] = {
    "medusa": {"first": 0.2, "next": 0.8, "adapter_rate": 4.0, "alone_share": 0.5},
    "streams": {"first": 0.1, "next": 1.0, "adapter_rate": 1.0, "alone_share": 0.0},
}


class _Sizes(Settings):
    """What is trained."""

    reach: int = Field(
        4, ge=1, le=16, description="tokens to guess after the model's own next token"
    )
    layers: int | None = Field(
        None,
        ge=1,
        description="for streams: number of upper layers with streams; without it a quarter of"
        " all layers",
    )
    rank: int = Field(
        32, ge=1, le=4096, description="for streams and --fine-tune: rank of the low-rank weights"
    )
    exit_rank: int = Field(8, ge=1, le=4096, description="for streams: rank of the early exit")
    tree_nodes: int = Field(16, ge=1, le=4096, description="guesses in the tree on the card")


class _Schedule(Settings):
    """How it is trained."""

    steps: int | None = Field(
        None, ge=1, description="number of steps; without it the paper's number of epochs"
    )
    rate: float | None = Field(
        None, gt=0, description="highest learning rate; without it the paper's"
    )
    labels: Literal["model", "text"] | None = Field(
        None,
        description="what guesses learn: the model's own distribution, or the text's token."
        " Default: the model's; with --fine-tune the text's",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of products; weights are float32"
    )
    window: int = Field(512, ge=8, description="tokens in a window of text")
    batch: int = Field(8, ge=1, description="windows in a step")
    seed: int = Field(0, ge=0, description="seed of all randomness")
    checkpoint_steps: int = Field(100, ge=1, description="steps between two saves of the state")
    report_steps: int = Field(100, ge=1, description="steps between two measurements of hit rates")
    device: str = Field(
        "",
        description="device of the computation: cpu, cuda:0, ...; without it CUDA, if there is any",
    )
    threads: int = Field(
        1, ge=1, le=1024, description="CPU threads; another number rounds differently"
    )


class TrainSettings(_Sizes, _Schedule):
    """Train an adapter, with which a target drafts for itself: streams, or Medusa's heads.

    Without --fine-tune the model stays as it is, and so does its output. With --fine-tune the
    model learns the text, too; the result is another model, with an adapter for it. If the output
    folder has a checkpoint, training continues there, with the same result as without a break.
    """

    kind: Literal["medusa", "streams"] | None = option(
        None,
        description="streams (Speculative Streaming) or medusa (Medusa's heads)",
        kind="argument",
    )
    model: str = Field("", description="directory, GGUF file or hub id of the model")
    data: OneOrMore = Field((), description="file with text to learn from")
    validation: Path | None = Field(
        None, description="file with text to measure on; without it the last twentieth of the data"
    )
    out: Path | None = Field(None, description="directory for the adapter and its card")
    go_on_from: Path | None = Field(
        None, description="begin with the weights of this adapter, which is for the same model"
    )
    fine_tune: Path | None = Field(
        None,
        description="fine-tune the model, too (Speculative Streaming's shared LoRA, Medusa-2),"
        " and write it to this directory",
    )

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.kind is None:
            raise ValueError("say which: paceline train streams, or paceline train medusa")
        if not (self.model and self.data and self.out):
            raise ValueError("--model, --data and --out are needed")
        if self.fine_tune and self.out.resolve().is_relative_to(self.fine_tune.resolve()):
            raise ValueError("--out must be a folder outside of --fine-tune")
        return self


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(TrainSettings, arguments, program="paceline train", examples=_EXAMPLES)
    import torch

    from paceline_engine.terms.backend import ModelLoadError
    from paceline_training.training import CheckpointError
    from paceline_training.windows import TextTooShortError

    # Another number of threads rounds differently, so a seed alone would not fix the result.
    torch.set_num_threads(settings.threads)
    try:
        _train(settings)
    except (CheckpointError, ModelLoadError, TextTooShortError) as error:
        print(f"paceline train: {error}", file=sys.stderr)
        return 1
    return 0


def _train(settings: TrainSettings) -> None:
    import torch

    from paceline_engine.model_files.files import find_model_files
    from paceline_training.run import TextPlan, run_training

    assert settings.kind is not None
    assert settings.out is not None
    if settings.fine_tune is not None and settings.fine_tune.exists():
        raise InvalidFieldError.of("fine_tune", f"{settings.fine_tune} exists already")
    console = Console(highlight=False, soft_wrap=True)
    files = find_model_files(settings.model)
    texts = [_read(Path(name)) for name in settings.data]
    stream = _encode(files.tokenizer, texts)
    if settings.validation is not None:
        validation = _encode(files.tokenizer, [_read(settings.validation)])
    else:
        kept = len(stream) - len(stream) // _VALIDATION_SHARE
        stream, validation = stream[:kept], stream[kept:]
    card = run_training(
        files,
        sizes=_sizes(settings, files),
        text=TextPlan(
            streams=[stream],
            validation=validation,
            window=settings.window,
            batch=settings.batch,
            seed=settings.seed,
        ),
        plan=_plan(settings, token_count=len(stream)),
        out=settings.out,
        checkpoint=settings.out / _CHECKPOINT_FILE,
        device=settings.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        tell=console.print,
        go_on_from=settings.go_on_from,
        fine_tuned=settings.fine_tune,
    )
    console.print(f"{settings.out}: {card.kind} for {card.model}, reach {card.reach}")


def _sizes(settings: TrainSettings, files: ModelFiles) -> AdapterSizes:
    from transformers import AutoConfig

    from paceline_training.run import AdapterSizes

    assert settings.kind is not None
    layers = settings.layers
    if layers is None:
        with files.laid_out() as directory:
            config = AutoConfig.from_pretrained(
                directory, trust_remote_code=False, local_files_only=True
            )
        layers = max(1, config.num_hidden_layers // 4)
    is_streams = settings.kind == "streams"
    return AdapterSizes(
        kind=settings.kind,
        reach=settings.reach,
        layers=layers if is_streams else 0,
        # In a fine-tuned model the heads share its weights.
        rank=settings.rank if is_streams and settings.fine_tune is None else 0,
        exit_rank=settings.exit_rank if is_streams else 0,
        tree_nodes=settings.tree_nodes,
    )


def _plan(settings: TrainSettings, *, token_count: int) -> TrainingPlan:
    from paceline_training.training import TrainingPlan

    joint = _joint(settings)
    paper = _PAPERS[settings.kind or ""]
    epoch = max(1, token_count // (settings.window * settings.batch))
    return TrainingPlan(
        steps=settings.steps or paper["epochs"] * epoch,
        rate=settings.rate or (paper["rate"] if joint is None else _JOINT_RATE),
        decay=paper["decay"],
        warm_up_share=paper["warm_up_share"],
        labels=settings.labels or ("model" if joint is None else "text"),
        joint=joint,
        precision=settings.precision,
        checkpoint_steps=settings.checkpoint_steps,
        report_steps=settings.report_steps,
    )


def _joint(settings: TrainSettings) -> Joint | None:
    from paceline_training.objective import Joint

    if settings.fine_tune is None:
        return None
    paper = _JOINT[settings.kind or ""]
    return Joint(
        rank=settings.rank,
        guess_weights=tuple(
            paper["first"] * paper["next"] ** ahead for ahead in range(settings.reach)
        ),
        adapter_rate=paper["adapter_rate"],
        alone_share=paper["alone_share"],
    )


def _read(path: Path) -> str:
    try:
        return read_plain_text(path, most_bytes=_MOST_DATA_BYTES, allow_pipe=True)
    except UnicodeDecodeError as error:
        raise InvalidFieldError.of("data", f"{path} is no UTF-8 text ({error.reason})") from error


def _encode(tokenizer: bytes, texts: Sequence[str]) -> Any:
    """Return the texts' token ids one after the other: (N,) int64."""
    import torch
    from tokenizers import Tokenizer

    try:
        with taking_panics():
            encoded = Tokenizer.from_buffer(tokenizer).encode_batch(texts, add_special_tokens=False)
    except PanicError as error:
        problem = f"the model's tokenizer cannot take it ({error})"
        raise InvalidFieldError.of("data", problem) from None
    return torch.tensor([id_ for each in encoded for id_ in each.ids], dtype=torch.int64)
