"""Runs a decoding method over gRPC: commands become calls, answers and failures become events.

An answer is handled, and the calls that follow from it are made, in the very turn of the event loop
in which it arrived: a rejection restarts both models at once. What is in less of a hurry waits:
counting and delivering until those calls were sent, cancelling what became worthless until they are
likely to have arrived. Every draft and every verification is a task that owns its RPC; withdrawn,
the server hears of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from paceline.errors import (
    DeadlineError,
    InternalError,
    InvalidFieldError,
    MalformedRequestError,
    NoTargetError,
    PacelineError,
    SessionError,
    UnsupportedError,
)
from paceline_orchestrator.discovery import Role
from paceline_orchestrator.ledger import Ledger
from paceline_orchestrator.protocol.messages import (
    AbandonVerify,
    BlockVerified,
    DraftEnded,
    DraftFailed,
    EmitTokens,
    Event,
    Finish,
    PromoteVerify,
    StartDraft,
    StartVerify,
    StopDraft,
    TokensDrafted,
    VerifyFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.v1.sampling_pb2 import SparseDistribution
    from paceline_orchestrator.call import CallUnderWay
    from paceline_orchestrator.crew import Crew
    from paceline_orchestrator.deadline import Deadline
    from paceline_orchestrator.pool import ServerPool
    from paceline_orchestrator.protocol.messages import Command, DecodingMethod, FinishReason
    from paceline_orchestrator.recorder import CallRecord, Recorder
    from paceline_orchestrator.session import Drafted, Judged, Session

__all__ = ["Driver"]

_TARGET_WAIT_SECONDS = 5.0
# A session's lease is 15 s; it is renewed when nothing was asked of it for so long.
_RENEW_SECONDS = 5.0
# Cancels wait so long: a restart reaches its servers before several others are woken to drop work.
_COURTESY_SECONDS = 0.002
# A server whose calls wait longer than this has a queue.
_QUEUEING_NS = 1_000_000
_MAX_CHUNK_TOKENS = 64  # as in DraftRequest.chunk_tokens

_Call: TypeAlias = StartDraft | StartVerify


@dataclass(frozen=True, slots=True)
class _Running:
    """A draft or a verification in flight, and the same one that it replaced, if it did."""

    call: _Call
    session: Session
    sent: CallUnderWay[Any]
    task: asyncio.Task[None]
    record: CallRecord
    replaced: _Running | None = None

    def withdraw(self) -> None:
        """Cancel it; its task first, for that is how the task knows that it was meant."""
        self.task.cancel()
        self.sent.cancel()
        if self.replaced is not None:
            self.replaced.withdraw()


class Driver:
    """Runs one method for one request.

    Args:
        method: What decides.
        crew: Who works; its sessions are closed in the end.
        pool: Says when servers are back.
        recorder: Told of everything.
        deadline: The request's.
        prompt_length: Tokens that are final from the start.
        logprobs: Whether verdicts shall carry them.
        deliver: Takes final tokens, after the commands that came with them are under way; returns
            whether the text ends here.
        conclude: Told once how the method ended, before what still runs is called off.

    Cancellation:
        Cancelling `run` withdraws every call; sessions are closed behind its back.
    """

    def __init__(
        self,
        method: DecodingMethod,
        *,
        crew: Crew,
        pool: ServerPool,
        recorder: Recorder,
        deadline: Deadline,
        prompt_length: int,
        logprobs: bool,
        deliver: Callable[[EmitTokens], bool],
        conclude: Callable[[FinishReason], None],
    ) -> None:
        self._method = method
        self._crew = crew
        self._pool = pool
        self._recorder = recorder
        self._deadline = deadline
        self._ledger = Ledger(prompt_length)
        self._logprobs = logprobs
        self._deliver = deliver
        self._conclude = conclude
        self._tasks = asyncio.TaskGroup()
        self._questions: deque[Callable[[], Sequence[Command]]] = deque()
        self._deciding = False
        self._turned = asyncio.Event()
        self._drafts: dict[int, _Running] = {}
        self._verifies: dict[int, _Running] = {}
        self._stale: list[_Running] = []
        self._dropping: asyncio.TimerHandle | None = None
        self._judged: deque[tuple[Session, Judged]] = deque()
        self._final: deque[EmitTokens] = deque()
        self._timers: list[asyncio.TimerHandle] = []
        self._patience: asyncio.TimerHandle | None = None
        self._finish: Finish | None = None
        self._failure: PacelineError | None = None

    async def run(self) -> None:
        """Run the method to its end, which `conclude` has been told of unless this raises.

        Raises:
            NoTargetError: The targets are gone, and none came back in time.
            DeadlineError: The request's time is over.
            PacelineError: Whatever else could not be survived.
        """
        try:
            async with asyncio.timeout(self._deadline.remaining_seconds), self._tasks:
                with self._pool.listening(self._refill):
                    await self._work()
        except TimeoutError:
            raise DeadlineError("the request's time is over") from None
        finally:
            for timer in self._timers:
                timer.cancel()
            self._crew.close()
        # Raised here, because a task group would wrap it.
        if self._failure is not None:
            raise self._failure

    async def _work(self) -> None:
        """Begin, and count and deliver in each turn what has come, until the end."""
        renewing = self._tasks.create_task(self._renew_sessions(), name="renew sessions")
        try:
            self._decide(self._method.start)
            while self._final or not self._is_over:
                await self._turned.wait()
                self._turned.clear()
                self._count_verdicts()
                self._deliver_final()
            if self._finish is not None:
                self._conclude(self._finish.reason)
                await asyncio.sleep(_COURTESY_SECONDS)
        finally:
            renewing.cancel()
            self._drop_stale()
            for running in (*self._drafts.values(), *self._verifies.values()):
                running.withdraw()

    @property
    def _is_over(self) -> bool:
        return self._finish is not None or self._failure is not None

    def _post(self, event: Event) -> None:
        self._decide(partial(self._method.handle, event))

    def _decide(self, question: Callable[[], Sequence[Command]]) -> None:
        """Ask the method, and carry out its answer: now, or after the one under way."""
        self._questions.append(question)
        if self._deciding:
            return
        self._deciding = True
        while self._questions and not self._is_over:
            self._carry_out(self._questions.popleft())
        self._deciding = False
        self._turned.set()

    def _carry_out(self, question: Callable[[], Sequence[Command]]) -> None:
        """Do what the method commands; nothing here waits.

        New calls are made before stale ones are cancelled and before tokens are delivered: a newer
        call of a session supersedes the older at the server, so a restart need not wait for what it
        replaces.
        """
        try:
            commands = question()
            if commands and isinstance(commands[-1], Finish):
                self._finish = commands[-1]
            for command in commands:
                self._obey(command)
        except PacelineError as error:
            self._failure = error

    def _count_verdicts(self) -> None:
        while self._judged:
            session, judged = self._judged.popleft()
            self._recorder.judged(judged)
            self._pool.report_success(session.server)

    def _deliver_final(self) -> None:
        while self._final:
            emission = self._final.popleft()
            self._recorder.emitted(emission)
            if self._deliver(emission):
                self._final.clear()
                self._decide(self._method.stop)

    def _obey(self, command: Command) -> None:
        match command:
            case EmitTokens():
                self._ledger.settle(command.token_ids)
                self._final.append(command)
            case AbandonVerify(verify_id=call_id):
                self._withdraw(self._verifies.pop(call_id, None))
            case StopDraft(draft_id=call_id):
                self._withdraw(self._drafts.pop(call_id, None))
            case StartVerify():
                self._start(command, self._crew.targets[command.target])
            case StartDraft():
                self._start(command, self._crew.drafters[command.drafter])
            case PromoteVerify():
                self._promote(command)
            case Finish():
                pass

    def _start(self, call: _Call, session: Session | None) -> None:
        if session is None:
            self._post(_failed(call))
        elif isinstance(call, StartVerify):
            self._verifies[call.verify_id] = self._start_verify(call, session)
        else:
            self._drafts[call.draft_id] = self._start_draft(call, session)

    def _start_verify(self, call: StartVerify, session: Session) -> _Running:
        sent = session.verify(
            call.prefix,
            call.block,
            distributions=cast("Sequence[SparseDistribution]", call.distributions),
            depth=call.depth,
            logprobs=self._logprobs,
            final_length=self._ledger.final_length,
        )
        task = self._tasks.create_task(
            self._take_verdict(call, session, sent), name=f"verify {call.verify_id}"
        )
        return _Running(
            call, session, sent, task, self._recorder.verifying(session.server.name, call)
        )

    def _start_draft(self, call: StartDraft, session: Session) -> _Running:
        record = self._recorder.drafting(session.server.name, call)

        def report(drafted: Drafted) -> None:
            if not record.is_running:
                return  # withdrawn a moment before
            self._recorder.drafted(record, drafted)
            self._post(
                TokensDrafted(call.draft_id, drafted.token_ids, distributions=drafted.distributions)
            )

        sent = session.draft(
            call.prefix,
            max_tokens=call.max_tokens,
            chunk_tokens=min(call.chunk_tokens, _MAX_CHUNK_TOKENS),
            final_length=self._ledger.final_length,
            report=report,
        )
        task = self._tasks.create_task(
            self._take_draft(call, session, sent), name=f"draft {call.draft_id}"
        )
        return _Running(call, session, sent, task, record)

    def _withdraw(self, running: _Running | None) -> None:
        if running is not None:
            running.sent.release()
            self._drop_later(running)
            self._end(running)
            self._recorder.cancelled(running.record, by_rejection=self._finish is None)

    def _drop_later(self, running: _Running) -> None:
        self._stale.append(running)
        if self._dropping is None:
            loop = asyncio.get_running_loop()
            self._dropping = loop.call_later(_COURTESY_SECONDS, self._drop_stale)

    def _drop_stale(self) -> None:
        if self._dropping is not None:
            self._dropping.cancel()
            self._dropping = None
        for running in self._stale:
            running.withdraw()
        self._stale.clear()

    def _end(self, running: _Running) -> None:
        if isinstance(running.call, StartVerify):
            self._recorder.verification_ended(running.record)
        else:
            self._recorder.draft_ended(running.record)

    def _promote(self, command: PromoteVerify) -> None:
        """Send a call that still waits in a server's queue again, with its new depth.

        Only where it surely waits: a forward under way is worth more than its place in a queue.
        The server takes its work over, and ends it. A cancel would be there before the new call is.
        """
        running = self._verifies.get(command.verify_id)
        if running is None:
            return
        queue_ns = running.session.server.latency.queue_ns
        waited_ns = time.perf_counter_ns() - running.record.started_ns
        if queue_ns < _QUEUEING_NS or waited_ns > queue_ns / 2:
            return
        self._end(running)
        call = replace(cast("StartVerify", running.call), depth=command.depth)
        again = self._start_verify(call, running.session)
        self._verifies[call.verify_id] = replace(again, replaced=running)

    async def _take_verdict(
        self, call: StartVerify, session: Session, sent: CallUnderWay[Judged]
    ) -> None:
        try:
            judged = await sent
        except PacelineError as error:
            if self._retire(self._verifies, call.verify_id, sent=sent):
                self._take_failure(call, session, error)
            return
        if not self._retire(self._verifies, call.verify_id, sent=sent):
            return
        decided = (*call.block[: judged.accepted_count], judged.next_token)
        self._ledger.note(len(call.prefix), decided)
        self._judged.append((session, judged))
        self._post(
            BlockVerified(
                call.verify_id, judged.accepted_count, judged.next_token, logprobs=judged.logprobs
            )
        )

    async def _take_draft(
        self, call: StartDraft, session: Session, sent: CallUnderWay[None]
    ) -> None:
        try:
            await sent
        except PacelineError as error:
            if self._retire(self._drafts, call.draft_id, sent=sent):
                self._take_failure(call, session, error)
            return
        if self._retire(self._drafts, call.draft_id, sent=sent):
            self._post(DraftEnded(call.draft_id))
            self._pool.report_success(session.server)

    def _retire(self, calls: dict[int, _Running], call_id: int, *, sent: CallUnderWay[Any]) -> bool:
        """Take a call that has ended off the list; False if it was withdrawn a moment before."""
        running = calls.get(call_id)
        if running is None or running.sent is not sent:
            return False
        self._end(calls.pop(call_id))
        if running.replaced is not None:
            self._drop_later(running.replaced)
        return True

    def _take_failure(self, call: _Call, session: Session, error: PacelineError) -> None:
        """Tell the method, and find another server if this one is to blame."""
        if self._deadline.remaining_seconds == 0:
            return  # `run` is about to say so
        is_target = session.server.role is Role.TARGET
        if is_target and isinstance(
            error, InvalidFieldError | MalformedRequestError | UnsupportedError
        ):
            self._fail(InternalError(f"a target refused a call: {error.message}"))
            return
        if isinstance(error, SessionError):
            self._post(_failed(call))
            return
        pause = self._crew.vacate(session, error)
        self._post(self._crew.capacity)
        self._post(_failed(call))
        self._refill()
        if pause is not None:
            self._call_later(pause, self._refill)
        if not self._crew.capacity.targets and self._patience is None:
            self._patience = self._call_later(_TARGET_WAIT_SECONDS, self._give_up)

    def _refill(self) -> None:
        """Seat servers that are ready, if seats are empty."""
        if not self._crew.fill():
            return
        if self._patience is not None and self._crew.capacity.targets:
            self._patience.cancel()
            self._patience = None
        self._post(self._crew.capacity)

    def _give_up(self) -> None:
        self._fail(NoTargetError("no target is left for this request", retry_after_seconds=1.0))

    def _fail(self, failure: PacelineError) -> None:
        self._failure = self._failure or failure
        self._turned.set()

    async def _renew_sessions(self) -> None:
        """Keep the sessions that a long request does not use for a while."""
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            for session in self._crew.sessions:
                await session.renew(idle_seconds=_RENEW_SECONDS)

    def _call_later(self, seconds: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        timer = asyncio.get_running_loop().call_later(seconds, action)
        self._timers.append(timer)
        return timer


def _failed(call: _Call) -> Event:
    if isinstance(call, StartVerify):
        return VerifyFailed(call.verify_id)
    return DraftFailed(call.draft_id)
