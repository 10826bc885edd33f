"""`paceline plan`: what every strategy would do for somebody's own latencies and GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from paceline_bench.options import check_rank_decay, shares_of
from paceline_bench.parallel import compute_all
from paceline_bench.plan.forecast import forecast
from paceline_bench.plan.jobs import forecast_jobs
from paceline_bench.plan.tables import columns, conclusions, json_rows
from paceline_bench.protocol_runs import own_guesses
from paceline_bench.report import write_json
from paceline_bench.simulated_servers import SimulatedServers
from paceline_bench.table import print_table
from paceline_contract.limits import MOST_BRANCHES, MOST_WIDTH
from paceline_contract.words import counted
from paceline_local.options import PictureFile, ResultFile, read_options
from paceline_local.screen import progress
from paceline_protocol.draft_shape import Shape
from paceline_protocol.laboratory.simulation import ServerLatency
from paceline_serving.settings import RateList, Settings, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_bench.plan.forecast import Forecast
    from paceline_bench.plan.jobs import ForecastJob

_EXAMPLES = """
paceline plan --target-ms 37.7 --drafter-ms 2.5 --acceptance 0.63 --gpus 8
paceline plan --target-ms 30 --drafter-ms 12 --acceptance 0.9 --gpus 4 --target-first-ms 400
paceline plan --target-ms 25 --drafter-ms 5 --acceptance 0.7 --gpus 4 --call-ms 1
paceline plan --target-ms 9 --target-row-ms 0.5 --drafter-ms 2 --acceptance 0.7 --gpus 3
paceline plan --target-ms 25 --drafter-ms 5 --acceptance 0.7 --gpus 8 --chart plan.svg
paceline plan --target-ms 37.7 --drafter-ms 2.5 --acceptance 0.63 --gpus 3 --width 4 --branches 3
paceline plan --target-ms 9 --drafter-ms 2 --acceptance 0.7 --gpus 3 --self-rates 0.6,0.4,0.3
"""
_NS_PER_MS = 1_000_000


class PlanSettings(Settings):
    """Say what each strategy would take with your own models, and how many targets are worth it.

    The decoding methods that serve users run on a virtual clock with your latencies. `paceline
    check-pair` measures latencies and acceptance rate. One GPU is the drafter's, the others have a
    target each. With a width SI and DSI come once more, with token trees; with hit rates there is
    a target that drafts for itself (self-SI), too. What is not there: the orchestrator's own time,
    other requests, and batching.
    """

    target_ms: float = Field(gt=0, le=1e6, description="ms of a decoding step of the target")
    drafter_ms: float = Field(gt=0, le=1e6, description="ms of a decoding step of the drafter")
    acceptance: float = Field(
        ge=0, le=1, description="fraction of draft tokens that the target accepts, 0 to 1"
    )
    gpus: int = Field(ge=1, le=65, description="number of available GPUs, or other devices")
    tokens: int = Field(100, ge=2, le=2000, description="tokens of a generation")
    target_first_ms: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="ms of the target's first forward, the prompt's; without it a step",
    )
    drafter_first_ms: float | None = Field(
        None, gt=0, le=1e6, description="ms of the drafter's first forward; without it a step"
    )
    target_row_ms: float = Field(
        0,
        ge=0,
        le=1e6,
        description="further ms for each row of a target's forward beyond its first",
    )
    drafter_row_ms: float = Field(
        0,
        ge=0,
        le=1e6,
        description="further ms for each row of a drafter's forward beyond its first",
    )
    call_ms: float = Field(
        0, ge=0, le=1e6, description="ms of a call to a server beside its forward"
    )
    width: int = Field(
        1,
        ge=1,
        le=MOST_WIDTH,
        description="also with trees of this many draft tokens at a position",
    )
    branches: int = Field(
        0,
        ge=0,
        le=MOST_BRANCHES,
        description="tokens beside the chain's that a draft forward extends",
    )
    rank_decay: Annotated[str, BeforeValidator(check_rank_decay)] = Field(
        "0.4",
        description="probability that the next runner-up is right where the drafter is wrong, or"
        " 'llama' for a published vector",
    )
    self_rates: RateList = Field(
        (),
        max_length=16,
        description="also a target that drafts for itself: how often its guess for the token"
        " after its own next token is right, then for the token after that, and so on:"
        ' "0.6,0.4,0.3"',
    )
    self_nodes: int = Field(
        16, ge=1, le=256, description="guesses that such a target proposes: the likeliest tree"
    )
    self_guess_ms: float = Field(
        0, ge=0, le=1e6, description="further ms for each forward in which such a target guesses"
    )
    per_gpu: bool = Field(False, description="tokens/s over the GPUs in use, instead of gains")
    repeats: int = Field(20, ge=2, le=10_000, description="simulated generations for each row")
    chart: PictureFile | None = Field(None, description="file for the picture, .svg or .png")
    json_file: ResultFile | None = option(None, description="file for the rows", flag="json")

    @model_validator(mode="after")
    def _has_what_goes_together(self) -> Self:
        given = self.model_fields_set
        if self.width == 1 and "branches" in given:
            raise ValueError("--branches goes with a --width of 2 or more")
        if self.width == 1 and not self.self_rates and "rank_decay" in given:
            raise ValueError("--rank-decay goes with a --width of 2 or more, or --self-rates")
        for name in ("self_nodes", "self_guess_ms"):
            if not self.self_rates and name in given:
                raise ValueError(f"--{name.replace('_', '-')} goes with --self-rates")
        return self

    @property
    def servers(self) -> SimulatedServers:
        """The user's servers."""
        return SimulatedServers(
            target=replace(
                self._latency(self.target_first_ms, self.target_ms, self.target_row_ms),
                guess=round(self.self_guess_ms * _NS_PER_MS),
            ),
            drafter=self._latency(self.drafter_first_ms, self.drafter_ms, self.drafter_row_ms),
            acceptance_rate=self.acceptance,
            target_count=self.gpus - 1,
        )

    def _latency(self, first_ms: float | None, step_ms: float, row_ms: float) -> ServerLatency:
        first_ns, step_ns, row_ns, call_ns = (
            round(each * _NS_PER_MS)
            for each in (first_ms or step_ms, step_ms, row_ms, self.call_ms)
        )
        return ServerLatency(first_ns, max(1, step_ns), call=call_ns, row=row_ns)


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(PlanSettings, arguments, program="paceline plan", examples=_EXAMPLES)
    servers, shares = settings.servers, shares_of(settings.rank_decay)
    jobs = forecast_jobs(
        servers,
        token_count=settings.tokens,
        repeats=settings.repeats,
        shape=Shape(settings.width, settings.branches),
        shares=shares,
        guesses=own_guesses(settings.self_rates, node_count=settings.self_nodes, shares=shares),
    )
    with progress("simulating", total=len(jobs)) as step:
        rows = compute_all(forecast, jobs, on_done=lambda job: step(_label(job)))
    print(_conditions(settings))
    token_count = settings.tokens if settings.per_gpu else None
    print_table(json_rows(rows), columns(token_count=token_count))
    print()
    print("\n".join(conclusions(rows, servers)))
    _keep(settings, rows)
    return 0


def _keep(settings: PlanSettings, rows: Sequence[Forecast]) -> None:
    if settings.chart is not None:
        # Here, because loading it takes most of a second.
        from paceline_bench.charts import save_figure
        from paceline_bench.plan.picture import draw_forecast

        title = _conditions(settings).replace("; ", "\n")
        save_figure(draw_forecast(json_rows(rows), title=title), settings.chart)
        print(f"{settings.chart} has the picture.")
    if settings.json_file is not None:
        write_json(settings.json_file, json_rows(rows))
        print(f"{settings.json_file} has the rows.")


def _conditions(settings: PlanSettings) -> str:
    trees = ""
    if settings.width > 1:
        trees = (
            f"; trees of width {settings.width}, {settings.branches} branches, rank decay"
            f" {settings.rank_decay}"
        )
    if settings.self_rates:
        rates = ", ".join(f"{rate:g}" for rate in settings.self_rates)
        trees += f"; {settings.self_nodes} own guesses, right by {rates}"
    return (
        f"target {settings.target_ms:g} ms, drafter {settings.drafter_ms:g} ms,"
        f" acceptance {settings.acceptance:.0%}; {settings.tokens} tokens,"
        f" mean of {settings.repeats} simulated generations{trees}"
    )


def _label(job: ForecastJob) -> str:
    ahead = ", drafting ahead" if job.drafts_ahead else ""
    trees = f", width {job.shape.width}" if job.shape.width > 1 else ""
    return f"{job.strategy.value}, {counted(job.target_count, 'target')}{ahead}{trees}"
