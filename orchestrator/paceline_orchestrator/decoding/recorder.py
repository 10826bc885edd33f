"""What a request took: its timeline and its statistics, as the client is told of them.

Times are nanoseconds since the request's arrival, on the orchestrator's clock.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import count, groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from paceline_orchestrator.decoding.guesses import Guesses
from paceline_orchestrator.decoding.statistics import EventKind, Statistics, TimelineEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_contract.calls import CallTiming
    from paceline_contract.proposal import Proposal
    from paceline_orchestrator.decoding.exchange import Decoded, Drafted, Judged
    from paceline_orchestrator.decoding.metrics import RequestMetrics
    from paceline_orchestrator.decoding.statistics import Fallback
    from paceline_protocol.draft_statistics import DraftStatistics
    from paceline_protocol.messages import EmitTokens, StartDecode, StartDraft, StartVerify


GRAMMAR = "grammar"
"""What the timeline calls the source of forced tokens, where a server's name stands else."""


@dataclass(slots=True, eq=False)
class CallRecord:
    """A draft, a verification, or the part of a decode up to its next tokens.

    Attributes:
        call_id: Its name in the timeline, where all are numbered together.
        server: Where it runs.
        prefix: What it follows; a decode its prefix and `decoded_count` tokens.
        started_ns: When it was started, or its last tokens came; perf_counter_ns.
        token_ids: The block of a verification, or what a draft has found so far: of a tree its
            chain.
        decoded_count: How many tokens a decode has found so far.
        depth: How far a verification runs ahead.
        models: The names of the models that compute a draft there.
        branch_count: Tokens beside the chain that a verification judges.
        is_branch: Whether it is a verification of a branch.
        is_running: Whether more may come of it.
    """

    call_id: int
    server: str
    _: KW_ONLY
    prefix: Sequence[int]
    started_ns: int
    token_ids: list[int] = field(default_factory=list)
    decoded_count: int = 0
    depth: int = 0
    models: Sequence[str] = ()
    branch_count: int = 0
    is_branch: bool = False
    is_running: bool = True

    @property
    def position(self) -> int:
        """Where its first token stands."""
        return len(self.prefix) + self.decoded_count

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.position + len(self.token_ids)


class Recorder:
    """Told of everything that happens to a request, as it happens.

    Args:
        arrived_ns: The request's arrival; perf_counter_ns.
        prompt_length: Tokens before the first new one.
        waited_ns: For how long it waited for its turn.
        metrics: Where tokens and calls are measured, when nothing waits for it.
        keep_timeline: Whether to remember events.
        show: Takes each event as it happens; None if nobody wants them.

    Attributes:
        targets_used: The most targets that verified at the same time.
    """

    def __init__(
        self,
        *,
        arrived_ns: int,
        prompt_length: int,
        metrics: RequestMetrics,
        waited_ns: int = 0,
        keep_timeline: bool = False,
        show: Callable[[TimelineEvent], None] | None = None,
    ) -> None:
        self._arrived_ns = arrived_ns
        self._position = prompt_length
        self._metrics = metrics
        self._emitted_ns = arrived_ns
        self._later_count = 0
        self._draft_hops_ns: list[int] = []
        self._keep_timeline = keep_timeline
        self._show = show
        self._timeline: list[TimelineEvent] = []
        self._call_ids = count(1)
        self._verifying: Counter[str] = Counter()
        self._drafts: list[CallRecord] = []
        self._forced = Guesses(prompt_length)  # marked: forced
        self._whole = CallRecord(
            0, "orchestrator", prefix=(), started_ns=arrived_ns
        )  # the request itself
        self._statistics = Statistics(queue_ns=waited_ns)
        self.targets_used = 0

    @property
    def token_ns(self) -> float | None:
        """The average time of a token, without those that became final first; or None."""
        if not self._later_count:
            return None
        later_ns = self._since_arrival(self._emitted_ns) - self._statistics.time_to_first_token_ns
        return later_ns / self._later_count

    def fallback(self, kind: Fallback) -> None:
        """Something did not go as planned."""
        self._statistics.fallbacks[kind] += 1

    def drafting(self, server: str, draft: StartDraft, *, models: Sequence[str] = ()) -> CallRecord:
        """A draft was started, where these models compute."""
        record = CallRecord(
            next(self._call_ids),
            server,
            prefix=draft.prefix,
            started_ns=time.perf_counter_ns(),
            models=models,
        )
        self._drafts.append(record)
        self._statistics.untold_count += 1
        return record

    def drafted(self, record: CallRecord, drafted: Drafted) -> None:
        """A draft found tokens."""
        hop_ns = self._count(drafted.timing, drafted.elapsed_ns)
        if not record.token_ids:
            self._draft_hops_ns.append(hop_ns)  # measured later: the target waits for the token
        self._statistics.drafter_forward_count += drafted.timing.forward_count
        self._statistics.count_models(record.models, drafted.timing)
        proposal, chain = drafted.proposal, drafted.chain
        token_ids = proposal.along(chain)
        are_forced = [index in proposal.forced for index in chain]
        if any(are_forced):
            self._count_forced((*record.prefix, *record.token_ids), token_ids, are_forced)
        self._note_drafted(
            record, token_ids, are_forced=are_forced, branch_count=len(proposal) - len(chain)
        )

    def drafted_at_once(self, drafter: str, draft: StartDraft, token_ids: Sequence[int]) -> None:
        """A draft was asked for, and answered: no call was made."""
        record = self.drafting(drafter, draft)
        self._note_drafted(record, token_ids)
        self.draft_ended(record)

    def guessed(self, record: CallRecord, prefix: Sequence[int], proposal: Proposal) -> None:
        """A target proposed what follows a verdict, with tokens that a grammar forces."""
        token_ids = proposal.along(proposal.forced)
        self._count_forced(prefix, token_ids, [True] * len(token_ids))
        guess = replace(record, prefix=prefix, token_ids=[], server=GRAMMAR)
        self._tell(EventKind.DRAFTED, guess, token_ids=token_ids, branch_count=0)

    def verifying(self, server: str, verify: StartVerify) -> CallRecord:
        """A verification was started."""
        record = CallRecord(
            next(self._call_ids),
            server,
            prefix=verify.prefix,
            started_ns=time.perf_counter_ns(),
            token_ids=list(verify.proposal.along(verify.proposal.trunk)),
            depth=verify.depth,
            branch_count=verify.proposal.branch_count,
            is_branch=verify.is_branch,
        )
        self._begin_at_target(record)
        self._statistics.untold_count += 1
        return record

    def decoding(self, server: str, decode: StartDecode) -> CallRecord:
        """A decode was started. Each of its answers ends what looks like a verification."""
        record = CallRecord(
            next(self._call_ids), server, prefix=decode.prefix, started_ns=time.perf_counter_ns()
        )
        self._begin_at_target(record)
        return record

    def decoded(self, record: CallRecord, decoded: Decoded) -> None:
        """A decode found tokens."""
        hop_ns = self._count(decoded.timing, decoded.elapsed_ns)
        if not record.decoded_count:
            self._metrics.hop("Decode", hop_ns)
        self._count_at_target(decoded.timing)
        self._tell(EventKind.VERIFYING, record, start_ns=record.started_ns)
        record.call_id = next(self._call_ids)
        record.decoded_count += len(decoded.token_ids)
        record.started_ns = time.perf_counter_ns()

    def decode_ended(self, record: CallRecord) -> None:
        """A decode has used up its window, was withdrawn, or failed."""
        record.is_running = False
        self._end_at_target(record)

    def judged(self, judged: Judged) -> None:
        """A verification was answered."""
        self._metrics.hop("Verify", self._count(judged.timing, judged.elapsed_ns))
        self._count_at_target(judged.timing)

    def verification_ended(self, record: CallRecord) -> None:
        """A verification was answered, withdrawn, or failed."""
        self._statistics.untold_count -= 1
        self._end_at_target(record)
        self._tell(EventKind.VERIFYING, record, start_ns=record.started_ns)

    def draft_ended(self, record: CallRecord) -> None:
        """A draft has used up its window, was withdrawn, or failed."""
        self._statistics.untold_count -= 1
        record.is_running = False

    def cancelled(self, record: CallRecord, *, by_rejection: bool) -> None:
        """A call was withdrawn: a rejection made it worthless, or the generation is over."""
        self._statistics.cancelled_count += by_rejection
        # Of a decode each message tells what it ran.
        self._statistics.untold_count += not record.decoded_count
        self._tell(EventKind.CANCELLED, record)

    def emitted(self, emission: EmitTokens) -> None:
        """Tokens became final."""
        self._measure(len(emission.token_ids))
        self._statistics.token_count += len(emission.token_ids)
        for token_id, accepted in zip(emission.token_ids, emission.accepted, strict=True):
            kind = EventKind.ACCEPTED if accepted else EventKind.CORRECTED
            self._tell(kind, self._whole, position=self._position, token_ids=(token_id,))
            self._discard_what_contradicts(token_id)
            verdicts = self._forced.finalize(token_id)
            self._statistics.forced_accepted += any(it == (True, True) for it in verdicts)
            self._position += 1

    def statistics(self, drafts: DraftStatistics) -> Statistics:
        """Sum up; `drafts` is what the method says of the draft tokens."""
        return replace(
            self._statistics,
            drafts=drafts,
            total_ns=self._since_arrival(time.perf_counter_ns()),
        )

    def timeline(self) -> list[TimelineEvent]:
        """Return what was remembered, by start."""
        return sorted(self._timeline, key=lambda event: event.start_ns)

    def _count_forced(
        self, prefix: Sequence[int], token_ids: Sequence[int], are_forced: Sequence[bool]
    ) -> None:
        self._statistics.forced_drafted += sum(are_forced)
        self._forced.add(prefix, token_ids, are_marked=are_forced)

    def _note_drafted(
        self,
        record: CallRecord,
        token_ids: Sequence[int],
        *,
        are_forced: Sequence[bool] = (),
        branch_count: int = 0,
    ) -> None:
        marks = are_forced or [False] * len(token_ids)
        for is_forced, run in groupby(zip(marks, token_ids, strict=True), key=itemgetter(0)):
            found = [token_id for _, token_id in run]
            self._tell(
                EventKind.DRAFTED,
                replace(record, server=GRAMMAR) if is_forced else record,
                start_ns=record.started_ns,
                position=record.end,
                token_ids=found,
                branch_count=branch_count,
            )
            branch_count = 0
            record.token_ids.extend(found)
        record.started_ns = time.perf_counter_ns()

    def _count_at_target(self, timing: CallTiming) -> None:
        if not self._statistics.target_forward_count:
            self._statistics.reused_count = timing.reused_token_count
        self._statistics.target_forward_count += timing.forward_count

    def _begin_at_target(self, record: CallRecord) -> None:
        self._verifying[record.server] += 1
        self.targets_used = max(self.targets_used, len(self._verifying))
        self._tell(EventKind.VERIFYING, record, keep=False)

    def _end_at_target(self, record: CallRecord) -> None:
        self._verifying[record.server] -= 1
        self._verifying += Counter()  # drops those at 0

    def _measure(self, token_count: int) -> None:
        """Measure final tokens, and what calls took up to them."""
        now_ns = time.perf_counter_ns()
        if not self._statistics.time_to_first_token_ns:
            self._statistics.time_to_first_token_ns = self._since_arrival(now_ns)
            self._emitted_ns = now_ns
            token_count -= 1
        else:
            self._later_count += token_count
        self._metrics.token_gaps(token_count, gap_ns=now_ns - self._emitted_ns)
        self._emitted_ns = now_ns
        for hop_ns in self._draft_hops_ns:
            self._metrics.hop("Draft", hop_ns)
        self._draft_hops_ns.clear()

    def _discard_what_contradicts(self, token_id: int) -> None:
        """Drop drafts that are on another path than the token now final at this position."""
        surviving = []
        for record in self._drafts:
            offset = self._position - len(record.prefix)
            path = record.prefix if offset < 0 else record.token_ids
            index = self._position if offset < 0 else offset
            if index < len(path) and path[index] != token_id:
                worthless = record.token_ids[max(0, offset) :]
                if worthless:
                    self._tell(
                        EventKind.DISCARDED,
                        record,
                        position=max(self._position, len(record.prefix)),
                        token_ids=worthless,
                    )
            elif record.is_running or record.end > self._position + 1:
                surviving.append(record)
        self._drafts = surviving

    def _tell(
        self,
        kind: EventKind,
        record: CallRecord,
        *,
        start_ns: int | None = None,
        position: int | None = None,
        token_ids: Sequence[int] | None = None,
        branch_count: int | None = None,
        keep: bool = True,
    ) -> None:
        """Tell what happened until now; a moment, unless it has a start of its own."""
        keep = keep and self._keep_timeline
        if not keep and self._show is None:
            return
        now_ns = time.perf_counter_ns()
        event = TimelineEvent(
            kind,
            record.server,
            start_ns=self._since_arrival(now_ns if start_ns is None else start_ns),
            end_ns=self._since_arrival(now_ns),
            position=record.position if position is None else position,
            token_ids=tuple(record.token_ids if token_ids is None else token_ids),
            call_id=record.call_id,
            depth=record.depth,
            branch_count=record.branch_count if branch_count is None else branch_count,
            is_branch=record.is_branch,
        )
        if keep:
            self._timeline.append(event)
        if self._show is not None:
            self._show(event)

    def _count(self, timing: CallTiming, elapsed_ns: int) -> int:
        """Count where an answer's time went, and return what was neither queue nor forward."""
        hop_ns = max(0, elapsed_ns - timing.queue_ns - timing.forward_ns)
        self._statistics.queue_ns += timing.queue_ns
        self._statistics.forward_ns += timing.forward_ns
        self._statistics.network_ns += hop_ns
        return hop_ns

    def _since_arrival(self, at_ns: int) -> int:
        return max(0, at_ns - self._arrived_ns)
