"""How tokens are chosen where a request does not say: as the model's authors want, or OpenAI.

The model's `generation_config.json` reaches the gateway through a target and an orchestrator. So
this is for clients over HTTP alone: over gRPC a request that says nothing is greedy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline import GenerateOptions, SystemInfo
    from paceline_gateway.fleet.orchestrators import Orchestrators

Source: TypeAlias = Literal["model", "none"]

_OPENAI: GenerateOptions = {"temperature": 1.0, "top_p": 1.0}
# What an orchestrator may say. Another name would be an option of something else.
_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class SamplingDefaults:
    """The defaults for requests.

    Args:
        orchestrators: Know the model.
        source: Whether the model's own defaults count.
    """

    def __init__(self, orchestrators: Orchestrators, *, source: Source) -> None:
        self._orchestrators = orchestrators
        self._source = source

    def of_model(self, info: SystemInfo) -> Mapping[str, float]:
        """Return what is used of what a model says."""
        if self._source == "none":
            return {}
        said = info.sampling_defaults
        return {name: said[name] for name in _NAMES if name in said}

    def complete(self, options: GenerateOptions) -> GenerateOptions:
        """Return options with what they do not say, by the newest description of the model."""
        info = self._orchestrators.last_info
        of_model = {} if info is None else self.of_model(info)
        return cast("GenerateOptions", {**_OPENAI, **of_model, **options})
