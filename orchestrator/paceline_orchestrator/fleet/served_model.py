"""The model that new requests are served with: that of most targets, with or without an adapter."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.errors import ModelNotFoundError, NoTargetError
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.fleet.fitting import (
    commonest_adapters,
    commonest_model,
    commonest_with_lora,
    fits,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.errors import PacelineError
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.wire import ModelFacts

# So many targets are named where none is ready; all are in GetSystemInfo.
_NAMED_TARGETS = 3
_MOST_REMOVED = 256


class ServedModel:
    """Chooses the model by what the targets say of theirs.

    Args:
        targets: The targets by name; the list stays the caller's, and changes.
    """

    def __init__(self, targets: Sequence[ModelServer]) -> None:
        self._targets = targets
        # Targets with LoRA adapters that were removed: when, and what they were.
        self._removed: deque[tuple[float, ModelFacts]] = deque(maxlen=_MOST_REMOVED)

    def note_removed(self, target: ModelServer) -> None:
        """Note that a target was removed: for a while its LoRA adapters count as away."""
        if target.facts and target.facts.lora_fingerprints:
            self._removed.append((time.monotonic(), target.facts))

    def choose(self, *, lora: str = "") -> ModelFacts:
        """Return the model of most of the ready targets.

        Args:
            lora: The name of the LoRA adapter that it is to have; empty: none.

        Raises:
            NoTargetError: No target is ready, or none with this adapter: one that has it is away,
                or a target has not said yet what it has.
            ModelNotFoundError: No target has this adapter.
        """
        ready = self._ready
        model = commonest_model(ready)
        if model is None:
            raise _no_target(self._why_none_is_ready())
        if not lora:
            return model
        found = commonest_with_lora(ready, model, name=lora)
        if found is not None:
            return found
        raise self._why_without(model, lora)

    def last(self) -> ModelFacts | None:
        """Return the model, or what the targets that are known were last; None if none has said."""
        with suppress(NoTargetError):
            return self.choose()
        return commonest_model(it.facts for it in self._listed)

    def with_those_away(self, model: ModelFacts) -> ModelFacts:
        """Return a model with what any of its targets can do, also one that may be back soon."""
        counted = (it.facts for it in self._listed if it.ready or it.may_be_back_soon)
        known = (it.with_lora(model.lora) for it in counted if it and fits(it, model))
        return commonest_model(known) or model

    def silent_target(self) -> str | None:
        """Return the name of a target that may be ready soon and has not said what it has, if any.

        Nobody knows what such a target can do, so meanwhile no request is refused for good.
        """
        silent = (it.name for it in self._listed if it.facts is None and it.may_be_back_soon)
        return next(silent, None)

    def lora_adapters(self) -> Mapping[str, str]:
        """Return the model's fingerprint with each LoRA adapter that it has, also if it is away."""
        model = self.last()
        if model is None:
            return {}
        known = commonest_adapters(self._known, model)
        return {**known, **commonest_adapters(self._ready, model)}

    @property
    def _ready(self) -> list[ModelFacts | None]:
        """What the ready targets have."""
        return [it.facts for it in self._targets if it.ready]

    @property
    def _listed(self) -> list[ModelServer]:
        """The targets, without those that have said that they are something else."""
        return [it for it in self._targets if not it.misfit]

    @property
    def _known(self) -> list[ModelFacts | None]:
        """What these targets have, and those that discovery has dropped a short while ago."""
        since = time.monotonic() - shortage.ADAPTER_SECONDS
        removed = (facts for removed_at, facts in self._removed if removed_at > since)
        return [*(it.facts for it in self._listed), *removed]

    def _why_none_is_ready(self) -> str:
        if not self._targets:
            return "no target is known"
        states = [f"{it.name}: {it.status}" for it in self._targets[:_NAMED_TARGETS]]
        more = ["..."] if len(self._targets) > _NAMED_TARGETS else []
        return f"no target is ready ({', '.join(states + more)})"

    def _why_without(self, model: ModelFacts, lora: str) -> PacelineError:
        """Say why no target is ready with a LoRA adapter of a model: for now, or for good."""
        if lora in commonest_adapters(self._known, model):
            return _no_target(f"no target with the LoRA adapter {lora!r} is ready")
        if silent := self.silent_target():
            return _no_target(
                f"no target that is ready has a LoRA adapter {lora!r}, and {silent} has not said"
                " yet what it has"
            )
        words = f"lora: no target has a LoRA adapter {lora!r}"
        for it in self._listed:
            if it.facts and it.facts.with_lora(lora):
                words += f" of {model.model_name!r}; {it.name} has one of {it.facts.model_name!r}"
                break
        return ModelNotFoundError(words)


def _no_target(message: str) -> NoTargetError:
    return NoTargetError(message, retry_after_seconds=shortage.RETRY_SECONDS)
