"""Runs a decoding method over gRPC: commands become calls, answers and failures become events.

One loop takes events from one inbox and executes the method's commands in the same turn, without
waiting in between: a rejection cancels what it made worthless and restarts both models at once.
Every draft and every verification is a task that owns its RPC: cancelling the task cancels the RPC,
and the server hears of it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, cast

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
    from paceline_orchestrator.crew import Crew
    from paceline_orchestrator.deadline import Deadline
    from paceline_orchestrator.pool import ServerPool
    from paceline_orchestrator.protocol.messages import Command, DecodingMethod, FinishReason
    from paceline_orchestrator.recorder import CallRecord, Recorder
    from paceline_orchestrator.session import Drafted, Session

__all__ = ["Driver"]

_TARGET_WAIT_SECONDS = 5.0
# A session's lease is 15 s; it is renewed when nothing was asked of it for so long.
_RENEW_SECONDS = 5.0
# A server whose calls wait longer than this has a queue.
_QUEUEING_NS = 1_000_000

_Call: TypeAlias = StartDraft | StartVerify
_Order: TypeAlias = _Call | StopDraft | AbandonVerify | PromoteVerify


@dataclass(frozen=True, slots=True)
class _Running:
    """A draft or a verification in flight."""

    call: _Call
    session: Session
    task: asyncio.Task[None]
    record: CallRecord


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
    ) -> None:
        self._method = method
        self._crew = crew
        self._pool = pool
        self._recorder = recorder
        self._deadline = deadline
        self._ledger = Ledger(prompt_length)
        self._logprobs = logprobs
        self._deliver = deliver
        self._inbox: asyncio.Queue[Event | PacelineError] = asyncio.Queue()
        self._tasks = asyncio.TaskGroup()
        self._drafts: dict[int, _Running] = {}
        self._verifies: dict[int, _Running] = {}
        self._stale: list[asyncio.Task[None]] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._patience: asyncio.TimerHandle | None = None
        self._finish: Finish | None = None

    async def run(self) -> FinishReason:
        """Run the method to its end.

        Raises:
            NoTargetError: The targets are gone, and none came back in time.
            DeadlineError: The request's time is over.
            PacelineError: Whatever else could not be survived.
        """
        try:
            async with asyncio.timeout(self._deadline.remaining_seconds), self._tasks:
                with self._pool.listening(self._refill):
                    failure = await self._process()
        except TimeoutError:
            raise DeadlineError("the request's time is over") from None
        finally:
            for timer in self._timers:
                timer.cancel()
            self._crew.close()
        if failure is not None:
            raise failure
        assert self._finish is not None
        return self._finish.reason

    async def _process(self) -> PacelineError | None:
        """Take events until the method finishes; return what ended it early, if something did.

        Returned and not raised, because a task group would wrap it.
        """
        renewing = self._tasks.create_task(self._renew_sessions(), name="renew sessions")
        try:
            self._execute(self._method.start())
            while self._finish is None:
                event = await self._inbox.get()
                if isinstance(event, PacelineError):
                    return event
                self._execute(self._method.handle(event))
        except PacelineError as error:
            return error
        finally:
            renewing.cancel()
            for running in (*self._drafts.values(), *self._verifies.values()):
                running.task.cancel()
        return None

    def _execute(self, commands: Sequence[Command]) -> None:
        """Carry out commands; nothing here waits.

        Calls are cancelled after the new ones were started: a newer call of a session supersedes
        the older at the server, so a restart need not wait for what it replaces.
        """
        if commands and isinstance(commands[-1], Finish):
            self._finish = commands[-1]
        final: list[EmitTokens] = []
        for command in commands:
            match command:
                case EmitTokens():
                    self._ledger.settle(command.token_ids)
                    final.append(command)
                case Finish():
                    pass
                case _:
                    self._order(command)
        for task in self._stale:
            task.cancel()
        self._stale.clear()
        for emission in final:
            self._recorder.emitted(emission)
            if self._deliver(emission):
                self._execute(self._method.stop())
                break

    def _order(self, command: _Order) -> None:
        match command:
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

    def _start(self, call: _Call, session: Session | None) -> None:
        if session is None:
            self._post(_failed(call))
            return
        if isinstance(call, StartVerify):
            record = self._recorder.verifying(session.server.name, call)
            task = self._tasks.create_task(
                self._verify(call, session), name=f"verify {call.verify_id}"
            )
            self._verifies[call.verify_id] = _Running(call, session, task, record)
        else:
            record = self._recorder.drafting(session.server.name, call)
            task = self._tasks.create_task(
                self._draft(call, session, record), name=f"draft {call.draft_id}"
            )
            self._drafts[call.draft_id] = _Running(call, session, task, record)

    def _withdraw(self, running: _Running | None) -> None:
        if running is not None:
            self._stale.append(running.task)
            self._end(running)
            self._recorder.cancelled(running.record, by_rejection=self._finish is None)

    def _end(self, running: _Running) -> None:
        if isinstance(running.call, StartVerify):
            self._recorder.verification_ended(running.record)
        else:
            self._recorder.draft_ended(running.record)

    def _promote(self, command: PromoteVerify) -> None:
        """Send a call that still waits in a server's queue again, with its new depth.

        Only where it surely waits: a forward under way is worth more than its place in a queue.
        """
        running = self._verifies.get(command.verify_id)
        if running is None:
            return
        queue_ns = running.session.server.latency.queue_ns
        waited_ns = time.perf_counter_ns() - running.record.started_ns
        if queue_ns < _QUEUEING_NS or waited_ns > queue_ns / 2:
            return
        self._withdraw(self._verifies.pop(command.verify_id))
        call = cast("StartVerify", running.call)
        self._start(replace(call, depth=command.depth), running.session)

    async def _verify(self, call: StartVerify, session: Session) -> None:
        try:
            judged = await session.verify(
                call.prefix,
                call.block,
                distributions=cast("Sequence[SparseDistribution]", call.distributions),
                depth=call.depth,
                logprobs=self._logprobs,
                final_length=self._ledger.final_length,
            )
        except PacelineError as error:
            self._end(self._verifies.pop(call.verify_id))
            self._take_failure(call, session, error)
            return
        self._end(self._verifies.pop(call.verify_id))
        self._recorder.judged(judged)
        self._pool.report_success(session.server)
        decided = (*call.block[: judged.accepted_count], judged.next_token)
        self._ledger.note(len(call.prefix), decided)
        self._post(
            BlockVerified(
                call.verify_id, judged.accepted_count, judged.next_token, logprobs=judged.logprobs
            )
        )

    async def _draft(self, call: StartDraft, session: Session, record: CallRecord) -> None:
        def report(drafted: Drafted) -> None:
            self._recorder.drafted(record, drafted)
            self._post(
                TokensDrafted(call.draft_id, drafted.token_ids, distributions=drafted.distributions)
            )

        try:
            await session.draft(
                call.prefix,
                max_tokens=call.max_tokens,
                final_length=self._ledger.final_length,
                report=report,
            )
        except PacelineError as error:
            self._end(self._drafts.pop(call.draft_id))
            self._take_failure(call, session, error)
            return
        self._end(self._drafts.pop(call.draft_id))
        self._pool.report_success(session.server)
        self._post(DraftEnded(call.draft_id))

    def _take_failure(self, call: _Call, session: Session, error: PacelineError) -> None:
        """Tell the method, and find another server if this one is to blame."""
        if self._deadline.remaining_seconds == 0:
            return  # `run` is about to say so
        is_target = session.server.role is Role.TARGET
        if is_target and isinstance(
            error, InvalidFieldError | MalformedRequestError | UnsupportedError
        ):
            self._inbox.put_nowait(InternalError(f"a target refused a call: {error.message}"))
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
        self._inbox.put_nowait(
            NoTargetError("no target is left for this request", retry_after_seconds=1.0)
        )

    async def _renew_sessions(self) -> None:
        """Keep the sessions that a long request does not use for a while."""
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            for session in self._crew.sessions:
                await session.renew(idle_seconds=_RENEW_SECONDS)

    def _post(self, event: Event) -> None:
        self._inbox.put_nowait(event)

    def _call_later(self, seconds: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        timer = asyncio.get_running_loop().call_later(seconds, action)
        self._timers.append(timer)
        return timer


def _failed(call: _Call) -> Event:
    if isinstance(call, StartVerify):
        return VerifyFailed(call.verify_id)
    return DraftFailed(call.draft_id)
