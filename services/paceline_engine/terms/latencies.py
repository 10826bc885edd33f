"""What forwards were measured to take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForwardLatency:
    """What a forward of about this many rows takes: the median of the last ones."""

    rows: int
    median_ns: int


@dataclass(frozen=True, slots=True)
class StageMeasures:
    """What was measured of a stage of a stack; see Stage in the protos.

    Attributes:
        forwards: By rows, ascending; Max-Gram has none.
        verdicts: For each smaller stage, how many of its tokens were judged and accepted.
    """

    model_name: str
    forwards: tuple[ForwardLatency, ...]
    verdicts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ModelLatencies:
    """What forwards cost; see GetModelInfoResponse.

    Attributes:
        forwards: By rows, ascending.
        prefill_fixed_ns: A prompt's first forward, before its tokens count. None: not measured.
        prefill_ns_per_token: What each token of the prompt adds. None: not measured.
        stages: The measurements of each stage of a stack, largest model first.
    """

    forwards: tuple[ForwardLatency, ...]
    prefill_fixed_ns: int | None
    prefill_ns_per_token: int | None
    stages: tuple[StageMeasures, ...] = ()
