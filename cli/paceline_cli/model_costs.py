"""SWI of a generation: its gain by the numbers of forwards and by given costs of a forward.

SWI estimates the gain of a pair or a stack of models on other hardware: forwards are counted, and
the cost of each is an assumption. Other costs (rows, calls, other requests) are left out. If a
prompt takes several forwards, all count, as in plain decoding. So SWI is not a measured speed-up;
the metric `paceline_speedup_vs_autoregressive` is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import BeforeValidator

from paceline_bench.variants import walltime_improvement
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
"""The cost of a forward, by model; the target is `target`, with a cost of 1 by default."""


def improvement_told(
    statistics: Statistics, *, token_count: int, costs: Mapping[str, float]
) -> str:
    """Describe the SWI of a generation, or why it is unknown; empty without costs.

    Args:
        statistics: The generation's statistics.
        token_count: The number of its new tokens.
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
