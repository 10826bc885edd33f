"""Runs a decoding method on a virtual clock, where a forward costs a latency and nothing else does.

The method is the very object that serves users, so simulated time is what the protocol allows, and
online time divided by it is the system's overhead. Times have the unit of the latencies; with
integers or fractions they are exact.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from paceline_contract.proposal import NOTHING, Proposal
from paceline_protocol.laboratory.drafted_tree import DraftedTree
from paceline_protocol.laboratory.oracles import judge_tree
from paceline_protocol.laboratory.spans import Span, SpanKind, Time
from paceline_protocol.messages import (
    AbandonVerify,
    BlockVerified,
    Command,
    DraftEnded,
    EmitTokens,
    Event,
    Finish,
    StartDecode,
    StartDraft,
    StartVerify,
    StopDecode,
    StopDraft,
    TokensDecoded,
    TokensDrafted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_protocol.laboratory.oracles import TokenOracle
    from paceline_protocol.methods import DecodingMethod

_Start: TypeAlias = StartDraft | StartVerify | StartDecode


@dataclass(frozen=True, slots=True)
class ServerLatency:
    """What forwards take at one server.

    Attributes:
        first: Until its first one is finished (TTFT: the prompt's prefill).
        step: Each later one (TPOT), of one row.
        call: What a call takes besides: its first answer comes so much later.
        row: More for each further row of a later one: a token that the server has not computed yet
            in the text that it is asked for.
        guess: More for a later one beside which a target guesses.
        price: Instead of that, how many times as long as one of one row a later one takes, by its
            rows; None: see `row`.
        runs_on: Whether a forward that was withdrawn runs to its end, and keeps its server till
            then. Otherwise it frees its server at once.
    """

    first: Time
    step: Time
    call: Time = 0
    row: Time = 0
    guess: Time = 0
    price: Callable[[int], float] | None = None
    runs_on: bool = False


@dataclass(slots=True)
class SimulationResult:
    """What happened.

    Attributes:
        token_times: When each of them became final.
        accepted: For each whether it was an accepted draft token.
        total_time: When the method finished.
        spans: All that servers did, by start.
        target_forwards: Answered forwards of targets.
        drafter_forwards: Answered forwards of drafters, without those that take no time.
        drafted_count: Tokens that drafters found, those of trees included.
        judged_count: Tokens that answered verifications were about.
    """

    token_ids: list[int] = field(default_factory=list)
    token_times: list[Time] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    total_time: Time = 0
    spans: list[Span] = field(default_factory=list)
    target_forwards: int = 0
    drafter_forwards: int = 0
    drafted_count: int = 0
    judged_count: int = 0


def simulate(
    method: DecodingMethod,
    oracle: TokenOracle,
    *,
    targets: Sequence[ServerLatency],
    drafters: Sequence[ServerLatency] = (),
    after_event: Callable[[], None] = lambda: None,
) -> SimulationResult:
    """Run a method to its end, with every server to itself.

    A draft of width 2 or more is answered with its tree, what a forward finds together; a tree is
    judged along its right path, and what follows is guessed if that was asked for. A drafter whose
    forwards take no time, as the text itself, gives a chain at once. Withdrawn work frees its
    server at once, unless a server `runs_on`. Drafted tokens come before verdicts of the same
    moment, and both in the order of their start.

    Args:
        method: Not yet started, and told of as many servers as there are latencies.
        oracle: What the models say.
        targets: Latencies of the targets.
        drafters: Latencies of the drafters.
        after_event: Called between events, for a caller that has to let others run.

    Raises:
        RuntimeError: the method waits for something that will never come.
    """
    return _Run(method, oracle, targets=targets, drafters=drafters).to_end(after_event)


class _Run:
    """One simulation under way."""

    def __init__(
        self,
        method: DecodingMethod,
        oracle: TokenOracle,
        *,
        targets: Sequence[ServerLatency],
        drafters: Sequence[ServerLatency],
    ) -> None:
        self._method = method
        self._oracle = oracle
        self._latencies = {
            SpanKind.VERIFY: targets,
            SpanKind.DECODE: targets,
            SpanKind.DRAFT: drafters,
        }
        self._held: dict[tuple[bool, int], _Held] = {}  # by server, once it is warm
        self._working: dict[tuple[SpanKind, int], _Work] = {}  # by call
        self._free_at: dict[tuple[bool, int], Time] = {}  # by server that runs on
        self._due: list[tuple[Time, bool, int, _Work]] = []
        self._scheduled_count = 0
        self._now: Time = 0
        self._finished = False
        self._result = SimulationResult()

    def to_end(self, after_event: Callable[[], None]) -> SimulationResult:
        self._obey(self._method.start())
        while not self._finished:
            after_event()
            if not self._due:
                raise RuntimeError("the method waits for something that will never come")
            self._now, _, _, work = heapq.heappop(self._due)
            if not work.span.withdrawn:
                self._answer(work)
        self._result.total_time = self._now
        return self._result

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case StartDraft(draft_id=call_id, drafter=server):
                    self._begin(command, kind=SpanKind.DRAFT, server=server, call_id=call_id)
                case StartVerify(verify_id=call_id, target=server):
                    self._begin(command, kind=SpanKind.VERIFY, server=server, call_id=call_id)
                case StartDecode(decode_id=call_id, target=server):
                    self._begin(command, kind=SpanKind.DECODE, server=server, call_id=call_id)
                case StopDecode(decode_id=call_id):
                    self._withdraw(SpanKind.DECODE, call_id)
                case StopDraft(draft_id=call_id):
                    self._withdraw(SpanKind.DRAFT, call_id)
                case AbandonVerify(verify_id=call_id):
                    self._withdraw(SpanKind.VERIFY, call_id)
                case EmitTokens(token_ids=token_ids, accepted=accepted):
                    self._result.token_ids += token_ids
                    self._result.token_times += [self._now] * len(token_ids)
                    self._result.accepted += accepted
                case Finish():
                    self._finished = True

    def _begin(self, command: _Start, *, kind: SpanKind, server: int, call_id: int) -> None:
        span = Span(
            kind,
            server,
            call_id=call_id,
            start=self._now,
            end=self._now,
            position=len(command.prefix),
            token_ids=[],
        )
        busy = any(work.span.machine == span.machine for work in self._working.values())
        assert not busy, "a method gives a server one thing to do at a time"
        if isinstance(command, StartVerify):
            span.token_ids += command.proposal.token_ids
            span.parents += command.proposal.parents
            span.depth = command.depth
        self._result.spans.append(span)
        work = _Work(command, span)
        self._working[kind, call_id] = work
        self._schedule(work, delay=self._latencies[kind][server].call)

    def _schedule(self, work: _Work, *, delay: Time = 0) -> None:
        # A call travels while a forward that was withdrawn still runs.
        arrives = self._now + delay
        work.begins = max(arrives, self._free_at.get(work.span.machine, arrives))
        work.ends = end = work.begins + self._forward_time(work)
        self._scheduled_count += 1
        is_target, _ = work.span.machine
        heapq.heappush(self._due, (end, is_target, self._scheduled_count, work))

    def _forward_time(self, work: _Work) -> Time:
        kind = work.span.kind
        latency, held = self._latencies[kind][work.span.server], self._held.get(work.span.machine)
        if held is None:
            return latency.first
        guesses = isinstance(work.command, StartVerify) and work.command.propose
        extra = latency.guess if guesses else 0
        if latency.price is not None:
            return extra + latency.step * latency.price(self._row_count(work, held))
        if not latency.row:
            return extra + latency.step
        return extra + latency.step + (self._row_count(work, held) - 1) * latency.row

    def _row_count(self, work: _Work, held: _Held) -> int:
        """Return what a forward works through: what its server does not hold, and a proposal."""
        if work.tree is not None and work.span.token_ids:
            return len(work.tree.due)
        block_length = len(work.span.token_ids) if work.span.kind is SpanKind.VERIFY else 0
        known_length = min(held.common_length(work.text), len(work.text) - 1)
        return len(work.text) - known_length + block_length

    def _withdraw(self, kind: SpanKind, call_id: int) -> None:
        work = self._working.pop((kind, call_id), None)
        if work is not None:  # else it was just answered
            work.span.withdrawn = True
            work.span.end = self._now
            if self._latencies[kind][work.span.server].runs_on and work.begins <= self._now:
                self._free_at[work.span.machine] = work.ends

    def _answer(self, work: _Work) -> None:
        work.span.end = self._now
        match work.command:
            case StartDraft():
                self._answer_draft(work, work.command)
            case StartDecode():
                self._answer_decode(work, work.command)
            case StartVerify():
                self._answer_verify(work, work.command)

    def _answer_draft(self, work: _Work, command: StartDraft) -> None:
        latency = self._latencies[SpanKind.DRAFT][command.drafter]
        is_free = work.tree is None and not (latency.first or latency.step or latency.call)
        self._result.drafter_forwards += not is_free
        if work.tree is None:
            found = self._find_chain(work, count=command.max_tokens if is_free else 1)
        else:
            found = self._find_tree(work, work.tree)
        self._result.drafted_count += len(found)
        work.span.token_ids += found.token_ids
        work.span.parents += found.parents
        work.forward_count += len(found) if work.tree is None else 1
        ended = work.forward_count == command.max_tokens
        if ended:
            del self._working[SpanKind.DRAFT, command.draft_id]
        self._tell(TokensDrafted(command.draft_id, found))
        if ended:
            self._tell(DraftEnded(command.draft_id))
        elif not work.span.withdrawn:
            self._schedule(work)

    def _find_chain(self, work: _Work, *, count: int) -> Proposal:
        start = len(work.text)
        for _ in range(count):
            self._held[work.span.machine] = _Held([*work.text])
            work.text.append(self._oracle.draft(work.span.server, work.text))
        return Proposal(tuple(work.text[start:]))

    def _find_tree(self, work: _Work, tree: DraftedTree) -> Proposal:
        assert isinstance(work.command, StartDraft)
        self._held[work.span.machine] = _Held(work.text, tree)
        return tree.grow(
            [
                self._oracle.rank(
                    work.span.server,
                    [*work.text, *tree.path_to(parent)],
                    width=work.command.width,
                )
                for parent in tree.due
            ]
        )

    def _answer_decode(self, work: _Work, command: StartDecode) -> None:
        self._result.target_forwards += 1
        self._held[work.span.machine] = _Held([*work.text])
        _, token_id = self._oracle.judge(work.text, ())
        work.span.token_ids.append(token_id)
        work.text.append(token_id)
        ended = len(work.span.token_ids) == command.max_tokens or token_id in command.end_ids
        if ended:
            del self._working[SpanKind.DECODE, command.decode_id]
        self._tell(TokensDecoded(command.decode_id, (token_id,)))
        if not ended and not work.span.withdrawn:
            self._schedule(work)

    def _answer_verify(self, work: _Work, command: StartVerify) -> None:
        self._result.target_forwards += 1
        del self._working[SpanKind.VERIFY, command.verify_id]
        self._result.judged_count += len(command.proposal)
        path, next_token = judge_tree(self._oracle, command.prefix, command.proposal)
        work.span.accepted_count, work.span.next_token = len(path), next_token
        accepted = command.proposal.along(path)
        self._held[work.span.machine] = _Held([*command.prefix, *accepted])
        guessed = NOTHING
        if command.propose:
            guessed = self._oracle.guess([*command.prefix, *accepted, next_token])
        self._tell(BlockVerified(command.verify_id, path, next_token, proposal=guessed))

    def _tell(self, event: Event) -> None:
        if not self._finished:
            self._obey(self._method.handle(event))


@dataclass(frozen=True, slots=True)
class _Held:
    """What a server's session has worked through: a text, and of a tree what was followed."""

    text: Sequence[int]
    tree: DraftedTree | None = None

    def common_length(self, text: Sequence[int]) -> int:
        """Return how much of the beginning of a text it is."""
        for length, (ours, theirs) in enumerate(zip(self.text, text, strict=False)):
            if ours != theirs:
                return length
        length = min(len(self.text), len(text))
        return length if self.tree is None else length + self.tree.held_length(text[length:])


class _Work:
    """What occupies a server; for a draft or a decode with the text so far.

    The text of a draft that is a tree stays its prefix. `begins` and `ends` are its forward's.
    """

    __slots__ = ("begins", "command", "ends", "forward_count", "span", "text", "tree")

    def __init__(self, command: _Start, span: Span) -> None:
        self.command = command
        self.span = span
        self.text = list(command.prefix)
        self.forward_count = 0
        self.begins: Time = 0
        self.ends: Time = 0
        self.tree: DraftedTree | None = None
        if isinstance(command, StartDraft) and command.width > 1:
            self.tree = DraftedTree(command.branch_count)
