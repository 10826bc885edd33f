"""SWI of a generation: what its forwards make of it, with the costs that the caller gives.

It says what a pair or a stack of models would gain on other hardware than the one that it ran on:
forwards are counted, and what each costs is an assumption. What else takes time (rows, calls, other
requests) is left out, and where a prompt takes several forwards they count, as they do in plain
decoding. So it is no measured speed-up; that is the metric `paceline_speedup_vs_autoregressive`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import BeforeValidator

from paceline_bench.cascade.improvement import walltime_improvement
from paceline_contract.words import counted
from paceline_local.screen import safe
from paceline_serving.settings import separated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline import Statistics

_TARGET = "target"


def _read_costs(value: object) -> dict[str, float]:
    """Read "base=0.1,small=0.03", or the same as a mapping from a file."""
    if isinstance(value, dict):
        pairs = [f"{name}={cost}" for name, cost in value.items()]
    else:
        words = [str(each) for each in value] if isinstance(value, list) else str(value)
        pairs = separated(words)
    costs = dict(map(_read_cost, pairs))
    if costs.get(_TARGET) == 0:
        raise ValueError("the target costs something")
    return costs


def _read_cost(pair: str) -> tuple[str, float]:
    name, _, words = pair.rpartition("=")
    try:
        cost = float(words)
    except ValueError:
        cost = math.nan
    if not name or not 0 <= cost < math.inf:
        raise ValueError(f"{pair!r} is not MODEL=COST, such as small=0.03")
    return name, cost


ModelCosts: TypeAlias = Annotated[dict[str, float], BeforeValidator(_read_costs)]
"""What a forward costs, by model; the target is `target`, and 1 where it is not named."""


def improvement_told(
    statistics: Statistics, *, token_count: int, costs: Mapping[str, float]
) -> str:
    """Say the SWI of a generation, or why it has none; nothing without costs.

    Args:
        statistics: What it took.
        token_count: Its new tokens.
        costs: See ModelCosts.
    """
    if not costs:
        return ""
    ran = {each.model_name: each.forward_count for each in statistics.drafter_models}
    unknown = sorted(ran.keys() - costs.keys())
    if unknown:
        return f"SWI unknown: --model-costs has no cost for {safe(', '.join(unknown))}"
    if statistics.cancelled_rpc_count:
        cancelled = counted(statistics.cancelled_rpc_count, "call")
        return f"SWI unknown: {cancelled} withdrawn, and the forwards in them are not counted"
    if not statistics.target_forward_count:
        return ""
    improvement = walltime_improvement(
        token_count,
        target_forwards=statistics.target_forward_count,
        drafter_forwards=ran,
        costs={name: cost / costs.get(_TARGET, 1.0) for name, cost in costs.items()},
    )
    return f"SWI {improvement:.2f}"
