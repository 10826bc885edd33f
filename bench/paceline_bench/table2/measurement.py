"""Table 2 of the DSI paper, online: strategies on a row's servers, beside ideal and floor.

A run's ideal is the simulated schedule of the same request (ideal.py). Its floor is that schedule
with the overhead of a bare gRPC call (echo.py), for the same time of sleep, charged once to each
call on the schedule's critical path. A draft is one call, however many tokens it streams: only its
first token waits for the request to arrive, the others come at the drafter's pace. Nothing else is
charged: not the client's own call, and not the opening of sessions. Where calls take longer, a path
other than the ideal one may become the critical one; the floor does not follow, so if anything it
is too low. Beside it stands `delayed`: the simulator with that overhead on every call.

Each repeat has a prompt of its own, which all strategies continue in turn. Ratios are taken prompt
by prompt, so the luck of the prompts is not in them.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from paceline import Strategy
from paceline_bench.table2.ideal import ideal_schedule
from paceline_bench.table2.online import PLAIN, PLANNED, Variant, is_identical
from paceline_bench.table2.trace import mean_breakdown
from paceline_protocol.draft_shape import CHAIN, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paceline_bench.simulated_servers import SimulatedServers, Table2Row
    from paceline_bench.table2.echo import Echo
    from paceline_bench.table2.ideal import Plan, Schedule
    from paceline_bench.table2.online import OnlineSystem, Run
    from paceline_bench.table2.trace import Breakdown, Restart, Trace
    from paceline_protocol.laboratory.simulation import ServerLatency

_TRACED_PROMPTS = 5
_SI = Variant(Strategy.SPECULATIVE)


@dataclass(slots=True)
class RowRuns:
    """The runs on a row's servers.

    Attributes:
        by_variant: The timed ones: of each variant one for each prompt, in the same order.
        traces: Further ones, taken apart: non-SI, the best SI, and DSI as planned.
    """

    by_variant: dict[Variant, list[Run]] = field(default_factory=dict)
    traces: dict[Variant, list[tuple[Run, Trace]]] = field(default_factory=dict)

    def best(self, kind: Variant) -> Variant:
        """Return the fastest variant of a kind: the median over prompts, in units of non-SI's time.

        A prompt that takes long, or a run that was disturbed, so counts no more than another.
        """
        own = (variant for variant in self.by_variant if variant.kind == kind.kind)
        return min(own, key=lambda variant: statistics.median(self._over_plain(variant)))

    def is_identical(self, variant: Variant) -> bool:
        """Whether every output of a variant is plain decoding's for the same prompt."""
        own = [*self.by_variant[variant], *(run for run, _ in self.traces.get(variant, ()))]
        return is_identical(own, self.by_variant[PLAIN])

    def _over_plain(self, variant: Variant) -> Iterable[float]:
        both = zip(self.by_variant[variant], self.by_variant[PLAIN], strict=True)
        return (run.elapsed_ns / plain.elapsed_ns for run, plain in both)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One way to decode, on one row. Times are in ms, one for each prompt.

    Attributes:
        lookaheads: Those in use, ascending: several if the planner changed its mind.
        target_counts: How many targets were in use, likewise.
        times: Online.
        ideals: What the simulator takes for the same request.
        floors: The ideals with the bare calls' overhead.
        delayed: What the simulator takes if every call has the bare overhead: the critical path may
            become another one.
        tokens_per_run: Tokens of each output.
        identical: Whether every output was plain decoding's, online and in the simulator.
        drafted: Draft tokens received, in all runs together.
        accepted: Draft tokens accepted.
        ideal_accepted: The same in the simulator.
        cpu_ms_per_token: What the orchestrator computed.
        restless_runs: Runs that began while the orchestrator still computed behind an earlier one.
        calls_on_path: Calls on the ideal's critical path, on average.
        breakdown: Where the time of the traced runs went; None where none was traced.
        restarts: What rejections cost in them.
    """

    variant: Variant
    lookaheads: tuple[int, ...]
    target_counts: tuple[int, ...]
    times: tuple[float, ...]
    ideals: tuple[float, ...]
    floors: tuple[float, ...]
    delayed: tuple[float, ...]
    tokens_per_run: int
    identical: bool
    drafted: int
    accepted: int
    ideal_accepted: int
    cpu_ms_per_token: float
    restless_runs: int
    calls_on_path: float
    breakdown: Breakdown | None
    restarts: tuple[Restart, ...]

    @property
    def over_floor(self) -> tuple[float, ...]:
        """Online over floor, prompt by prompt."""
        return _ratios(self.times, self.floors)

    @property
    def over_ideal(self) -> tuple[float, ...]:
        """Online over ideal, prompt by prompt."""
        return _ratios(self.times, self.ideals)

    def speed_over(self, other: Measured) -> float:
        """How many times as fast as another variant: the median over the prompts."""
        return statistics.median(_ratios(other.times, self.times))

    def ideal_speed_over(self, other: Measured) -> float:
        """The same of the ideals."""
        return statistics.median(_ratios(other.ideals, self.ideals))


@dataclass(frozen=True, slots=True)
class RowResult:
    """What was measured on one row.

    Attributes:
        echoes: The bare calls, by sleep in ns.
        plain: Non-SI.
        speculative: SI at its best lookahead.
        planned: DSI as the planner chose.
        distributed: DSI at its best lookahead, the planner's included.
        swept: Every lookahead that was tried, of SI and DSI.
        beyond: What the paper has not, each at its best lookahead: SI and DSI with trees, and SI
            that drafts ahead; none if that was not asked for.
    """

    row: Table2Row
    echoes: Mapping[int, Echo]
    plain: Measured
    speculative: Measured
    planned: Measured
    distributed: Measured
    swept: tuple[Measured, ...]
    beyond: tuple[Measured, ...] = ()

    def __str__(self) -> str:
        times = (
            f"{each.variant.strategy_name} {statistics.median(each.times):.0f} ms"
            for each in self.headline
        )
        return f"{self.row.name}: {', '.join(times)}"

    @property
    def max_tokens(self) -> int:
        """Tokens of each run."""
        return self.plain.tokens_per_run

    @property
    def headline(self) -> tuple[Measured, Measured, Measured]:
        """Non-SI, SI at its best, DSI as planned."""
        return self.plain, self.speculative, self.planned

    @property
    def identical(self) -> bool:
        """Whether every output was plain decoding's."""
        return all(each.identical for each in (*self.headline, *self.swept))

    @property
    def one_way_ns(self) -> int:
        """A bare call's way to a server that has just been idle for a target's forward."""
        return self.echoes[int(self.row.servers.target.step)].one_way_ns


def variants(
    si_lookaheads: Iterable[int],
    dsi_lookaheads: Iterable[int],
    *,
    shape: Shape = CHAIN,
    ahead: bool = False,
    extended: bool = False,
) -> list[Variant]:
    """List what is measured on a row, in the order of a repeat; what the paper has not comes last.

    Args:
        si_lookaheads: Of SI, however it drafts.
        dsi_lookaheads: Of DSI, besides the planner's.
        shape: Of the trees with which SI and DSI come once more; a chain: they do not.
        ahead: Whether SI comes once more drafting ahead, with trees, too.
        extended: Whether DSI comes once more with the text itself beyond its drafter.
    """
    si = [Variant(Strategy.SPECULATIVE, lookahead) for lookahead in si_lookaheads]
    dsi = [Variant(Strategy.DISTRIBUTED, lookahead) for lookahead in dsi_lookaheads]
    ahead_of_si = [replace(variant, drafts_ahead=True) for variant in si] if ahead else []
    drafting = (*si, *ahead_of_si, *dsi)
    trees = [replace(variant, shape=shape) for variant in drafting] if shape.width > 1 else []
    beyond_drafts = [replace(variant, is_extended=True) for variant in dsi] if extended else []
    return [PLAIN, *si, PLANNED, *dsi, *ahead_of_si, *trees, *beyond_drafts]


def sleeps_ns(servers: SimulatedServers) -> set[int]:
    """Return the sleeps for which a bare call must be measured: those of the servers' forwards."""
    return {
        int(it) for model in (servers.target, servers.drafter) for it in (model.first, model.step)
    }


async def measure_row(
    system: OnlineSystem,
    variants: Sequence[Variant],
    *,
    repeats: int,
    on_repeat: Callable[[str], None],
) -> RowRuns:
    """Time every variant once for each prompt, in turn, so that a disturbance hits all alike."""
    runs = RowRuns(await system.alternate(variants, repeats=repeats, on_repeat=on_repeat))
    for variant in (PLAIN, runs.best(_SI), PLANNED):
        runs.traces[variant] = []
        for index in range(min(repeats, _TRACED_PROMPTS)):
            runs.traces[variant].append(
                await system.trace(variant, system.prompt(f"repeat {index}"))
            )
    return runs


def evaluate(row: Table2Row, runs: RowRuns, *, echoes: Mapping[int, Echo]) -> RowResult:
    """Compare a row's runs with their ideals and floors.

    Cost: some 20 ms of simulation for each plan and prompt.
    """
    measured = _Evaluation(row.servers, runs, echoes).measured
    by_variant = {variant: measured(variant) for variant in runs.by_variant}
    kinds = {variant.kind: variant for variant in by_variant if variant.is_beyond_the_paper}
    return RowResult(
        row=row,
        echoes=echoes,
        plain=by_variant[PLAIN],
        speculative=by_variant[runs.best(_SI)],
        planned=by_variant[PLANNED],
        distributed=by_variant[runs.best(PLANNED)],
        swept=tuple(each for variant, each in by_variant.items() if variant.lookahead is not None),
        beyond=tuple(by_variant[runs.best(variant)] for variant in kinds.values()),
    )


def floor_ns(schedule: Schedule, echoes: Mapping[int, Echo]) -> int:
    """Charge each call on the critical path the overhead of a bare one that sleeps as long.

    Args:
        schedule: The ideal one.
        echoes: The bare calls, by sleep in ns.
    """
    overheads = (echoes[call.first_ns].overhead_ns for call in schedule.critical_path)
    return schedule.total_ns + sum(overheads)


class _Evaluation:
    """Compares the runs of one row."""

    def __init__(
        self, servers: SimulatedServers, runs: RowRuns, echoes: Mapping[int, Echo]
    ) -> None:
        self._servers = servers
        self._runs = runs
        self._echoes = echoes
        self._delayed_servers = replace(
            servers,
            target=self._with_calls(servers.target),
            drafter=self._with_calls(servers.drafter),
        )
        self._schedule = cache(self._simulated)

    def measured(self, variant: Variant) -> Measured:
        runs = self._runs.by_variant[variant]
        schedules = [self._ideal(run) for run in runs]
        tokens = sum(len(run.token_ids) for run in runs)
        return Measured(
            variant=variant,
            lookaheads=tuple(sorted({run.plan.lookahead for run in runs})),
            target_counts=tuple(sorted({run.plan.target_count for run in runs})),
            times=tuple(run.elapsed_ns / 1e6 for run in runs),
            ideals=tuple(ideal.total_ns / 1e6 for ideal in schedules),
            floors=tuple(floor_ns(ideal, self._echoes) / 1e6 for ideal in schedules),
            delayed=tuple(self._delayed(run).total_ns / 1e6 for run in runs),
            tokens_per_run=len(runs[0].token_ids),
            identical=self._runs.is_identical(variant) and self._is_as_simulated(variant),
            drafted=sum(run.drafted_count for run in runs),
            accepted=sum(run.accepted_count for run in runs),
            ideal_accepted=sum(sum(ideal.result.accepted) for ideal in schedules),
            cpu_ms_per_token=1e3 * sum(run.cpu_seconds for run in runs) / tokens,
            restless_runs=sum(not run.began_quietly for run in runs),
            calls_on_path=statistics.mean(len(ideal.critical_path) for ideal in schedules),
            breakdown=self._breakdown(variant),
            restarts=self._restarts(variant),
        )

    def _is_as_simulated(self, variant: Variant) -> bool:
        return all(
            list(run.token_ids) == self._ideal(run).result.token_ids
            for run in self._runs.by_variant[variant]
        )

    def _ideal(self, run: Run) -> Schedule:
        length = len(run.token_ids)
        return self._schedule(self._servers, run.plan, prompt=run.prompt, max_tokens=length)

    def _delayed(self, run: Run) -> Schedule:
        length = len(run.token_ids)
        return self._schedule(self._delayed_servers, run.plan, prompt=run.prompt, max_tokens=length)

    def _simulated(
        self, servers: SimulatedServers, plan: Plan, *, prompt: tuple[int, ...], max_tokens: int
    ) -> Schedule:
        return ideal_schedule(servers, plan, prompt=prompt, max_tokens=max_tokens)

    def _with_calls(self, latency: ServerLatency) -> ServerLatency:
        return replace(latency, call=self._echoes[int(latency.step)].overhead_ns)

    def _breakdown(self, variant: Variant) -> Breakdown | None:
        traces = self._runs.traces.get(variant)
        if not traces:
            return None
        return mean_breakdown(
            [
                trace.breakdown(
                    self._servers, ideal_ns=ideal.total_ns, floor_ns=floor_ns(ideal, self._echoes)
                )
                for ideal, trace in ((self._ideal(run), trace) for run, trace in traces)
            ]
        )

    def _restarts(self, variant: Variant) -> tuple[Restart, ...]:
        if variant.strategy is not Strategy.DISTRIBUTED:
            return ()
        back_ns = self._echoes[int(self._servers.target.step)].back_ns
        return tuple(
            restart
            for _, trace in self._runs.traces.get(variant, ())
            for restart in trace.restarts(back_ns=back_ns)
        )


def _ratios(times: Iterable[float], references: Iterable[float]) -> tuple[float, ...]:
    return tuple(time / reference for time, reference in zip(times, references, strict=True))
