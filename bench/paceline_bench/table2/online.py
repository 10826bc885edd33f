"""Requests to a running system, timed or taken apart."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil

from paceline import Strategy
from paceline.request import GenerateOptions
from paceline_bench.processes import quiet
from paceline_bench.simulated_servers import DEFAULT_VOCABULARY_SIZE
from paceline_bench.table2.ideal import Plan
from paceline_bench.table2.trace import Trace
from paceline_protocol import methods as protocol
from paceline_protocol.draft_shape import CHAIN, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paceline import AsyncClient, Started, TimelineEvent

PROMPT_TOKENS = 128
EXTENDED = " + Max-Gram"
"""Ends the name of a strategy where the text itself drafts beyond its drafter."""
# The planner learns the acceptance rate from each request, and thinks it over behind the last one.
_WARM_UPS = 4
_FIRST_FILL_TOKEN = 256  # of the simulated backend, where it has words
_PAGE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Variant:
    """How to ask for a generation.

    Attributes:
        lookahead: None if the planner chooses.
        shape: How wide drafts are.
        drafts_ahead: Whether SI's drafter goes on while the target verifies. The paper's SI rests.
        is_extended: Whether the text itself drafts beyond the drafter.
    """

    strategy: Strategy
    lookahead: int | None = None
    shape: Shape = CHAIN
    drafts_ahead: bool = False
    is_extended: bool = False

    @property
    def strategy_name(self) -> str:
        """What the paper calls it; "SI ahead" and "DSI + Max-Gram" are not in it."""
        ahead = " ahead" if self.drafts_ahead else ""
        return self.strategy.abbreviation + ahead + (EXTENDED if self.is_extended else "")

    @property
    def is_beyond_the_paper(self) -> bool:
        """Whether the paper has no such variant."""
        return self.drafts_ahead or self.is_extended or self.shape != CHAIN

    @property
    def kind(self) -> tuple[object, ...]:
        """What variants have in common that differ in their lookahead alone."""
        return self.strategy, self.shape, self.drafts_ahead, self.is_extended

    def __str__(self) -> str:
        trees = f", width {self.shape.width}" if self.shape.width > 1 else ""
        if self.lookahead is None:
            return self.strategy_name + trees
        return f"{self.strategy_name}, lookahead {self.lookahead}{trees}"


PLAIN = Variant(Strategy.AUTOREGRESSIVE)
PLANNED = Variant(Strategy.DISTRIBUTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One request.

    Attributes:
        prompt: What it continued.
        plan: How it was decoded.
        elapsed_ns: On the client's clock, from sending the request to its last message. There is
            no tokenising in it: the prompt is token ids.
        cpu_seconds: What the orchestrator's process computed meanwhile.
        drafted_count: Draft tokens received.
        accepted_count: Draft tokens that became output.
        began_quietly: False if the orchestrator still computed behind an earlier request, however
            long it was waited for.
    """

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    plan: Plan
    elapsed_ns: int
    cpu_seconds: float
    drafted_count: int
    accepted_count: int
    began_quietly: bool


class OnlineSystem:
    """A system of simulated servers, asked one request at a time.

    Args:
        client: Connected to its orchestrator.
        orchestrator_pid: The orchestrator's process.
        metrics_addresses: Where the model servers show their last calls, by name.
        max_tokens: Tokens of each request.
        vocabulary_size: Of the models.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        orchestrator_pid: int,
        metrics_addresses: Mapping[str, str],
        max_tokens: int,
        vocabulary_size: int = DEFAULT_VOCABULARY_SIZE,
    ) -> None:
        self._client = client
        self._orchestrator = psutil.Process(orchestrator_pid)
        self._metrics_addresses = metrics_addresses
        self._max_tokens = max_tokens
        self._vocabulary_size = vocabulary_size
        self._broadcasts: dict[Variant, bool] = {}

    async def alternate(
        self, variants: Sequence[Variant], *, repeats: int, on_repeat: Callable[[str], None]
    ) -> dict[Variant, list[Run]]:
        """Time every variant once for each prompt, in turn, so that a disturbance hits all alike.

        Before that, a trace of each variant shows whether its prompts go to all targets, which an
        answer does not tell and the ideal depends on.
        """
        for index in range(_WARM_UPS):
            await self._run(PLANNED, self.prompt(f"warm-up {index}"))
        for variant in variants:
            traced, _ = await self.trace(variant, self.prompt("broadcast"))
            self._broadcasts[variant] = traced.plan.broadcast_prefill
        runs: dict[Variant, list[Run]] = {variant: [] for variant in variants}
        for index in range(repeats):
            for variant in variants:
                run, _ = await self._run(variant, self.prompt(f"repeat {index}"))
                runs[variant].append(run)
            on_repeat(f"repeat {index + 1} of {repeats}")
        return runs

    def prompt(self, name: str) -> tuple[int, ...]:
        """Make a prompt of the models' tokens that depends on its name alone."""
        return make_prompt(name, vocabulary_size=self._vocabulary_size)

    async def trace(self, variant: Variant, prompt: Sequence[int]) -> tuple[Run, Trace]:
        """Take a request apart. Noting everything makes it a little slower than others."""
        began_ns = time.monotonic_ns()
        run, timeline = await self._run(variant, prompt, include_timeline=True)
        records = await asyncio.to_thread(self._records, began_ns)
        trace = Trace(timeline, records, elapsed_ns=run.elapsed_ns)
        plan = replace(run.plan, broadcast_prefill=trace.prefill_count > 1)
        return replace(run, plan=plan), trace

    async def _run(
        self, variant: Variant, prompt: Sequence[int], *, include_timeline: bool = False
    ) -> tuple[Run, Sequence[TimelineEvent]]:
        # Behind an answer sessions are closed, and the planner thinks it over.
        began_quietly = await quiet([self._orchestrator.pid])
        options = GenerateOptions(
            strategy=variant.strategy,
            max_tokens=self._max_tokens,
            ignore_eos=True,
            include_timeline=include_timeline,
        )
        if variant.lookahead is not None:
            options["lookahead"] = variant.lookahead
        if variant.strategy is Strategy.SPECULATIVE and not variant.drafts_ahead:
            options["dispatch"] = "blocks"
        if variant.shape.width > 1:
            options["width"], options["branches"] = variant.shape.width, variant.shape.branches
        if variant.is_extended:
            options["drafter"] = "server_and_max_gram"
        generation = self._client.generate(prompt, **options)
        cpu_seconds = self._cpu_seconds()
        started_ns = time.perf_counter_ns()
        completion = await generation.collect()
        elapsed_ns = time.perf_counter_ns() - started_ns
        cpu_seconds = self._cpu_seconds() - cpu_seconds
        statistics = completion.finished.statistics
        run = Run(
            prompt=tuple(prompt),
            token_ids=completion.token_ids,
            plan=self._plan(variant, completion.started),
            elapsed_ns=elapsed_ns,
            cpu_seconds=cpu_seconds,
            drafted_count=statistics.drafted_token_count,
            accepted_count=statistics.accepted_token_count,
            began_quietly=began_quietly,
        )
        return run, completion.finished.timeline

    def _plan(self, variant: Variant, started: Started) -> Plan:
        return Plan(
            strategy=protocol.Strategy(started.strategy.value),
            lookahead=started.lookahead,
            target_count=started.target_count,
            broadcast_prefill=self._broadcasts.get(variant, False),
            width=started.width,
            branches=started.branches,
            drafts_ahead=variant.drafts_ahead,
            is_extended=variant.is_extended,
        )

    def _records(self, since_ns: int) -> dict[str, list[dict[str, Any]]]:
        """Fetch what the model servers noted of the calls that began since then."""
        return {
            name: fetch_call_records(address, since_ns=since_ns)
            for name, address in self._metrics_addresses.items()
        }

    def _cpu_seconds(self) -> float:
        times = self._orchestrator.cpu_times()
        return times.user + times.system


def is_identical(runs: Iterable[Run], plain: Iterable[Run]) -> bool:
    """Whether every output is plain decoding's for the same prompt."""
    expected = {run.prompt: run.token_ids for run in plain}
    return all(run.token_ids == expected[run.prompt] for run in runs)


def make_prompt(name: str, *, vocabulary_size: int = DEFAULT_VOCABULARY_SIZE) -> tuple[int, ...]:
    """Make a prompt that depends on its name and the vocabulary alone."""
    source = random.Random(name)  # noqa: S311  no secret
    first = _FIRST_FILL_TOKEN if vocabulary_size > _FIRST_FILL_TOKEN else 0
    return tuple(source.choices(range(first, vocabulary_size), k=PROMPT_TOKENS))


def fetch_call_records(address: str, *, since_ns: int) -> list[dict[str, Any]]:
    """Fetch what a model server noted of the calls that began since then.

    Args:
        address: Where its metrics are.
        since_ns: On the machine's monotonic clock.
    """
    url = f"http://{address}/debug/calls"
    with urllib.request.urlopen(url, timeout=_PAGE_SECONDS) as page:
        calls: list[dict[str, Any]] = json.load(page)
    return [call for call in calls if call["start_ns"] >= since_ns]
