"""From plain settings to a loaded model. A backend is only imported when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from paceline_engine.terms.backend import PLAIN, Backend, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Which model to load, and how.

    Attributes:
        backend: A key of BACKENDS.
        model: For transformers: a directory, or a hub id where there is a network.
        revision: For a hub id: its branch, tag or commit.
        dtype: The dtype to compute in: bfloat16, float16, float32 or float64.
        weights: PLAIN, in that dtype; or INT8 or INT4: products are in eight bits or four, on a
            CPU.
        device: As torch names it: "cpu", "cuda", "cuda:1".
        threads: CPU threads of one forward.
        capture: On CUDA, record forwards of few rows and replay them.
        compile_steps: On a CPU, compile what is computed between products, where that is possible.
        invariant: Let a row's scores follow from its text alone, bit by bit.
        adapter: Directory with an adapter, by which it drafts for itself; None: it does not.
        guesses: How many it makes after a verdict; None: as the adapter's card says.
        prune_below: How likely a guess of its own has to be to be judged; see `SelfDrafter`
            and `ChainDrafter`.
        speak: Where the tokenizer of a target with another vocabulary is; None: it drafts for
            targets with its own.
        lora: LoRA adapters that sequences can have, each as NAME=DIR.
        simulated: The simulated model's parameters.
        engine_options: For vLLM: KEY=VALUE of its engine arguments.
    """

    backend: str = "transformers"
    model: str = ""
    revision: str | None = None
    dtype: str = "float32"
    weights: str = PLAIN
    device: str = "cpu"
    threads: int = 1
    capture: bool = False
    compile_steps: bool = True
    invariant: bool = False
    adapter: str | None = None
    guesses: int | None = None
    prune_below: float = 0.0
    speak: str | None = None
    lora: tuple[str, ...] = ()
    simulated: SimulatedModel = field(default_factory=SimulatedModel)
    engine_options: tuple[str, ...] = ()


def load_backend(settings: LoadOptions) -> Backend:
    """Load a model.

    Raises:
        ModelLoadError: it cannot be served; the message is one line for the operator.
    """
    load = BACKENDS.get(settings.backend)
    if load is None:
        raise ModelLoadError(f"backend {settings.backend!r} is none of {', '.join(BACKENDS)}")
    if settings.speak is None:
        return load(settings)
    if settings.backend != "transformers":
        # Others compute no rows of scores, which is what a step asks for, again and again.
        raise ModelLoadError(
            f"--speak: the {settings.backend} backend cannot speak: it has no rows"
        )
    from paceline_engine.model_files.target_tokens import find_target_tokens
    from paceline_engine.speaking.speaking_backend import speak

    target = find_target_tokens(settings.speak)  # before anything large is read
    return speak(load(settings), target)


def _load_transformers(settings: LoadOptions) -> Backend:
    try:
        from paceline_engine.torch_backend.transformers import TransformersBackend
    except ImportError as error:
        raise ModelLoadError(
            f"the transformers backend needs paceline[server] ({error})"
        ) from error
    return TransformersBackend(
        settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        weights=settings.weights,
        device=settings.device,
        threads=settings.threads,
        capture=settings.capture,
        compiled=settings.compile_steps,
        invariant=settings.invariant,
        adapter=settings.adapter,
        guesses=settings.guesses,
        prune_below=settings.prune_below,
        lora=settings.lora,
    )


def _load_vllm(settings: LoadOptions) -> Backend:
    from paceline_engine.vllm_backend.load import load_vllm

    return load_vllm(
        settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        threads=settings.threads,
        capture=settings.capture,
        invariant=settings.invariant,
        options=settings.engine_options,
    )


def _load_simulated(settings: LoadOptions) -> Backend:
    return SimulatedBackend(settings.simulated)


BACKENDS: dict[str, Callable[[LoadOptions], Backend]] = {
    "simulated": _load_simulated,
    "transformers": _load_transformers,
    "vllm": _load_vllm,
}
"""Every backend's name and how it is loaded."""
