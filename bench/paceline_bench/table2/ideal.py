"""What simulated servers would take if nothing but forwards cost time: the ideal schedule.

The schedule is that of the same protocol, for the same prompt, on the virtual clock. Which draft
tokens agree is decided by the simulated backend itself, so the run to compare with drafts, accepts
and rejects the same tokens. A session's first forward takes TTFT and every other one TPOT, in both.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline_contract.max_gram import MaxGram
from paceline_contract.proposal import NOTHING
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from paceline_engine.terms.calls import SessionSpec
from paceline_protocol.laboratory.simulation import ServerLatency, simulate
from paceline_protocol.laboratory.spans import Span, SpanKind
from paceline_protocol.messages import (
    BlockVerified,
    CapacityChanged,
    DraftEnded,
    Finish,
    StartDecode,
    StartDraft,
    StartVerify,
    TokensDecoded,
    TokensDrafted,
)
from paceline_protocol.methods import METHODS, Strategy, create_method
from paceline_protocol.task import DecodingTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_bench.simulated_servers import SimulatedServers
    from paceline_contract.proposal import Proposal
    from paceline_engine.terms.draft_tree import Ranked
    from paceline_protocol.draft_statistics import DraftStatistics
    from paceline_protocol.laboratory.simulation import SimulationResult
    from paceline_protocol.messages import Command, Event
    from paceline_protocol.methods import DecodingMethod

_DRAFTER, _TEXT = 0, 1  # slots of drafters


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a request was decoded.

    Attributes:
        lookahead: Draft tokens in a verification; 0 for plain decoding.
        target_count: Targets in use.
        broadcast_prefill: Whether all of them got the prompt at the start.
        width: How many tokens were drafted at a place.
        branches: How many tokens beside the chain's a drafter's forward followed.
        drafts_ahead: Whether SI's drafter went on while the target verified.
        is_extended: Whether the text itself drafted beyond the drafter.
    """

    strategy: Strategy
    lookahead: int
    target_count: int
    broadcast_prefill: bool = False
    width: int = 1
    branches: int = 0
    drafts_ahead: bool = False
    is_extended: bool = False


@dataclass(frozen=True, slots=True)
class ServedCall:
    """A call on a schedule's critical path.

    Attributes:
        kind: Draft, verification or decode.
        is_first: Whether it begins with its server's first forward, the prompt's prefill.
        forward_count: Forwards until what was waited for; 1 of a verification.
        first_ns: What the first of them takes.
        duration_ns: What all of them take, and the call itself.
    """

    kind: SpanKind
    is_first: bool
    forward_count: int
    first_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A simulated run.

    Attributes:
        result: What happened when.
        critical_path: The calls whose times add up to the total, first to last: each was started by
            the answer, or the draft token, of the one before.
    """

    result: SimulationResult
    critical_path: tuple[ServedCall, ...]

    @property
    def total_ns(self) -> int:
        """When the last token was final."""
        return int(self.result.total_time)


class BackendOracle:
    """What simulated models say; see TokenOracle. They are asked, and do not wait.

    Args:
        servers: The models.
        length: Tokens of the longest text, the prompt counted.
    """

    def __init__(self, servers: SimulatedServers, *, length: int) -> None:
        spec = SessionSpec(reserve_length=length)
        target = SimulatedModel(
            ttft_seconds=0, tpot_seconds=0, vocabulary_size=servers.vocabulary_size
        )
        drafter = replace(
            target, acceptance_rate=servers.acceptance_rate, rank_decay=servers.rank_decay
        )
        self._target = ModelText(SimulatedBackend(target), spec)
        self._drafter = ModelText(SimulatedBackend(drafter), spec)
        self._max_gram = MaxGram()

    def draft(self, drafter: int, text: Sequence[int]) -> int:
        """Ask the drafter, or the text."""
        if drafter == _TEXT:
            return self._by_text(text)
        return self._drafter.draft(text).token_ids[0]

    def rank(self, drafter: int, text: Sequence[int], *, width: int) -> Ranked:
        """Ask the drafter; the text has no runners-up."""
        assert drafter != _TEXT
        return self._drafter.rank(text, width=width)

    def _by_text(self, text: Sequence[int]) -> int:
        self._max_gram.follow(text)
        found = self._max_gram.propose(1)
        assert found, "the text has something to say where there are few tokens"
        return found[0]

    def judge(self, prefix: Sequence[int], block: Sequence[int]) -> tuple[int, int]:
        """Ask the target."""
        judgement = self._target.judge(prefix, block)
        return len(judgement.accepted_path), judgement.next_token

    def guess(self, text: Sequence[int]) -> Proposal:
        """Return nothing: no target here drafts for itself."""
        del text
        return NOTHING


def ideal_schedule(
    servers: SimulatedServers, plan: Plan, *, prompt: Sequence[int], max_tokens: int
) -> Schedule:
    """Simulate a request on servers of its own."""
    task = DecodingTask(
        tuple(prompt),
        max_tokens,
        lookahead=max(1, plan.lookahead),
        broadcast_prefill=plan.broadcast_prefill,
        keep_prefill=servers.target.first > servers.target.step,
        width=plan.width,
        branches=plan.branches,
        drafts_ahead=plan.drafts_ahead,
    )
    capacity = CapacityChanged(
        targets=tuple(range(plan.target_count)),
        drafters=(_DRAFTER, _TEXT)[: METHODS[plan.strategy].drafts + plan.is_extended],
        text=_TEXT if plan.is_extended else None,
    )
    method = _CauseKeeper(create_method(plan.strategy, task, capacity=capacity))
    result = simulate(
        method,
        BackendOracle(servers, length=len(prompt) + max_tokens),
        targets=[servers.target] * plan.target_count,
        drafters=[servers.drafter, ServerLatency(0, 0)],
    )
    path = _critical_path(method, result, servers)
    assert sum(call.duration_ns for call in path) == result.total_time, "each starts at its cause"
    return Schedule(result, path)


@dataclass(frozen=True, slots=True)
class _Moment:
    """Something became known: a stream's n-th token, or a verdict (then n is 1)."""

    kind: SpanKind
    call_id: int
    forward_count: int


class _CauseKeeper:
    """A decoding method that remembers which event made it start each call, and which finish."""

    def __init__(self, method: DecodingMethod) -> None:
        self._method = method
        self._answered: Counter[tuple[SpanKind, int]] = Counter()
        self.cause: dict[tuple[SpanKind, int], _Moment | None] = {}  # by call; None: the start
        self.last: _Moment | None = None

    @property
    def statistics(self) -> DraftStatistics:
        return self._method.statistics

    def start(self) -> list[Command]:
        return self._note(self._method.start(), cause=None)

    def handle(self, event: Event) -> list[Command]:
        return self._note(self._method.handle(event), cause=self._moment(event))

    def stop(self) -> list[Command]:
        return self._method.stop()

    def _moment(self, event: Event) -> _Moment:
        match event:
            case TokensDrafted(draft_id=draft_id):
                # What one forward found: a token, or of a tree several.
                return self._stream_moment(SpanKind.DRAFT, draft_id, forward_count=1)
            case DraftEnded(draft_id=draft_id):
                return self._stream_moment(SpanKind.DRAFT, draft_id)
            case TokensDecoded(decode_id=decode_id):
                return self._stream_moment(SpanKind.DECODE, decode_id, forward_count=1)
            case BlockVerified(verify_id=verify_id):
                return _Moment(SpanKind.VERIFY, verify_id, 1)
        raise AssertionError(f"a simulation has no {event}")

    def _stream_moment(self, kind: SpanKind, call_id: int, *, forward_count: int = 0) -> _Moment:
        self._answered[kind, call_id] += forward_count
        return _Moment(kind, call_id, self._answered[kind, call_id])

    def _note(self, commands: list[Command], *, cause: _Moment | None) -> list[Command]:
        for command in commands:
            match command:
                case StartDraft(draft_id=draft_id):
                    self.cause[SpanKind.DRAFT, draft_id] = cause
                case StartVerify(verify_id=verify_id):
                    self.cause[SpanKind.VERIFY, verify_id] = cause
                case StartDecode(decode_id=decode_id):
                    self.cause[SpanKind.DECODE, decode_id] = cause
                case Finish():
                    self.last = cause
        return commands


def _critical_path(
    causes: _CauseKeeper, result: SimulationResult, servers: SimulatedServers
) -> tuple[ServedCall, ...]:
    """Go back from what finished the request, through what caused it, to the start."""
    spans = {(span.kind, span.call_id): span for span in result.spans}
    prefills: dict[tuple[bool, int], Span] = {}  # by server: its first answered call
    for span in result.spans:
        is_stream = span.kind is not SpanKind.VERIFY
        if span.accepted_count is not None or (is_stream and span.token_ids):
            prefills.setdefault(span.machine, span)
    path: list[ServedCall] = []
    moment = causes.last
    while moment is not None:
        key = moment.kind, moment.call_id
        span = spans[key]
        if moment.kind is SpanKind.DRAFT and span.server == _TEXT:
            moment = causes.cause[key]  # which took no time
            continue
        latency = servers.drafter if moment.kind is SpanKind.DRAFT else servers.target
        is_first = prefills[span.machine] is span
        first_ns = int(latency.first if is_first else latency.step)
        duration_ns = int(latency.call) + first_ns + (moment.forward_count - 1) * int(latency.step)
        path.append(
            ServedCall(
                moment.kind,
                is_first,
                forward_count=moment.forward_count,
                first_ns=first_ns,
                duration_ns=duration_ns,
            )
        )
        moment = causes.cause[key]
    return tuple(reversed(path))
