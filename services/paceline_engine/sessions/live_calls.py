"""The calls that are queued or running, at most one for each session.

A call is admitted when it passes its session's fence. It then replaces the session's older call, or
takes over the older call's work if both ask the same. It is live until its caller leaves.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.errors import PacelineError, SessionError, SupersededError
from paceline_engine.scheduling.jobs import Outlet
from paceline_engine.sessions.session import LiveCall
from paceline_engine.terms.items import Item

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline_contract.calls import PrefixCall
    from paceline_engine.scheduling.accounting import HostStatistics
    from paceline_engine.scheduling.jobs import Job
    from paceline_engine.scheduling.worker import ModelWorker
    from paceline_engine.sessions.session import Session
    from paceline_engine.sessions.session_table import SessionTable
    from paceline_engine.terms.items import Decode, Draft, Judge, Outcome


class LiveCalls:
    """Admits calls to the worker's queue, and ends them. Used on the event loop only.

    Invariants:
        Only a session's newest call is answered; older calls end with SupersededError.
        Each admitted call, and the end of each answered one, renews the session's lease.
    """

    def __init__(
        self,
        worker: ModelWorker,
        *,
        counts: HostStatistics,
        sessions: SessionTable,
    ) -> None:
        """Build it for calls of these sessions."""
        self._worker = worker
        self._counts = counts
        self._sessions = sessions
        self._all_left = asyncio.Event()
        self._all_left.set()

    def admit(
        self,
        session: Session,
        call: PrefixCall,
        task: Judge | Decode | Draft,
        *,
        depth: int = 0,
        patience_ns: int | None = None,
        goes_on: bool = False,
    ) -> LiveCall:
        """Make a call its session's live one.

        The session keeps the call's base, and nothing else.

        Raises:
            SessionError: as `Session.fence` and `Session.rebase` say.
            OverloadedError: the queue is full.
            DrainingError: nothing can run any more.
        """
        is_first = session.is_new
        session.fence(call.sequence)
        older, session.live_call = session.live_call, None
        ahead, session.ahead = session.ahead, None
        # Here, because a call that fails below renews the lease nowhere else.
        self._sessions.renew(session)
        try:
            prefix = session.rebase(call)
        except SessionError:
            self._supersede(older)
            self._drop(ahead)
            raise
        if is_first:
            self._sessions.begin(session, prefix)
        item = Item(
            session.cache,
            session.spec,
            prefix=prefix,
            task=task,
            depth=depth,
            patience_ns=patience_ns,
        )
        item.goes_on = goes_on
        session.live_call = self._begin(item, sequence=call.sequence, older=older, ahead=ahead)
        return session.live_call

    def _begin(
        self, item: Item, *, sequence: int, older: LiveCall | None, ahead: Job | None
    ) -> LiveCall:
        """Take over a job that asks the same, or put the item into the queue."""
        if older is not None and older.will_answer(item):
            return self._take_over(older, sequence=sequence, item=item)
        if ahead is not None and _is_begun(ahead, item):
            self._worker.ask_for(ahead, item)
            self._counts.calls_anticipated += 1
            return LiveCall(
                prefix_length=len(item.prefix),
                outlet=ahead.outlet,
                item=item,
                job=ahead,
                began_early=True,
            )
        self._supersede(older)
        self._drop(ahead)
        outlet: Outlet[Outcome] = Outlet()
        job = self._worker.submit(item, outlet=outlet)
        return LiveCall(prefix_length=len(item.prefix), outlet=outlet, item=item, job=job)

    def answered(self, session: Session, live: LiveCall) -> None:
        """Keep the job that the model goes on with, for the session's next call."""
        if session.live_call is live:
            session.ahead, live.job.successor = live.job.successor, None

    @contextmanager
    def until_left(self, session: Session, live: LiveCall) -> Iterator[None]:
        """Count a call while its caller waits, and drop its work when the caller leaves."""
        self._counts.calls_live += 1
        self._all_left.clear()
        try:
            yield
        except SupersededError:
            self._counts.calls_superseded += 1
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._counts.calls_cancelled += 1
            raise
        finally:
            if session.live_call is live:
                session.live_call = None
                self._worker.withdraw(live.job)
                self._sessions.renew(session)
            self._counts.calls_live -= 1
            if not self._counts.calls_live:
                self._all_left.set()

    async def all_left(self) -> None:
        """Wait until no caller waits for a call."""
        await self._all_left.wait()

    def end(self, live: LiveCall | None, error: PacelineError) -> None:
        """End a session's live call, if there is one."""
        if live is not None:
            live.outlet.end(error)
            self._worker.withdraw(live.job)

    def leave(self, session: Session, error: PacelineError) -> None:
        """End a session's live call, and drop its anticipated work."""
        ahead, session.ahead = session.ahead, None
        self._drop(ahead)
        self.end(session.live_call, error)

    def _drop(self, ahead: Job | None) -> None:
        if ahead is not None:
            self._worker.withdraw(ahead)

    def _supersede(self, older: LiveCall | None) -> None:
        self.end(older, SupersededError("a newer call replaced this one"))

    def _take_over(self, older: LiveCall, *, sequence: int, item: Item) -> LiveCall:
        older.outlet.end(
            SupersededError(
                "the same call with a higher sequence replaced this one",
                metadata={"taken_over_by": str(sequence)},
            )
        )
        outlet: Outlet[Outcome] = Outlet()
        older.job.outlet = outlet
        self._worker.ask_for(older.job, item)
        self._counts.calls_adopted += 1
        return replace(older, outlet=outlet)


def _is_begun(ahead: Job, item: Item) -> bool:
    """Whether the model has gone on with this item by itself, and has not failed."""
    assert isinstance(ahead.work, Item)
    return ahead.work.asks_the_same(item) and not ahead.outlet.failed
