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
    from collections.abc import Callable, Sequence

    from torch import Tensor

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
paceline train eagle --model ~/big --data texts.txt --own-texts 2000 --out ~/big-eagle
paceline train eagle --model ~/big --texts ~/big-texts --out ~/big-eagle --seconds 3600
paceline train eagle --model ~/big --data texts.txt --adopt ~/published-head --out ~/big-eagle
"""
_MOST_DATA_BYTES = 4 << 30  # of a text: its tokens take several times that in memory
_CHECKPOINT_FILE = "checkpoint.pt"
# Without a validation text, the data's end is kept out of training for this purpose.
_VALIDATION_SHARE = 20
_MOST_HELD_OUT = 64  # texts of the target's, of which measuring takes half at most
_OWN_TEXTS_FOLDER = "texts"
# Speculative Streaming: 5 epochs at 5e-4, linear. Medusa's script: 1 to 2 epochs at 1e-3, cosine,
# warming up for a tenth. EAGLE-3's recipes: 10 to 40 epochs of texts that the target wrote, at 1e-4
# for heads of large models; a narrower head takes a higher rate. All of them: AdamW. The
# head that was measured learnt more in the same time with Muon (bench/LOG.md).
_PAPERS: dict[str, dict[str, Any]] = {
    "medusa": {"epochs": 2, "rate": 1e-3, "decay": "cosine", "warm_up_share": 0.1},
    "streams": {"epochs": 5, "rate": 5e-4, "decay": "linear", "warm_up_share": 0.0},
    "eagle": {"epochs": 10, "rate": 5e-4, "decay": "cosine", "warm_up_share": 0.03},
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
    draft_vocabulary: int = Field(
        8192,
        ge=1,
        le=1 << 20,
        description="for eagle: how many tokens it can guess, the most frequent ones of the texts",
    )


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
    seconds: float | None = Field(
        None,
        gt=0,
        description="limit for the time of the steps: the learning rate falls to zero at its end."
        " The result then depends on the machine's speed",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of products; weights are float32"
    )
    optimizer: Literal["adamw", "muon"] | None = Field(
        None,
        description="what turns gradients into steps: AdamW, or Muon for the matrices and AdamW for"
        " the rest. Default: muon for eagle, else adamw",
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
    """Train an adapter, with which a target drafts for itself: streams, heads, or an EAGLE head.

    Without --fine-tune the model stays as it is, and so does its output. With --fine-tune the
    model learns the text, too; the result is another model, with an adapter for it. If the output
    folder has a checkpoint, training continues there, with the same result as without a break.
    """

    kind: Literal["medusa", "streams", "eagle"] | None = option(
        None,
        description="streams (Speculative Streaming), medusa (Medusa's heads), or eagle (EAGLE-3's"
        " head)",
        kind="argument",
    )
    model: str = Field("", description="directory, GGUF file or hub id of the model")
    data: OneOrMore = Field((), description="file with text to learn from")
    validation: Path | None = Field(
        None, description="file with text to measure on; without it the last twentieth of the data"
    )
    texts: Path | None = Field(
        None,
        description="for eagle, instead of --data: folder with texts that the model wrote, all of"
        " one length: safetensors files with token_ids",
    )
    own_texts: int | None = Field(
        None,
        ge=2,
        description="for eagle: let the model write so many texts, from beginnings in the data, and"
        " learn from these instead of the data",
    )
    adopt: Path | None = Field(
        None,
        description="for eagle: train nothing, but find out how this published head is computed, on"
        " texts that the model writes from beginnings in the data, and write it with a card",
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
            raise ValueError("say which: paceline train streams, medusa, or eagle")
        if not (self.model and (self.data or self.texts) and self.out):
            raise ValueError("--model, --data and --out are needed")
        self._check_eagle()
        if self.fine_tune and self.optimizer == "muon":
            raise ValueError("--fine-tune: a model's low-rank weights learn with adamw alone")
        if self.fine_tune and self.out.resolve().is_relative_to(self.fine_tune.resolve()):
            raise ValueError("--out must be a folder outside of --fine-tune")
        return self

    def _check_eagle(self) -> None:
        if self.kind == "eagle":
            if self.fine_tune is not None or self.labels == "text":
                raise ValueError("an EAGLE head learns the model's own distribution, and it alone")
            if self.texts is not None and (self.data or self.own_texts):
                raise ValueError("--texts stands instead of --data and --own-texts")
        elif self.texts is not None or self.own_texts is not None or self.adopt is not None:
            raise ValueError("--texts, --own-texts and --adopt are for paceline train eagle")


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(TrainSettings, arguments, program="paceline train", examples=_EXAMPLES)
    import torch

    from paceline_engine.terms.backend import ModelLoadError
    from paceline_training.target_texts import TextsError
    from paceline_training.training import CheckpointError
    from paceline_training.windows import TextTooShortError

    # Another number of threads rounds differently, so a seed alone would not fix the result.
    torch.set_num_threads(settings.threads)
    try:
        _train(settings)
    except (CheckpointError, ModelLoadError, TextsError, TextTooShortError) as error:
        print(f"paceline train: {error}", file=sys.stderr)
        return 1
    return 0


def _train(settings: TrainSettings) -> None:
    import torch

    from paceline_engine.model_files.files import find_model_files
    from paceline_training.adopted import adopt_head
    from paceline_training.run import TextPlan, run_training

    assert settings.kind is not None
    assert settings.out is not None
    if settings.fine_tune is not None and settings.fine_tune.exists():
        raise InvalidFieldError.of("fine_tune", f"{settings.fine_tune} exists already")
    console = Console(highlight=False, soft_wrap=True)
    files = find_model_files(settings.model)
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    stream, validation = _texts(settings, files, device=device, tell=console.print)
    if settings.adopt is not None:
        card = adopt_head(
            files,
            settings.adopt,
            validation=validation,
            reach=settings.reach,
            out=settings.out,
            device=device,
            tell=console.print,
        )
        console.print(f"{settings.out}: {card.kind} for {card.model}, reach {card.reach}")
        return
    window = settings.window if stream.dim() == 1 else stream.shape[1]
    card = run_training(
        files,
        sizes=_sizes(settings, files),
        text=TextPlan(
            streams=[stream],
            validation=validation,
            window=window,
            batch=settings.batch,
            seed=settings.seed,
        ),
        plan=_plan(settings, token_count=stream.numel(), window=window),
        out=settings.out,
        checkpoint=settings.out / _CHECKPOINT_FILE,
        device=device,
        tell=console.print,
        go_on_from=settings.go_on_from,
        fine_tuned=settings.fine_tune,
    )
    console.print(f"{settings.out}: {card.kind} for {card.model}, reach {card.reach}")


def _texts(
    settings: TrainSettings, files: ModelFiles, *, device: str, tell: Callable[[str], None]
) -> tuple[Tensor, Tensor]:
    """Return what to learn from and what to measure on: (N,) each, or texts of one length."""
    from paceline_training.target_texts import load_texts, split_off, write_texts

    folder = settings.texts
    if folder is None:
        stream = _encode(files.tokenizer, [_read(Path(name)) for name in settings.data])
        if settings.own_texts is None:
            if settings.validation is not None:
                return stream, _encode(files.tokenizer, [_read(settings.validation)])
            kept = len(stream) - len(stream) // _VALIDATION_SHARE
            return stream[:kept], stream[kept:]
        assert settings.out is not None
        folder = settings.out / _OWN_TEXTS_FOLDER
        write_texts(
            files,
            stream,
            folder=folder,
            count=settings.own_texts,
            length=settings.window,
            device=device,
            tell=tell,
        )
    texts = load_texts(folder)
    if settings.validation is not None:
        return texts, _encode(files.tokenizer, [_read(settings.validation)])
    return split_off(texts, count=min(_MOST_HELD_OUT, max(1, len(texts) // _VALIDATION_SHARE)))


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
        draft_vocabulary=settings.draft_vocabulary if settings.kind == "eagle" else 0,
    )


def _plan(settings: TrainSettings, *, token_count: int, window: int) -> TrainingPlan:
    from paceline_training.training import TrainingPlan

    joint = _joint(settings)
    paper = _PAPERS[settings.kind or ""]
    epoch = max(1, token_count // (window * settings.batch))
    return TrainingPlan(
        steps=settings.steps or paper["epochs"] * epoch,
        rate=settings.rate or (paper["rate"] if joint is None else _JOINT_RATE),
        decay=paper["decay"],
        warm_up_share=paper["warm_up_share"],
        labels=settings.labels or ("model" if joint is None else "text"),
        joint=joint,
        precision=settings.precision,
        optimizer=settings.optimizer or ("muon" if settings.kind == "eagle" else "adamw"),
        checkpoint_steps=settings.checkpoint_steps,
        report_steps=settings.report_steps,
        seconds=settings.seconds,
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
