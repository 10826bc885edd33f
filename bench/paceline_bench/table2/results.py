"""Table 2 as it is kept: a JSON row for each row and strategy."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING

from paceline_bench.report import spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline_bench.report import Row
    from paceline_bench.table2.measurement import Measured, RowResult
    from paceline_bench.table2.online import Variant


def kept(results: Sequence[RowResult]) -> dict[str, list[Row]]:
    """Describe what was measured, the lookaheads tried, and the bare calls that floors are of."""
    return {
        "rows": [line for result in results for line in _rows(result)],
        "sweeps": [_json(result, each) for result in results for each in result.swept],
        "trees": _beyond(results, lambda it: not it.drafts_ahead and not it.is_extended),
        "ahead": _beyond(results, lambda it: it.drafts_ahead),
        "extended": _beyond(results, lambda it: it.is_extended),
        "echoes": [
            {"name": result.row.name, **asdict(echo)}
            for result in results
            for echo in result.echoes.values()
        ],
    }


def _rows(result: RowResult) -> list[Row]:
    """Describe non-SI, SI, DSI as planned, and DSI at its best lookahead."""
    plain, speculative, planned = (_json(result, each) for each in result.headline)
    best = _json(result, result.distributed) | {"strategy": "DSI (best lookahead)"}
    planned |= {
        "echo_one_way_us": result.one_way_ns / 1e3,
        "restart_draft_us": _median_us(each.draft_ns for each in result.planned.restarts),
        "restart_verify_us": _median_us(each.verify_ns for each in result.planned.restarts),
        "restarts": len(result.planned.restarts),
    }
    if result.row.paper_speed_up is not None:
        planned["paper_speed_up_over_si"] = result.row.paper_speed_up
    if result.row.reference is not None:
        planned["reference_ms"] = asdict(result.row.reference)
    if result.identical:
        planned |= {
            "speed_up_over_si": result.planned.speed_over(result.speculative),
            "ideal_speed_up_over_si": result.planned.ideal_speed_over(result.speculative),
            "speed_up_over_non_si": result.planned.speed_over(result.plain),
        }
    return [plain, speculative, planned, best]


def _beyond(results: Sequence[RowResult], is_wanted: Callable[[Variant], bool]) -> list[Row]:
    return [
        _beyond_json(result, each)
        for result in results
        for each in result.beyond
        if is_wanted(each.variant)
    ]


def _beyond_json(result: RowResult, each: Measured) -> Row:
    """Describe a variant beside SI and the paper's form of its method, at the best lookaheads."""
    is_si = each.variant.strategy is result.speculative.variant.strategy
    chain = result.speculative if is_si else result.distributed
    described = _json(result, each)
    if result.identical:
        described |= {
            "speed_up_over_si": each.speed_over(result.speculative),
            "ideal_speed_up_over_si": each.ideal_speed_over(result.speculative),
            "speed_up_over_chain": each.speed_over(chain),
        }
    return described


def _json(result: RowResult, each: Measured) -> Row:
    times, over_floor = spread(each.times), spread(each.over_floor)
    return {
        "name": result.row.name,
        "strategy": each.variant.strategy_name,
        "lookaheads": each.lookaheads,
        "target_counts": each.target_counts,
        "width": each.variant.shape.width,
        "branches": each.variant.shape.branches,
        "repeats": times.count,
        "median_ms": times.median,
        "low_ms": times.low,
        "high_ms": times.high,
        "ideal_ms": statistics.median(each.ideals),
        "floor_ms": statistics.median(each.floors),
        "delayed_ms": statistics.median(each.delayed),
        "online_over_floor": over_floor.median,
        "online_over_floor_low": over_floor.low,
        "online_over_floor_high": over_floor.high,
        "online_over_ideal": statistics.median(each.over_ideal),
        "identical": each.identical,
        "times_ms": each.times,
        "ideals_ms": each.ideals,
        "floors_ms": each.floors,
        "drafted_tokens": each.drafted,
        "accepted_tokens": each.accepted,
        "ideal_accepted_tokens": each.ideal_accepted,
        "calls_on_critical_path": each.calls_on_path,
        "orchestrator_cpu_ms_per_token": each.cpu_ms_per_token,
        "restless_runs": each.restless_runs,
        "breakdown_ms": None if each.breakdown is None else asdict(each.breakdown),
    }


def _median_us(times_ns: Iterable[int | None]) -> float | None:
    known = [time_ns / 1e3 for time_ns in times_ns if time_ns is not None]
    return statistics.median(known) if known else None
