"""What `paceline bench load` can be told."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline import Strategy
from paceline_bench.options import names_of, numbers_to
from paceline_contract.limits import MOST_DRAFTERS, MOST_TARGETS
from paceline_local.options import PictureFile, ResultFile  # noqa: TC001 - pydantic reads them
from paceline_serving.settings import Settings, StringList, flag_of, option

STRATEGIES = {
    strategy.abbreviation.lower(): strategy
    for strategy in (
        Strategy.AUTOREGRESSIVE,
        Strategy.SPECULATIVE,
        Strategy.DISTRIBUTED,
        Strategy.AUTO,
    )
}
"""By the names that options have for them."""
SESSIONS = 1024
"""More than the streams of a run can hold at once, those that are being closed included."""
REQUESTS = 4096
"""More than the requests that a run can have at once."""
# Below 100 a load's p99 is left out; with few streams so many requests would take minutes.
MOST_OF_A_STREAM, LEAST_OF_A_STREAM = 10, 2
PARTS = ("scaling", "strategies")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "simulated": {
        "streams": "1,2,4,8,16,32,64",
        "strategies": ",".join(STRATEGIES),
        "tokens": 24,
        "requests": 100,
        "targets": 4,
    },
    "transformers": {
        "streams": "1,4,16,64",
        "strategies": "non-si,si,auto",
        "tokens": 64,
        "requests": 4,
        "targets": 1,
    },
}


_Numbers = Annotated[tuple[int, ...], numbers_to(512)]
_StrategyNames = Annotated[StringList, names_of(STRATEGIES, kind="strategy", needed=True)]
_PartNames = Annotated[StringList, names_of(PARTS, kind="part", needed=True)]


def _of_both(name: str, description: str, **limits: Any) -> Any:
    """Declare an option that has another default with real models."""
    simulated, real = (each[name] for each in _DEFAULTS.values())
    words = f"{description} (default: {simulated}; with real models {real})"
    return Field(description=words, **limits)


class _Simulated(Settings):
    """Simulated models."""

    parts: _PartNames = Field(",".join(PARTS), validate_default=True, description="parts to run")
    scaling_streams: _Numbers = Field(
        "32,64",
        validate_default=True,
        description="streams at the same time, for scaling; use many, or the streams are the limit",
    )
    orchestrators: _Numbers = Field(
        "1,2",
        validate_default=True,
        description="orchestrators to spread the streams over; all strategies are for the smallest "
        "number, the others get non-si and auto",
    )
    target_ms: float = Field(40, gt=0, le=10_000, description="ms of a target's forward")
    drafter_ms: float = Field(4, gt=0, le=10_000, description="ms of a drafter's forward")
    target_row_ms: float = Field(
        0,
        ge=0,
        le=10_000,
        description="further ms for each row of a target's forward beyond its first",
    )
    drafter_row_ms: float = Field(
        0,
        ge=0,
        le=10_000,
        description="further ms for each row of a drafter's forward beyond its first",
    )
    acceptance: float = Field(0.8, ge=0, le=1, description="how often a draft token is right")
    per_gpu: bool = Field(False, description="also tokens/s over the GPUs, one for each server")


class RealSettings(Settings):
    """Real models."""

    prompt_tokens: int = Field(64, ge=1, le=4096, description="tokens of each prompt")
    rounds: int = Field(3, ge=1, le=100, description="rounds over all methods")
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of each model")
    models: Path | None = Field(
        None, description="folder of the bundled models; without it the installed one"
    )


_OWN: dict[str, type[Settings]] = {"simulated": _Simulated, "transformers": RealSettings}


class LoadSettings(RealSettings, _Simulated):
    """Put 1 to 64 streams at once on a fixed set of targets, with every strategy.

    Simulated models wait instead of computing; processes and gRPC are real. The part `strategies`
    compares these on targets that fill up. In `scaling` orchestrators are the limit: targets are
    fast, and each orchestrator may run in a seventh of the time only, so that two have what they
    need even on two cores. All of it takes about twelve minutes, scaling alone one. The output says
    where this machine was short of CPU.

    With real models (--backend transformers) four programs decode the same number of texts at once,
    in turn on the same cores: the services, our engine in this process, and transformers' generate
    and its continuous batching; greedily, with the bundled models. It takes some ten minutes.

    The exit code is 0 if every output of ours equals plain decoding's, otherwise 1.
    """

    backend: Literal["simulated", "transformers"] = Field(
        "simulated", description="simulated models, or real ones"
    )
    streams: _Numbers = _of_both("streams", "streams at the same time")
    strategies: _StrategyNames = _of_both(
        "strategies", "strategies to load it with; non-si is always one of them"
    )
    tokens: int = _of_both("tokens", "tokens of each request", ge=2, le=4096)
    requests: int = _of_both(
        "requests",
        f"requests of each load; but {LEAST_OF_A_STREAM} to {MOST_OF_A_STREAM} of each stream, "
        "with real models 1 or more",
        ge=1,
        le=10_000,
    )
    targets: int = _of_both("targets", "target processes", ge=1, le=MOST_TARGETS)
    drafters: int = Field(1, ge=1, le=MOST_DRAFTERS, description="drafter processes")
    json_file: ResultFile | None = option(None, description="file for the results", flag="json")
    chart: PictureFile | None = Field(None, description="file for the picture, .svg or .png")

    @model_validator(mode="before")
    @classmethod
    def _fit_the_backend(cls, values: dict[str, Any]) -> dict[str, Any]:
        backend = values.get("backend", "simulated")
        for other, section in _OWN.items():
            if other != backend and (foreign := sorted({*section.model_fields} & {*values})):
                flag = flag_of(foreign[0], section.model_fields[foreign[0]])
                raise ValueError(f"{flag} goes with --backend {other} only")
        return {**_DEFAULTS.get(backend, {}), **values}
