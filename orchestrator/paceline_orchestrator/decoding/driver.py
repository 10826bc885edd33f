"""Runs a decoding method over gRPC: commands become calls, answers and failures become events.

Theory of operation
-------------------

The method is a state machine without I/O, which names servers by the indices of their slots. One
turn of the event loop leads from an answer to the calls that follow from it:

    an answer or a failure            RequestServers
    (the call's own task)             (sessions open, servers come and go)
            | _take_answer, _take_failure     | CapacityChanged
            +---------------+-----------------+
                            v
    _post(event) -> _questions -> _decide: method.handle(event)
                                            | commands, in the method's order
                                            v  _obey
               Start...    the RPC is sent          (CallsInFlight.start)
               Stop...     the call is withdrawn    (CallsInFlight.withdraw)
               EmitTokens  DecidedTokens checks them, which then wait in _final
               Finish      the method is asked nothing more
                            | _turned
    - - - - - - - - - - - - v - - the turn ends; the servers have the new calls - - - - - - - -
    _work: verdicts are counted, _final is delivered, servers without work are released
    COURTESY_SECONDS after a Stop: the RPC of the withdrawn call is cancelled

What runs when

- Nothing may await between an answer and the calls that follow from it: a rejection restarts both
  models at once. Work in less of a hurry goes to `_work`; a cancel goes behind the courtesy.
- The method is never entered twice. An event that comes while the method decides waits in
  `_questions`, also one that its own commands cause, such as a call to an empty slot. The text
  drafter's answers go to the front of `_questions`: no other event comes before them.
- A prompt is scored before the first method exists (`PromptScoring`). Servers that come and
  go meanwhile are looked at between two blocks, and the method begins with the remaining ones.
- `reconsider` is called inside the method, once tokens are final; `change` and `lengthen` may be
  called there. A new method begins with those tokens. The servers that it needs in addition are
  looked for at once. `_release_servers` lets the others go in `_work`, when the calls of the method
  before are withdrawn.

Who owns what

- The driver owns the methods, the decided tokens, the calls under way, and their task group.
- `RequestServers` owns slots, sessions, timers and the text drafter. It exists before the driver,
  and the driver listens to it. `lose` and `widen` may post a `CapacityChanged` before they return:
  so the method hears that a server is gone before it hears that the server's call failed.
- `SessionOpener` opens and closes sessions in tasks of its own, which may outlive the request.

What may be cancelled where

- Only `CallsInFlight` cancels a call, its task before its RPC. It drops the answer to a call that
  was withdrawn.
- The client or the deadline may cancel `run` anywhere. From then on `_is_over` holds and nothing
  begins: all calls are withdrawn, the method counts what it leaves, and sessions are closed by
  their opener. `run` waits for the tasks of its own group only.
- A failure cancels nothing by itself. `_fail` keeps the first one and wakes `_work`, which delivers
  the final tokens and ends; `run` raises the failure after the task group, which would wrap it.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from paceline.errors import (
    DeadlineError,
    PacelineError,
    SessionError,
)
from paceline_orchestrator.decoding.calls_in_flight import COURTESY_SECONDS, CallsInFlight
from paceline_orchestrator.decoding.decided_tokens import DecidedTokens, LikeliestByPosition
from paceline_orchestrator.decoding.statistics import TextStatistics
from paceline_orchestrator.decoding.text_drafter import TEXT_DRAFTER
from paceline_protocol.draft_statistics import DraftStatistics
from paceline_protocol.messages import (
    AbandonVerify,
    BlockVerified,
    DraftEnded,
    EmitTokens,
    Event,
    Finish,
    LookaheadChanged,
    PromoteVerify,
    StartDecode,
    StartDraft,
    StartVerify,
    StopDecode,
    StopDraft,
    TokensDecoded,
    TokensDrafted,
    failure_of,
)
from paceline_protocol.succession import SuccessiveDecoding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_contract.calls import LikeliestTokens
    from paceline_orchestrator.decoding.deadline import Deadline
    from paceline_orchestrator.decoding.prompt_scoring import PromptScoring
    from paceline_orchestrator.decoding.recorder import Recorder
    from paceline_orchestrator.decoding.request_servers import RequestServers
    from paceline_orchestrator.decoding.session import RemoteSession
    from paceline_orchestrator.decoding.slots import ServerNeeds
    from paceline_orchestrator.decoding.text_drafter import TextDrafter
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_protocol.messages import CapacityChanged, Command, FinishReason, StartCall
    from paceline_protocol.methods import DecodingMethod
    from paceline_protocol.succession import Successor


class Driver:
    """Runs a request's method, and the methods that it changes to.

    Args:
        create_method: Makes the first method, for the slots that can be given work at the start.
        servers: The request's servers, and its text as a drafter. The driver closes them.
        pool: Told which servers are well.
        recorder: Told of everything.
        prompt_length: Tokens that are final from the start.
        logprobs: Whether verdicts shall carry log probabilities.
        top_logprobs: How many of the likeliest tokens verdicts shall tell at each position.
        deliver: Takes final tokens, and the likeliest tokens at their positions if these are
            wanted. Called once the calls that follow from the tokens are sent. Returns whether the
            text ends here.
        conclude: Told once how the method ended, before the remaining calls are cancelled.
        scoring: Scores the prompt before anything is decoded; None if that is not wanted.
        reconsider: Called when tokens have become final and the text goes on, before the calls that
            follow from them are made: the time for `change` and `lengthen`.

    Cancellation:
        Cancelling `run` withdraws every call. Sessions are closed by their opener, later.
    """

    def __init__(
        self,
        create_method: Callable[[CapacityChanged], DecodingMethod],
        *,
        servers: RequestServers,
        pool: ServerPool,
        recorder: Recorder,
        deadline: Deadline,
        prompt_length: int,
        logprobs: bool,
        top_logprobs: int,
        deliver: Callable[[EmitTokens, tuple[LikeliestTokens, ...]], bool],
        conclude: Callable[[FinishReason], None],
        scoring: PromptScoring | None = None,
        reconsider: Callable[[], None] = lambda: None,
    ) -> None:
        self._create_method = self._create_first = create_method
        self._method: SuccessiveDecoding | None = None
        self._servers = servers
        self._text = servers.text
        self._recorder = recorder
        self._deadline = deadline
        self._decided = DecidedTokens(prompt_length)
        self._likeliest = LikeliestByPosition(prompt_length) if top_logprobs else None
        self._deliver = deliver
        self._conclude = conclude
        self._scoring = scoring
        self._reconsider = reconsider
        self._needs: ServerNeeds | None = None  # of a new method, until `_release_servers`
        self._outgrown: list[RemoteSession] = []  # until `_let_outgrown_go`
        self._tasks = asyncio.TaskGroup()
        self._calls = CallsInFlight(
            self._tasks,
            recorder=recorder,
            pool=pool,
            decided=self._decided,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            likeliest=self._likeliest,
            answered=self._take_answer,
            failed=self._take_failure,
        )
        self._questions: deque[Callable[[], Sequence[Command]]] = deque()
        self._deciding = False
        self._turned = asyncio.Event()
        self._final: deque[tuple[EmitTokens, tuple[LikeliestTokens, ...]]] = deque()
        self._finish: Finish | None = None
        self._failure: Exception | None = None
        self._is_closing = False
        servers.when_changed(self._post)
        servers.when_given_up(self._fail)

    async def run(self) -> None:
        """Run the method to its end, which `conclude` has been told of unless this raises.

        Raises:
            NoTargetError: The targets are gone, and none came back in time.
            OverloadedError: None has had room for a session for as long.
            DeadlineError: The request's time is over.
            PacelineError: Whatever else could not be survived.
        """
        try:
            async with asyncio.timeout(self._deadline.remaining_seconds), self._tasks:
                try:
                    with self._servers.at_work(self._tasks):
                        await self._work()
                finally:
                    # What is found out now begins nothing new here.
                    self._is_closing = True
                    self._calls.close()
                    self._wind_up()
        except TimeoutError:
            raise DeadlineError("the request's time is over") from None
        finally:
            self._servers.close()
        # Raised here, because a task group would wrap it.
        if self._failure is not None:
            raise self._failure

    @property
    def statistics(self) -> DraftStatistics:
        """What became of the draft tokens."""
        return self._method.statistics if self._method is not None else DraftStatistics()

    @property
    def text_statistics(self) -> TextStatistics:
        """What became of the tokens that the text itself drafted."""
        return self._text.statistics if self._text is not None else TextStatistics()

    def change(self, successor: Successor, needs: ServerNeeds) -> bool:
        """Go on with another method, from the next final tokens on, and with other servers.

        Additional servers are sought at once; superfluous ones leave when the method changes.

        Returns:
            Whether there is still something to decode.
        """
        if self._is_over or not self._servers.assigned.slot_count:
            return False

        def begin(emitted: tuple[int, ...], capacity: CapacityChanged) -> DecodingMethod:
            self._needs = needs
            return successor(emitted, capacity)

        if self._method is None:
            self._create_first = partial(begin, ())
        else:
            self._method.become(begin, drafts=needs.drafts)
        self._servers.widen(needs)
        return True

    def stay(self, needs: ServerNeeds) -> bool:
        """Take a change back that has not happened yet.

        Args:
            needs: Servers that the method that goes on has work for: others are released.

        Returns:
            Whether there is still something to decode.
        """
        if self._is_over or not self._servers.assigned.slot_count:
            return False
        if self._method is None:
            self._create_first = self._create_method
        else:
            self._method.stay()
        self._needs = needs
        self._turned.set()
        return True

    def lengthen(self, lookahead: int) -> None:
        """Have SI's blocks be longer from here on; what is drafted stays."""
        self._post(LookaheadChanged(lookahead))

    async def _work(self) -> None:
        """Begin, and count and deliver in each turn what has come, until the end."""
        capacity = await self._servers.until_ready()
        if self._scoring is not None:
            await self._scoring.run(
                self._servers,
                changed=self._turned,
                is_over=lambda: self._failure is not None,
                judged=self._calls.count_verdict,
            )
            capacity = await self._servers.until_ready()
        if self._failure is None:
            self._method = SuccessiveDecoding(
                self._create_first(capacity), capacity, reconsider=self._reconsider
            )
            self._decide(self._method.start)
        while self._final or not self._is_over:
            await self._turned.wait()
            self._turned.clear()
            self._calls.count_verdicts()
            self._deliver_final()
            self._let_outgrown_go()
            self._release_servers()
        if self._finish is not None:
            self._conclude(self._finish.reason)
            await asyncio.sleep(COURTESY_SECONDS)

    def _wind_up(self) -> None:
        """Have a method that did not come to its end count what it leaves: its calls are over."""
        if self._method is None or self._finish is not None:
            return
        try:
            self._method.stop()
        except Exception as error:  # noqa: BLE001 - whatever it was that failed before, comes first
            self._fail(error)

    def _release_servers(self) -> None:
        """Release servers that a new method has no work for; their calls are withdrawn by now."""
        needs, self._needs = self._needs, None
        if needs is not None and not self._is_over:
            self._servers.resize(needs)

    def _let_outgrown_go(self) -> None:
        """Release drafters that the text is too long for by now."""
        outgrown, self._outgrown = self._outgrown, []
        if not self._is_over:
            self._servers.outgrow(outgrown)

    @property
    def _is_over(self) -> bool:
        return self._is_closing or self._finish is not None or self._failure is not None

    def _take_answer(self, event: Event) -> None:
        if isinstance(event, BlockVerified | TokensDecoded):
            self._servers.note_verdict()
        self._post(event)

    def _post(self, event: Event) -> None:
        if self._method is not None:
            self._decide(partial(self._method.handle, event))
        else:
            self._turned.set()  # the prompt's scoring may wait for a target

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
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self._fail(error)

    def _deliver_final(self) -> None:
        while self._final:
            emission, likeliest = self._final.popleft()
            self._recorder.emitted(emission)
            if self._deliver(emission, likeliest) and self._method is not None:
                self._final.clear()
                self._decide(self._method.stop)

    def _obey(self, command: Command) -> None:
        match command:
            case EmitTokens():
                self._decided.finalize(command.token_ids)
                self._servers.note_final(self._decided.final_length)
                if self._text is not None:
                    self._text.finalize(command.token_ids)
                kept = self._likeliest
                likeliest = kept.finalize(command.token_ids) if kept is not None else ()
                self._final.append((command, likeliest))
            case AbandonVerify() | StopDraft():
                by_rejection = command.by_rejection and self._finish is None
                self._calls.withdraw(command, by_rejection=by_rejection)
            case StopDecode():
                self._calls.withdraw(command, by_rejection=False)
            case StartVerify() | StartDecode():
                self._start(command, self._servers.assigned.target(command.target))
            case StartDraft():
                self._start_draft(command)
            case PromoteVerify():
                self._calls.promote(command)
            case Finish():
                # Whatever a failed call was about: the text got to its end without it.
                self._servers.assigned.note_final(sys.maxsize)

    def _start(self, call: StartCall, session: RemoteSession | None) -> None:
        if session is None:
            self._post(failure_of(call))
        else:
            self._calls.start(call, session)

    def _start_draft(self, draft: StartDraft) -> None:
        if self._text is not None and self._text.is_at(draft.drafter):
            self._draft_from(self._text, draft)
            return
        session = self._servers.assigned.drafter(draft.drafter)
        room = draft.max_tokens if session is None else session.limit_length - len(draft.prefix)
        if room > 0:
            self._start(replace(draft, max_tokens=min(room, draft.max_tokens)), session)
            return
        # The drafter's context is full. If drafted tokens fill it, they may be rejected, and the
        # drafter goes on; if final tokens fill it, the drafter is released.
        if session is not None and self._decided.final_length >= session.limit_length:
            self._outgrown.append(session)
        self._answer_at_once([DraftEnded(draft.draft_id)])

    def _draft_from(self, text: TextDrafter, draft: StartDraft) -> None:
        """Answer a draft at once, before what else was asked meanwhile."""
        found = text.propose(draft)
        events: list[Event] = []
        if found:
            self._recorder.drafted_at_once(TEXT_DRAFTER, draft, found.token_ids)
            events.append(TokensDrafted(draft.draft_id, found))
        if len(found) < draft.max_tokens:
            events.append(DraftEnded(draft.draft_id))
        self._answer_at_once(events)

    def _answer_at_once(self, events: Sequence[Event]) -> None:
        """Tell the method before anything else that happens."""
        if self._method is not None:
            handle = self._method.handle
            self._questions.extendleft(partial(handle, event) for event in reversed(events))

    def _take_failure(self, call: StartCall, session: RemoteSession, error: PacelineError) -> None:
        """Tell the method, and find another server if this one is to blame."""
        if self._deadline.remaining_seconds == 0:
            return  # `run` is about to say so
        if not isinstance(error, SessionError):
            self._servers.lose(session, error, reach=self._reach(call))
        self._post(failure_of(call))

    def _reach(self, call: StartCall) -> int:
        """Return how long the text is with all tokens that a failed call was about."""
        match call:
            case StartVerify():
                return len(call.prefix) + len(call.proposal)
            case StartDraft():
                return len(call.prefix) + call.max_tokens
            case StartDecode():
                return self._decided.final_length  # a message brings the tokens after these

    def _fail(self, failure: Exception) -> None:
        self._failure = self._failure or failure
        self._servers.stop_waiting()
        self._turned.set()
