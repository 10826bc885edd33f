"""From an operator's settings to a model host."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.simulated import SimulatedModel
from paceline_engine.stack_backend.stacks import StackOptions, load_stack
from paceline_engine.terms.backend import ModelLoadError
from paceline_model_server.settings import MOST_DERIVED_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_engine.terms.backend import Backend
    from paceline_model_server.settings import ModelServerSettings


def new_host(
    settings: ModelServerSettings, *, role: str, on_failure: Callable[[str], None]
) -> ModelHost:
    """Make the host that settings describe; it loads when it is started.

    Args:
        role: "drafter" or "target"; a simulated target agrees with itself.
        on_failure: Called when the device can compute nothing more.
    """
    simulated = SimulatedModel(
        ttft_seconds=settings.simulated_ttft_seconds,
        tpot_seconds=settings.simulated_tpot_seconds,
        row_seconds=settings.simulated_row_seconds,
        acceptance_rate=settings.simulated_acceptance_rate if role == "drafter" else 1.0,
        rank_decay=settings.simulated_rank_decay,
        self_rates=settings.simulated_self_rates if role == "target" else (),
        self_nodes=settings.simulated_self_nodes,
        vocabulary_size=settings.simulated_vocabulary_size,
        context_length=settings.simulated_context_length,
        salt=settings.simulated_salt,
    )
    model = LoadOptions(
        backend=settings.backend,
        model=settings.model,
        revision=settings.model_revision or None,
        dtype=settings.dtype,
        weights=settings.weights,
        device=settings.device,
        threads=settings.threads,
        capture=settings.capture,
        compile_steps=settings.compile_steps,
        invariant=settings.invariant,
        adapter=settings.adapter or None,
        guesses=settings.guesses or None,
        prune_below=settings.prune_below,
        speak=settings.speak or None,
        lora=settings.lora,
        simulated=simulated,
        engine_options=settings.engine_option,
    )

    stack = StackOptions(
        then=settings.then,
        cascade=settings.cascade,
        leniency=settings.leniency,
        tie=settings.max_gram_tie,
        bigrams=settings.max_gram_bigrams or None,
    )

    def load() -> Backend:
        if stack.then and role != "drafter":
            raise ModelLoadError("--then: only a drafter drafts with a stack")
        if model.adapter and role != "target":
            raise ModelLoadError("--adapter: only a target drafts for itself")
        if model.speak and role != "drafter":
            raise ModelLoadError("--speak: only a drafter drafts for another model")
        backend = load_stack(model, stack) if stack.then else load_backend(model)
        if role == "target" and not backend.description.scores_every_token:
            raise ModelLoadError(
                f"model {backend.description.name!r} has a draft vocabulary: it drafts, and a"
                " target has to score every token"
            )
        if settings.model_name:
            backend.description = replace(backend.description, name=settings.model_name)
        if backend.description.name in dict(backend.description.lora_fingerprints):
            raise ModelLoadError(
                f"--lora: an adapter is called {backend.description.name!r}, as the model is"
            )
        return backend

    return ModelHost(
        load,
        limits=_limits(settings),
        on_device_lost=lambda error: on_failure(f"the device is lost: {error}"),
    )


def _limits(settings: ModelServerSettings) -> HostLimits:
    limits = HostLimits(
        session_limit=settings.session_limit,
        queue_limit=settings.queue_limit,
        keep_seconds=settings.keep_seconds,
    )
    if settings.token_budget is not None:
        return replace(limits, token_budget=settings.token_budget)
    if settings.backend == "simulated":
        return limits
    return replace(limits, token_budget=MOST_DERIVED_TOKENS, fits_memory=True)
