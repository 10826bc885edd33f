"""What happened to requests at servers that fail, and what of it should not have.

`findings` says that; `tell` writes the history down for a person.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_contract.proposal import Proposal
from paceline_orchestrator.decoding.session_tokens import Window
from support.orchestrating import PROMPT
from support.virtual_system import now

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.virtual_network import CallRecord
    from support.virtual_scenario import Scenario
    from support.virtual_servers import VirtualServer
    from support.virtual_system import Stream, VirtualSystem

WORK = ("Verify", "Decode", "Draft")
COURTESY_SECONDS = 0.002
INSTANT = 1e-6
# While a target is well, the longest time without a token that nothing explains; and what a fault
# that began lately adds to it. A hung server costs the patience of a cold call, the question
# whether it has the call, and the next one's prefill; a stuck one is in sight for ten seconds.
CALM_GAP_SECONDS = 0.5
GAP_OF_FAULT_SECONDS = 3.5
GAP_OF_STUCK_SECONDS = 13.0
_FALLBACKS = {
    "SESSION_NOT_FOUND": "session_lost",
    "PREFIX_NOT_HELD": "prefix_resent",
    "PREFIX_MISMATCH": "prefix_resent",
    "CACHE_EXHAUSTED": "session_refused",
    "OVERLOADED": "session_refused",
    "DEADLINE": "deadline",
}
# What alone makes a server say that it does not hold what it was relied on to hold.
_CAUSES = {
    "SESSION_NOT_FOUND": ("lose sessions", "die", "drain"),
    "PREFIX_NOT_HELD": ("lose tokens",),
    "PREFIX_MISMATCH": ("tamper",),
    "STALE_CALL": ("nothing",),
}
_NO_FAILURES = {"answered", "withdrawn", "SUPERSEDED", "STALE_CALL"}


@dataclass
class History:
    """What happened.

    Attributes:
        streams: What clients got, by the number of their wish.
        records: All calls, as they were sent.
        silences: By server, when it was taken for silent, and until when.
        leftovers: Tasks and timers that should be gone.
    """

    scenario: Scenario
    models: dict[str, VirtualServer]
    began: float
    streams: dict[int, Stream] = field(default_factory=dict)
    records: list[CallRecord] = field(default_factory=list)
    silences: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    leftovers: list[str] = field(default_factory=list)

    def note_standings(self, system: VirtualSystem) -> None:
        """Note who is taken for silent from now on, and who no longer."""
        for server in system.pool.servers:
            known = self.silences[server.name]
            is_known = bool(known) and len(known[-1]) == 1
            if (server.pause_status == "SILENT") != is_known:
                if is_known:
                    known[-1].append(now())
                else:
                    known.append([now()])

    def findings(self) -> list[str]:
        """Say all that should not have happened."""
        return [
            *self._about_texts(),
            *self._about_gaps(),
            *self._about_ends(),
            *self._about_sessions(),
            *self._about_order(),
            *self._about_what_is_worthless(),
            *self._about_silence(),
            *self._about_statistics(),
            *self._about_fallbacks(),
            *(f"left behind: {it}" for it in self.leftovers),
        ]

    # --- what clients got ---

    def _about_texts(self) -> Iterator[str]:
        for number, stream in self.streams.items():
            truth = self._truth(number)
            if stream.token_ids != truth[: len(stream.token_ids)]:
                yield f"request {number}: {stream.token_ids} is no beginning of {truth}"
            if stream.finished is not None and stream.token_ids != truth:
                yield f"request {number}: {stream.token_ids}, and no more, of {truth}"
            if stream.failure is not None and not self._is_expected(number, stream.failure):
                yield f"request {number}: failed with {stream.failure!r}"
            if stream.finished is None and stream.failure is None and not self._leaves(number):
                yield f"request {number}: just ended"

    def _leaves(self, number: int) -> bool:
        return self.scenario.wishes[number].leaves_after is not None

    def _is_expected(self, number: int, failure: Exception) -> bool:
        """Whether no target was there for it, or its time was over."""
        wish, stream = self.scenario.wishes[number], self.streams[number]
        if isinstance(failure, errors.DeadlineError):
            return abs((stream.ended or 0.0) - stream.began - wish.seconds) < INSTANT
        was_alone = not self.scenario.steady_targets
        return was_alone and isinstance(failure, errors.NoTargetError | errors.OverloadedError)

    def _about_gaps(self) -> Iterator[str]:
        if not self.scenario.steady_targets:
            return
        for number, stream in self.streams.items():
            times = [stream.began, *(at for at, _ in stream.arrivals), stream.ended or 0.0]
            for earlier, later in pairwise(times):
                allowed = self._allowed_gap(earlier, later)
                if later - earlier > allowed:
                    yield (
                        f"request {number}: nothing for {later - earlier:.2f} s from"
                        f" {self._since_began(earlier)} on, where {allowed:.1f} s are explained"
                    )

    def _allowed_gap(self, earlier: float, later: float) -> float:
        allowed = CALM_GAP_SECONDS
        for fault in self.scenario.faults:
            begin = self.began + fault.at
            end = begin + fault.seconds + GAP_OF_FAULT_SECONDS
            if begin <= later and end >= earlier:
                is_stuck = fault.kind == "get stuck"
                allowed += GAP_OF_STUCK_SECONDS if is_stuck else GAP_OF_FAULT_SECONDS
        return allowed

    # --- what became of calls ---

    def _about_ends(self) -> Iterator[str]:
        for it in self.records:
            if not it.end:
                yield f"never ended: {self._line(it)}"
            causes = _CAUSES.get(it.end)
            if (
                causes
                and it.withdrawn_at is None
                and not any(it.server in self._struck_by(cause) for cause in causes)
            ):
                yield f"without a reason: {self._line(it)}"
            if it.arrived_at is not None and not it.left:
                yield f"its server never heard that nobody waits: {self._line(it)}"
        for model in self.models.values():
            if model.running:
                yield f"{model.name} still runs {model.running} calls"

    def _about_sessions(self) -> Iterator[str]:
        closed = Counter(it.session_id for it in self.records if it.method == "CloseSession")
        lost = {it.session_id for it in self.records if it.end == "SESSION_NOT_FOUND"}
        for opening in self._of("OpenSession"):
            session_id = _opened(opening)
            if session_id and not (closed[session_id] or session_id in lost):
                yield f"never closed: {session_id} of {self._line(opening)}"
            if closed[session_id] > 1:
                yield f"closed {closed[session_id]} times: {session_id}"
        told = {it.session_id for it in self._of("CloseSession") if it.end == "answered"}
        for model in self.models.values():
            for session_id in told & model.sessions.keys():
                yield f"{session_id} is open after it was closed"

    def _about_order(self) -> Iterator[str]:
        """A session's calls are numbered as they are sent, and the newest is the only one."""
        for calls in self._by_session().values():
            for older, newer in pairwise(calls):
                if older.request.call.sequence >= newer.request.call.sequence:
                    yield f"not after the one before it: {self._line(newer)}"
                ends = _end_of_work(older)
                is_promoted = older.method == "Verify" and _asks_the_same(older, newer)
                if ends > newer.sent_at + COURTESY_SECONDS + INSTANT and not is_promoted:
                    yield f"goes on beside its successor: {self._line(older)}"

    def _about_what_is_worthless(self) -> Iterator[str]:
        for number, stream in self.streams.items():
            for call in self._work_of(number):
                wrong_at = min(self._known_wrong_at(call, number), stream.ended or 0.0)
                latest = max(call.sent_at, wrong_at) + COURTESY_SECONDS + INSTANT
                if _end_of_work(call) > latest:
                    yield (
                        f"of no use from {self._since_began(wrong_at)} on, and not withdrawn:"
                        f" {self._line(call)}"
                    )

    def _known_wrong_at(self, call: CallRecord, number: int) -> float:
        """Return when a call was known to contradict the text; infinity if it never was."""
        prefixes = self.models[call.server].prefixes
        text = list(prefixes.get((call.session_id, call.request.call.sequence), ()))
        told_at = [0.0] * len(text)
        if call.method == "Draft":
            window = Window((), call.request.max_tokens, final_length=0, width=call.request.width)
            for at, message in call.messages:
                said = message.proposal
                piece = Proposal(tuple(said.token_ids), tuple(said.parents))
                chain = piece.along(window.chain_of(piece) or ())
                window.advance(len(chain))
                text += chain
                told_at += [at] * len(chain)
        truth = [*PROMPT, *self._truth(number)]
        final_at = self._final_at(number)
        for index, (said, right) in enumerate(zip(text, truth, strict=False)):
            if said != right:
                return max(told_at[index], final_at.get(index, float("inf")))
        return float("inf")

    def _about_silence(self) -> Iterator[str]:
        requests = {f"request-{number}" for number in self.streams}
        for server, silences in self.silences.items():
            for silence in silences:
                begin, end = silence[0], (*silence, float("inf"))[1]
                for it in self._of("OpenSession", server=server):
                    if begin < it.sent_at < end and it.request.spec.request_id in requests:
                        yield f"asked though it was silent: {self._line(it)}"
                if end < float("inf") and not self._probe_answered(server, begin, end):
                    yield f"{server} was used again at {self._since_began(end)} without a probe"

    def _probe_answered(self, server: str, begin: float, end: float) -> bool:
        probing = {
            _opened(it)
            for it in self._of("OpenSession", server=server)
            if it.request.spec.request_id == "probe"
        }
        return any(
            it.session_id in probing and it.end == "answered" and begin <= it.ended_at <= end
            for it in self._of(*WORK, server=server)
        )

    # --- what is told of it ---

    def _about_statistics(self) -> Iterator[str]:
        for number, stream in self.streams.items():
            if stream.finished is None:
                continue
            took = stream.finished.statistics
            became = (
                took.accepted_token_count + took.rejected_token_count + took.discarded_token_count
            )
            if took.drafted_token_count != became:
                yield f"request {number}: {took.drafted_token_count} drafted, {became} accounted"
            origins = [it for chunk in stream.chunks for it in chunk.origins]
            accepted = origins.count(pb.TOKEN_ORIGIN_ACCEPTED_DRAFT)
            if accepted != took.accepted_token_count:
                yield f"request {number}: {took.accepted_token_count} accepted, not {accepted}"
            yield from self._about_counts(number, took, ended=stream.ended or 0.0)

    def _about_counts(self, number: int, took: Any, *, ended: float) -> Iterator[str]:
        work = self._work_of(number)
        verdicts = [it for it in work if it.method == "Verify" and it.end == "answered"]
        wanted = sum(it.withdrawn_at is None for it in verdicts)
        lies = sum(it.server in self._struck_by("lie") for it in verdicts)
        decodes = [it for it in work if it.method == "Decode"]
        least = wanted - lies + sum(_surely_counted(it) for it in decodes if it.end == "answered")
        most = wanted + sum(_forwards(message) for it in decodes for _, message in it.messages)
        if not least <= took.target_forward_count <= most:
            yield (
                f"request {number}: {took.target_forward_count} forwards of targets, and not"
                f" {least} to {most}"
            )
        replaced = [old for calls in self._by_session().values() for old, _ in pairwise(calls)]
        early = sum(
            (it.ended_at or 0.0) < ended - INSTANT
            or any(it is old for old in replaced)
            # One moment may bring a rejection and, verified ahead, the text's end.
            or self._known_wrong_at(it, number) <= ended
            for it in work
            if _was_dropped(it)
        )
        unsent = sum(it.end == "SESSION_NOT_FOUND" for it in work)
        if took.cancelled_rpc_count > early + unsent:
            yield f"request {number}: {took.cancelled_rpc_count} calls cancelled, and not {early}"
        drafts = [it for it in work if it.method == "Draft"]
        most = sum(_forwards(message) for it in drafts for _, message in it.messages)
        least = sum(_surely_counted(it) for it in drafts if it.end == "answered")
        if not least <= took.drafter_forward_count <= most:
            yield (
                f"request {number}: {took.drafter_forward_count} forwards of drafters, and not"
                f" {least} to {most}"
            )

    def _about_fallbacks(self) -> Iterator[str]:
        for number, stream in self.streams.items():
            if stream.finished is None:
                continue
            told = Counter(stream.fallbacks)
            least, most = self._expected_fallbacks(number)
            for kind in told.keys() | least.keys():
                if not least[kind] <= told[kind] <= most[kind]:
                    expected = f"{least[kind]} to {most[kind]}"
                    yield f"request {number}: {told[kind]} times {kind}, and not {expected}"

    def _expected_fallbacks(self, number: int) -> tuple[Counter[str], Counter[str]]:
        """Return how often each kind must have been met, and how often it may have been."""
        least: Counter[str] = Counter()
        most: Counter[str] = Counter()
        # What fails in a session that was replaced already is nobody's loss.
        left = self._struck_by("drain") | self._struck_by("get stuck")
        wish, end = self.scenario.wishes[number], self.streams[number].ended or 0.0
        for call in (*self._work_of(number), *self._openings_of(number)):
            role = call.server.partition("-")[0]
            if call.end == "withdrawn" and (call.ended_at or 0.0) < end:
                most["deadline"] += 1  # it may have been given up
            if call.end == "answered" and call.server in self._struck_by("lie"):
                most[f"{role}_lost"] += 1
            kind = _fallback_of(call)
            if kind is None:
                continue
            most[kind] += 1
            was_wanted = call.end != "withdrawn" and call.withdrawn_at is None
            if call.method in WORK and was_wanted and call.server not in left:
                least[kind] += 1
        speculates = wish.strategy != pb.STRATEGY_AUTOREGRESSIVE
        is_auto = wish.strategy == pb.STRATEGY_AUTO
        if is_auto:
            most["load_changed"] = wish.max_tokens
        if speculates and not (self.scenario.drafter_count or is_auto):
            least["no_drafter"] += 1
        if speculates:
            drafters_lost = most["drafter_lost"] + most["deadline"] + most["session_refused"]
            most["no_drafter"] = 1 + drafters_lost
        return least, most

    # --- looking things up ---

    def _truth(self, number: int) -> list[int]:
        return self.scenario.truth(self.scenario.wishes[number].max_tokens)[len(PROMPT) :]

    def _final_at(self, number: int) -> dict[int, float]:
        """Return when the client had the token at each position."""
        final, position = {}, len(PROMPT)
        for at, token_ids in self.streams[number].arrivals:
            for _ in token_ids:
                final[position] = at
                position += 1
        return final

    def _of(self, *methods: str, server: str = "") -> list[CallRecord]:
        return [it for it in self.records if it.method in methods and server in {"", it.server}]

    def _openings_of(self, number: int) -> list[CallRecord]:
        name = f"request-{number}"
        return [it for it in self._of("OpenSession") if it.request.spec.request_id == name]

    def _work_of(self, number: int) -> list[CallRecord]:
        sessions = {_opened(it) for it in self._openings_of(number)}
        return [it for it in self._of(*WORK) if it.session_id in sessions]

    def _by_session(self) -> dict[str, list[CallRecord]]:
        calls: dict[str, list[CallRecord]] = defaultdict(list)
        for it in self._of(*WORK):
            calls[it.session_id].append(it)
        return calls

    def _struck_by(self, kind: str) -> set[str]:
        return {it.server for it in self.scenario.faults if it.kind == kind}

    # --- telling ---

    def tell(self) -> str:
        """Write it down: what was found, what was asked, and all that happened by its time."""
        events = [(self.began + it.at, f"FAULT    {it}") for it in self.scenario.faults]
        events += [(it.sent_at, f"         {self._line(it)}") for it in self.records]
        for number, stream in self.streams.items():
            events.append((stream.began, f"REQUEST {number}: {self.scenario.wishes[number]}"))
            count = 0
            for at, token_ids in stream.arrivals:
                count += len(token_ids)
                events.append((at, f"TOKENS {number}: {count} of them"))
            if stream.ended is not None:
                events.append((stream.ended, f"END {number}: {stream.failure!r}"))
        for server, silences in self.silences.items():
            for silence in silences:
                events.append((silence[0], f"SILENT   {server}"))
                events += [(at, f"BACK     {server}") for at in silence[1:]]
        lines = [f"{self._since_began(at):>10} {what}" for at, what in sorted(events)]
        return "\n".join([*self.findings(), repr(self.scenario), *lines])

    def _line(self, it: CallRecord) -> str:
        call = getattr(it.request, "call", None)
        what = ""
        if it.method == "OpenSession":
            what = f"for {it.request.spec.request_id} = {_opened(it) or 'none'}"
        elif call is not None:
            length = call.base_length + len(call.token_ids)
            block = len(it.request.proposal.token_ids) if it.method == "Verify" else ""
            what = f"{it.session_id} #{call.sequence} prefix {length} block {block}"
        ended = "..." if it.ended_at is None else self._since_began(it.ended_at)
        return (
            f"{it.server} {it.method} {what or it.session_id} sent {self._since_began(it.sent_at)},"
            f" {it.end} {ended}; there: {it.left or 'nothing'}"
        )

    def _since_began(self, at: float) -> str:
        return f"{at - self.began:.4f}"


def _opened(opening: CallRecord) -> str:
    """Return the session that was opened; empty if the client never heard of one."""
    return opening.messages[0][1].grant.session_id if opening.messages else ""


def _end_of_work(call: CallRecord) -> float:
    """Return when it was withdrawn, or its server had answered: the answer may be on its way."""
    known = [it for it in (call.ended_at, call.left_at) if it is not None]
    return min(known, default=0.0) if call.left == "answered" else call.ended_at or 0.0


def _was_dropped(call: CallRecord) -> bool:
    """Whether its answer may have been unwanted; of a stream that has ended nobody can tell."""
    return call.method != "Verify" or call.withdrawn_at is not None


def _surely_counted(stream: CallRecord) -> int:
    """Count its messages' forwards, but for those that may have come after it was withdrawn."""
    until = (stream.ended_at or 0.0) - COURTESY_SECONDS - INSTANT
    return sum(_forwards(message) for at, message in stream.messages if at < until)


def _forwards(message: Any) -> int:
    return int(message.timing.forward_count)


def _asks_the_same(older: CallRecord, newer: CallRecord) -> bool:
    """Whether one is the other with another depth: their texts end alike."""
    lengths = {
        it.request.call.base_length + len(it.request.call.token_ids) for it in (older, newer)
    }
    return len(lengths) == 1 and older.request.proposal == newer.request.proposal


def _fallback_of(call: CallRecord) -> str | None:
    """Return what a failure counts as."""
    if call.end in _NO_FAILURES:
        return None
    return _FALLBACKS.get(call.end, f"{call.server.partition('-')[0]}_lost")
