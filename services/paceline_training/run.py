"""A training run from files to files: load, train, measure, write the card."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend.adapters.card import AdapterCard, model_fingerprint
from paceline_engine.torch_backend.adapters.eagle import EagleHead
from paceline_engine.torch_backend.adapters.eagle_shape import EagleShape
from paceline_engine.torch_backend.adapters.files import (
    WEIGHTS_FILE,
    build_adapter,
    load_adapter,
    pack_weights,
)
from paceline_engine.torch_backend.device import usable_device
from paceline_engine.torch_backend.model_loading import load_model
from paceline_training.fine_tuning import FineTuning, check_names, write_fine_tuned
from paceline_training.measurement import Measurement, Reports
from paceline_training.target_texts import TextsError, most_frequent_tokens
from paceline_training.training import TrainingPlan, train_adapter
from paceline_training.windows import TextWindows, WholeTexts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paceline_engine.model_files.files import ModelFiles
    from paceline_engine.torch_backend.adapters.card import AdapterKind


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSizes:
    """What to train; see `AdapterCard`.

    Attributes:
        tree_nodes: How many guesses the card's tree has.
        draft_vocabulary: How many tokens an EAGLE head can guess; 0 for the other kinds.
    """

    kind: AdapterKind
    reach: int
    layers: int
    rank: int
    exit_rank: int
    tree_nodes: int
    draft_vocabulary: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """The text of a run.

    Attributes:
        streams: (N,) int64 each; they have equal shares of a batch. Or one of whole texts of a
            window's length: (N, L) int64.
        validation: (N,) or (N, L) int64; the run learns nothing from it.
        window: Tokens in a window.
        batch: Windows in a step.
        seed: The seed of all randomness in the run.
    """

    streams: Sequence[Tensor]
    validation: Tensor
    window: int
    batch: int
    seed: int


def run_training(
    files: ModelFiles,
    *,
    sizes: AdapterSizes,
    text: TextPlan,
    plan: TrainingPlan,
    out: Path,
    checkpoint: Path,
    device: str,
    tell: Callable[[str], None],
    go_on_from: Path | None = None,
    fine_tuned: Path | None = None,
) -> AdapterCard:
    """Train an adapter for a model and write it to a directory, with its card.

    With a joint plan the model learns, too, and the adapter is for what becomes of it.

    Args:
        files: The model's; it is computed in float32.
        sizes: The adapter's kind and sizes.
        text: The text to learn from.
        plan: How to train.
        out: The directory that is written.
        checkpoint: The file that keeps the run's state; an interrupted run continues from it.
        device: The device that torch computes on.
        tell: Called with lines of progress.
        go_on_from: An adapter of these sizes for this model; training begins with its weights.
        fine_tuned: The directory for the changed model, which must not exist. None unless the plan
            is joint.

    Raises:
        ModelLoadError: the model cannot be loaded, drafts for another model (it has a draft
            vocabulary), cannot have such an adapter, or not be fine-tuned; or the adapter to go
            on from is damaged, or is another's.
        TextsError: texts have tokens that the model does not know.
        TextTooShortError: there is too little text.
        CheckpointError: the checkpoint is damaged or of another run.
    """
    model = _load(files, sizes=sizes, plan=plan, device=device)
    for each in (*text.streams, text.validation):
        _check_tokens(each, vocabulary_size=model.config.vocab_size)
    adapter = _build(model, sizes, text).to(model.device)
    generator = torch.Generator().manual_seed(text.seed)
    adapter.start_from(model, generator=generator)
    tuning = _tune(model, files, plan, generator=generator)
    fingerprint = model_fingerprint(files)
    run = _described(sizes, text, fingerprint=fingerprint)
    if go_on_from is not None:
        earlier = _go_on(adapter, model, go_on_from, sizes=sizes, fingerprint=fingerprint)
        run["earlier"] = {"weights_sha256": earlier.weights_sha256, "training": earlier.training}
    windows = _windows(text)
    reports = Reports(
        adapter, model, text.validation, node_count=sizes.tree_nodes, plan=plan, tell=tell
    )
    tell(
        f"{sizes.kind}: {sum(each.numel() for each in adapter.parameters()):,} weights,"
        f" {plan.steps} steps of {text.batch * text.window:,} tokens on {device}"
    )
    step_count = train_adapter(
        adapter,
        model,
        plan=plan,
        windows=windows,
        run=run,
        checkpoint=checkpoint,
        report=reports.report,
        tuning=tuning,
    )
    measured = reports.last or reports.measure()  # none is left of a finished run's steps
    if tuning is not None:
        assert fine_tuned is not None, "a model that learns goes somewhere"
        base = {"model": files.name, "fingerprint": fingerprint, "text_loss": reports.base_loss}
        run |= {"base": base, "text_loss": measured.text_loss}
        files = write_fine_tuned(files, tuning, fine_tuned)
    card = _write(
        adapter,
        files,
        sizes,
        run=run,
        plan=plan,
        validation=text.validation,
        step_count=step_count,
        measured=measured,
        out=out,
    )
    checkpoint.unlink()
    return card


def _load(files: ModelFiles, *, sizes: AdapterSizes, plan: TrainingPlan, device: str) -> Any:
    """Load the model, without gradients.

    Raises:
        ModelLoadError: It drafts for another model, or cannot be loaded.
    """
    if files.draft_vocabulary is not None:
        raise ModelLoadError(
            f"model {files.name!r} has a draft vocabulary: it drafts for another model, and only"
            " targets draft for themselves"
        )
    computed_on = usable_device(device)
    # An accelerator computes the frozen model of a head in the short dtype throughout.
    is_short = sizes.kind == "eagle" and plan.precision == "bfloat16" and computed_on.type != "cpu"
    dtype = "bfloat16" if is_short else "float32"
    return load_model(files, dtype=dtype).to(computed_on).requires_grad_(False)


def _described(sizes: AdapterSizes, text: TextPlan, *, fingerprint: str) -> dict[str, Any]:
    """Describe a run by all that decides its weights besides the plan."""
    run = asdict(sizes) | {
        "fingerprint": fingerprint,
        "data": _digest(text.streams),
        "window": text.window,
        "batch": text.batch,
        "seed": text.seed,
    }
    del run["tree_nodes"]  # decides nothing of the weights
    if not sizes.draft_vocabulary:
        del run["draft_vocabulary"]  # as in checkpoints from before there was one
    return run


def _build(model: Any, sizes: AdapterSizes, text: TextPlan) -> Any:
    """Build what is to be trained; an EAGLE head guesses the tokens that the texts have most."""
    shape = None
    if sizes.kind == "eagle":
        shape = EagleShape.like(model.config, draft_vocabulary=sizes.draft_vocabulary)
    adapter = build_adapter(
        sizes.kind,
        model,
        reach=sizes.reach,
        layers=sizes.layers,
        rank=sizes.rank,
        exit_rank=sizes.exit_rank,
        eagle=shape,
    )
    if isinstance(adapter, EagleHead):
        adapter.choose_tokens(
            most_frequent_tokens(
                text.streams,
                count=adapter.shape.draft_vocabulary,
                vocabulary_size=model.config.vocab_size,
            )
        )
    return adapter


def _check_tokens(texts: Tensor, *, vocabulary_size: int) -> None:
    if texts.numel() and not 0 <= int(texts.min()) <= int(texts.max()) < vocabulary_size:
        raise TextsError(f"the texts have tokens beyond the model's {vocabulary_size}")


def _windows(text: TextPlan) -> TextWindows | WholeTexts:
    if text.streams[0].dim() == 1:
        return TextWindows(text.streams, length=text.window, batch=text.batch, seed=text.seed)
    (texts,) = text.streams
    return WholeTexts(texts, batch=text.batch, seed=text.seed)


def _go_on(
    adapter: torch.nn.Module, model: Any, directory: Path, *, sizes: AdapterSizes, fingerprint: str
) -> AdapterCard:
    """Copy another adapter's weights into an adapter, and return the other one's card."""
    loaded = load_adapter(directory, model=model, fingerprint=fingerprint)
    for size in ("kind", "reach", "layers", "rank", "exit_rank"):
        there, wanted = getattr(loaded.card, size), getattr(sizes, size)
        if there != wanted:
            raise ModelLoadError(
                f"adapter {str(directory)!r} has {size} {there}, and what is to be trained {wanted}"
            )
    if isinstance(adapter, EagleHead) and loaded.card.eagle != adapter.shape:
        raise ModelLoadError(
            f"adapter {str(directory)!r} is an EAGLE head of other sizes, or computed in another"
            f" way: {loaded.card.eagle}, and what is to be trained {adapter.shape}"
        )
    adapter.load_state_dict(loaded.module.state_dict())
    return loaded.card


def _tune(
    model: Any, files: ModelFiles, plan: TrainingPlan, *, generator: torch.Generator
) -> FineTuning | None:
    """Attach low-rank weights to a model if it learns, too."""
    if plan.joint is None:
        return None
    tuning = FineTuning(model, rank=plan.joint.rank).to(model.device)
    check_names(files, tuning)
    tuning.start_from(generator)
    tuning.attach(model)
    return tuning


def _write(
    adapter: torch.nn.Module,
    files: ModelFiles,
    sizes: AdapterSizes,
    *,
    run: dict[str, Any],
    plan: TrainingPlan,
    validation: Tensor,
    step_count: int,
    measured: Measurement,
    out: Path,
) -> AdapterCard:
    packed, digest = pack_weights(adapter, dtype=torch.bfloat16)
    known = {*asdict(sizes), "fingerprint"}  # the card has them
    facts = {key: run[key] for key in run if key not in known} | asdict(plan)
    if isinstance(adapter, EagleHead):
        can_guess = torch.isin(validation, adapter.draft_token_ids.cpu())
        facts["draft_share"] = float(can_guess.float().mean())  # of held-out text's tokens
    is_streams = sizes.kind == "streams"
    card = AdapterCard(
        kind=sizes.kind,
        model=files.name,
        fingerprint=model_fingerprint(files),
        reach=sizes.reach,
        layers=sizes.layers if is_streams else 0,
        rank=sizes.rank if is_streams else 0,
        exit_rank=sizes.exit_rank if is_streams else 0,
        tree=measured.paths,
        weights_sha256=digest,
        eagle=adapter.shape if isinstance(adapter, EagleHead) else None,
        training=facts
        | {
            "steps": step_count,
            "tokens": step_count * run["window"] * run["batch"],
            "parameters": sum(each.numel() for each in adapter.parameters()),
            "torch": torch.__version__,
            "hit_rates": measured.hit_rates,
            "tokens_per_forward": {
                "one guess each": measured.single,
                "two guesses each": measured.double,
                "tree": measured.tree,
            },
        },
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / WEIGHTS_FILE).write_bytes(packed)
    card.write(out)
    return card


def _digest(streams: Sequence[Tensor]) -> str:
    total = hashlib.sha256()
    for stream in streams:
        total.update(stream.numel().to_bytes(8, "little") + stream.numpy().tobytes())
    return total.hexdigest()
