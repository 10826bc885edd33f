"""Where the time of a request went, from what the orchestrator and the model servers noted of it.

The orchestrator's timeline says which answer started which call; the servers' records say how long
a call waited and computed there. The two have different clocks: a call's record is found by its
server and its time, for which it is enough to know the clocks' difference within a millisecond.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline import TimelineEventKind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from paceline import TimelineEvent
    from paceline_bench.simulated_servers import SimulatedServers
    from paceline_protocol.laboratory.simulation import ServerLatency


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """A request's time along its critical path, in ms; the parts add up to the total.

    Attributes:
        total: On the client's clock.
        ideal: What the simulator takes.
        bare: What bare calls in place of those of the ideal's critical path would add: floor less
            ideal.
        path: The nominal times of the forwards on this run's own path, less the ideal: other calls
            than in the ideal were critical.
        overshoot: What forwards took beyond their nominal time.
        queue: Waiting for a server's model.
        transport: The rest of each call beyond a bare one: gRPC, event loops, opening sessions.
        orchestrator: From an answer to the start of the call that it caused.
        client: The client's own call: before the first and after the last call of the path.
    """

    total: float
    ideal: float
    bare: float
    path: float
    overshoot: float
    queue: float
    transport: float
    orchestrator: float
    client: float


@dataclass(frozen=True, slots=True)
class Restart:
    """How long after a rejecting verdict's arrival the first new calls reached their servers, ns.

    Attributes:
        draft_ns: The new draft.
        verify_ns: The new verification; None if the verdict started none.
    """

    draft_ns: int
    verify_ns: int | None


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """A call as the orchestrator saw it, with the server's record of it.

    A decode looks like a verification for each of its messages; they share its record.

    Attributes:
        server: The server that was called.
        is_draft: Else it is a verification.
        start_ns: Of the call.
        answers: When each answer came, and how many forwards it took until then.
        cancelled: Whether it was withdrawn.
        record: The server's; None if it never got there.
    """

    server: str
    is_draft: bool
    start_ns: int
    answers: list[tuple[int, int]] = field(default_factory=list)
    cancelled: bool = False
    record: Mapping[str, Any] | None = None


class Trace:
    """One request, taken apart.

    Args:
        timeline: What the orchestrator noted.
        records: What the servers noted of the request's calls, by server; see /debug/calls.
        elapsed_ns: The request's time on the client's clock.
    """

    def __init__(
        self,
        timeline: Sequence[TimelineEvent],
        records: Mapping[str, Sequence[Mapping[str, Any]]],
        *,
        elapsed_ns: int,
    ) -> None:
        self._elapsed_ns = elapsed_ns
        self._calls = _calls(timeline)
        self._answers = sorted(at for call in self._answered for at, _ in call.answers)
        _attach(self._calls, records)

    @property
    def prefill_count(self) -> int:
        """How many targets were given the prompt before anything was answered."""
        first = self._answers[0] if self._answers else self._elapsed_ns
        return sum(not call.is_draft and call.start_ns < first for call in self._calls)

    @property
    def _answered(self) -> Iterable[_Call]:
        """Drafts with their answers, and the verifications whose verdict was taken."""
        return (call for call in self._calls if call.is_draft or not call.cancelled)

    def breakdown(self, servers: SimulatedServers, *, ideal_ns: int, floor_ns: int) -> Breakdown:
        """Go back along the critical path, and sum up what was spent on what."""
        bare_ns = floor_ns - ideal_ns
        call, answer = max(
            (
                (call, answer)
                for call in self._answered
                if not call.is_draft
                for answer in call.answers
            ),
            key=lambda it: it[1],
        )
        spent: Counter[str] = Counter(
            ideal=ideal_ns, path=-ideal_ns, bare=bare_ns, transport=-bare_ns
        )
        spent["client"] = self._elapsed_ns - answer[0]
        cold = self._cold_calls()
        while True:
            latency = servers.drafter if call.is_draft else servers.target
            self._charge(spent, call, answer, latency=latency, cold=cold)
            cause = self._cause(call)
            if cause is None:
                spent["client"] += call.start_ns
                break
            spent["orchestrator"] += call.start_ns - cause[1][0]
            call, answer = cause
        parts = {name: spent[name] / 1e6 for name in _PARTS}
        return Breakdown(total=self._elapsed_ns / 1e6, **parts)

    def restarts(self, *, back_ns: int) -> list[Restart]:
        """Find every rejection that made the drafter start again.

        Args:
            back_ns: From the end of a handler at a server until a bare client has its answer: so
                long after the server's record ends the verdict is taken to arrive.
        """
        restarts = []
        drafts = [call for call in self._calls if call.is_draft]
        for call in drafts[1:]:
            cause = self._cause(call)
            if cause is None or cause[0].is_draft:
                continue
            verdict, (answered_ns, _) = cause
            if verdict.record is None or call.record is None:
                continue
            arrived_ns = verdict.record["end_ns"] + back_ns
            verify = self._verification_caused_at(answered_ns)
            restarts.append(
                Restart(
                    call.record["start_ns"] - arrived_ns,
                    None if verify is None else verify["start_ns"] - arrived_ns,
                )
            )
        return restarts

    def _charge(
        self,
        spent: Counter[str],
        call: _Call,
        answer: tuple[int, int],
        *,
        latency: ServerLatency,
        cold: Collection[_Call],
    ) -> None:
        answered_ns, forwards = answer
        first_ns, step_ns = int(latency.first), int(latency.step)
        nominal_ns = forwards * step_ns + (first_ns - step_ns) * (call in cold)
        queue_ns = overshoot_ns = 0
        if call.record is not None:
            sharers = self._sharers(call)
            # Of a draft the record may count more forwards than those waited for here.
            counted = max(1, call.record["rows"]) if call.is_draft else len(sharers)
            is_cold = any(each in cold for each in sharers)
            all_ns = counted * step_ns + (first_ns - step_ns) * is_cold
            overshoot_ns = (call.record["forward_ns"] - all_ns) * forwards // counted
            queue_ns = call.record["queue_ns"] * forwards // counted
        elapsed_ns = answered_ns - call.start_ns
        spent["path"] += nominal_ns
        spent["overshoot"] += overshoot_ns
        spent["queue"] += queue_ns
        spent["transport"] += elapsed_ns - nominal_ns - overshoot_ns - queue_ns

    def _sharers(self, call: _Call) -> list[_Call]:
        """Return the messages of a decode; of any other call itself."""
        if call.record is None or call.record["method"] != "Decode":
            return [call]
        return [each for each in self._calls if each.record is call.record]

    def _cause(self, call: _Call) -> tuple[_Call, tuple[int, int]] | None:
        """Return the last answer before a call, which started it; None if there is none.

        A draft that was withdrawn has not used up its window, so no other draft goes on from it:
        what it still sent between a verdict and the new draft hides no restart.
        """
        before = (
            (other, answer)
            for other in self._answered
            if not (call.is_draft and other.is_draft and other.cancelled)
            for answer in other.answers
            if other is not call and answer[0] <= call.start_ns
        )
        return max(before, key=lambda it: it[1][0], default=None)

    def _verification_caused_at(self, answered_ns: int) -> Mapping[str, Any] | None:
        """Return the record of the first verification started before any further answer."""
        until = next((at for at in self._answers if at > answered_ns), answered_ns)
        started = (
            call
            for call in self._calls
            if not call.is_draft and answered_ns <= call.start_ns <= until
        )
        call = min(started, key=lambda it: it.start_ns, default=None)
        return None if call is None else call.record

    def _cold_calls(self) -> set[_Call]:
        """Return the first answered call of each server."""
        first: dict[str, _Call] = {}
        for call in self._answered:
            if call.answers:
                first.setdefault(call.server, call)
        return {*first.values()}


_PARTS = [part.name for part in fields(Breakdown) if part.name != "total"]


def mean_breakdown(breakdowns: Sequence[Breakdown]) -> Breakdown:
    """Average the parts of several requests."""
    return Breakdown(
        **{
            name: statistics.mean(getattr(each, name) for each in breakdowns)
            for name in ("total", *_PARTS)
        }
    )


def _calls(timeline: Sequence[TimelineEvent]) -> list[_Call]:
    """Put the events of each call together; in the order of their start."""
    calls: dict[int, _Call] = {}
    drafted: Counter[int] = Counter()
    for event in sorted(timeline, key=lambda it: (it.start_ns, it.end_ns)):
        if event.kind is TimelineEventKind.DRAFTED:
            call = calls.setdefault(event.call_id, _call(event))
            drafted[event.call_id] += len(event.token_ids)
            call.answers.append((event.end_ns, drafted[event.call_id]))
        elif event.kind is TimelineEventKind.VERIFYING:
            calls[event.call_id] = call = _call(event)
            call.answers.append((event.end_ns, 1))
    for event in timeline:
        if event.kind is TimelineEventKind.CANCELLED and event.call_id in calls:
            calls[event.call_id].cancelled = True
    return sorted(calls.values(), key=lambda it: it.start_ns)


def _call(event: TimelineEvent) -> _Call:
    is_draft = event.kind is TimelineEventKind.DRAFTED
    return _Call(server=event.server, is_draft=is_draft, start_ns=event.start_ns)


def _attach(calls: Sequence[_Call], records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Find each call's record: of its server's records the one that began when it did."""
    by_server: defaultdict[str, list[_Call]] = defaultdict(list)
    for call in calls:
        by_server[call.server].append(call)
    differences = [
        records[server][0]["start_ns"] - own[0].start_ns
        for server, own in by_server.items()
        if records.get(server)
    ]
    if not differences:
        return
    difference = min(differences)  # of the clocks, and one way
    for server, own in by_server.items():
        for call in own:
            expected_ns = call.start_ns + difference
            call.record = min(
                records.get(server, ()),
                key=partial(_distance, expected_ns),
                default=None,
            )


def _distance(expected_ns: int, record: Mapping[str, Any]) -> int:
    return abs(int(record["start_ns"]) - expected_ns)
