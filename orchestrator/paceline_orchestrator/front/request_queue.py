"""Requests beyond what an orchestrator works on at once: they wait here, each client in its turn.

Theory of operation.

A request that is worked on has a *place*. Places are shared by dynamic thresholds (FairShares): a
client alone gets four fifths of them, and the next client finds a place free. A request without a
place waits, and costs its message and this file's record of it: no session, no tokens, no plan.

    client A    a1 (lane x)  a2 (lane x)          ─┐
                a3 (lane y)                        ├─►  places, request_limit of them
    client B    b1                                ─┘

Whenever a place becomes free, it goes to the client that holds the fewest places, among those
whose share allows one more; of equals, to the one that was served longest ago. Within a client the
*lanes* take turns, and within a lane requests keep their order. A lane is what a proxy tells apart
among its own clients: it divides the proxy's share, and is never worth a second share.

The queue is bounded in three ways: requests, bytes of their messages (both shared by dynamic
thresholds, too), and seconds.

Places are also given no faster than the event loop can bear, for a reason that is hard to see:
gRPC accepts one call in some four turns of the loop. If the first hundred of a thousand requests
began at once, each turn would take long, the other nine hundred would be accepted over half a
minute, and the next client would be behind them, in a queue of gRPC's that is not fair. So places
are given when no request has arrived for a few turns, few at a time beyond the first ones, and none
while the loop is late, except to a client that holds none. A client that holds none and comes by
itself does not wait for that: five turns of a busy loop are a good part of its time to a first
token, and arrivals of others could hold it back for seconds. It comes by itself if none like it has
come in the eight turns before; a flood from many addresses comes every four turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.errors import DeadlineError, DrainingError, OverloadedError
from paceline_contract.shares import FairShares
from paceline_orchestrator.fleet import shortage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline_orchestrator.decoding.deadline import Deadline
    from paceline_orchestrator.decoding.metrics import RequestMetrics
    from paceline_orchestrator.settings import RequestSettings

# Without an arrival for so long, nobody waits in gRPC's own queue: it takes four turns for a call.
_QUIET_SECONDS, _QUIET_TURNS = 0.0005, 5
# In a flood, where a client or this process may be short of processor time.
_FLOOD, _QUIET_FLOOD_SECONDS = 32, 0.02
# Arrivals hold places back for so long at most.
_LONGEST_HOLD_SECONDS = 3.0
# So many requests are begun however late the loop is; then a few at a time, while it is not.
_BEGUN_AT_ONCE, _BEGUN_TOGETHER = 32, 8
_BEAT_SECONDS = 0.02
_LATE_SECONDS = 0.03
# Clients without a place that come within so many turns of each other may be a flood: as many as
# gRPC takes for two calls. Turns and not seconds, since the longer each of them is, the later gRPC
# accepts the next call of a flood, and the less the loop bears another request at once.
_NEWCOMER_TURNS = 8


class _Ticket:
    """A request that waits."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Line:
    """A client's requests that wait, in lanes that take turns."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, OrderedDict[_Ticket, None]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def add(self, ticket: _Ticket) -> None:
        self._lanes.setdefault(ticket.lane, OrderedDict())[ticket] = None

    def pop(self) -> _Ticket:
        """Take the first one of the lane whose turn it is; that lane is last from now on."""
        name, lane = self._lanes.popitem(last=False)
        ticket, _ = lane.popitem(last=False)
        if lane:
            self._lanes[name] = lane
        return ticket

    def remove(self, ticket: _Ticket) -> None:
        """Take one out, if it is there."""
        lane = self._lanes.get(ticket.lane, OrderedDict())
        lane.pop(ticket, None)
        if not lane:
            self._lanes.pop(ticket.lane, None)

    def tickets(self) -> list[_Ticket]:
        return [ticket for lane in self._lanes.values() for ticket in lane]


class RequestQueue:
    """Gives places to requests, at once or in their turn.

    Args:
        settings: Its limits.
        metrics: Told how many wait, and how long they have waited.

    Attributes:
        running_count: Requests that have a place.
        waiting_count: Requests that wait for one.
    """

    def __init__(self, settings: RequestSettings, *, metrics: RequestMetrics) -> None:
        self._places = FairShares(settings.request_limit)
        self._waiting = FairShares(settings.queue_limit)
        self._bytes = FairShares(settings.queue_limit_bytes)
        self._most_seconds = settings.queue_seconds
        self._metrics = metrics
        self._lines: dict[str, _Line] = {}
        self._arrival_count = 0
        self._looks = False  # whether `_look` or `_beat` comes
        self._held_since = 0.0
        self._is_late = False
        self._sends_away = ""  # why no request is begun any more
        self._newcomer_turns = 0  # for so many turns the next one has not come by itself
        self._served = 0
        self._served_at: Counter[str] = Counter()  # of clients that are here: which one was last
        self.running_count = 0
        self.waiting_count = 0

    def send_away(self, reason: str) -> None:
        """Tell the requests that wait, and those to come, why they have to go elsewhere."""
        self._sends_away = reason
        for line in tuple(self._lines.values()):
            for ticket in line.tickets():
                if not ticket.turn.done():
                    ticket.turn.set_exception(DrainingError(reason))

    async def enter(self, share: str, *, lane: str = "", size: int, deadline: Deadline) -> float:
        """Take a place, in its turn; `leave` gives it back.

        Args:
            share: Whose the request is.
            lane: What that client tells apart among its own requests.
            size: Bytes of its message.
            deadline: When the request must be over.

        Returns:
            The seconds that it has waited.

        Raises:
            OverloadedError: The queue is full, or it waited for too long; says when to come back.
            DeadlineError: Its time was over before its turn.
            DrainingError: It was sent away.

        Cancellation:
            It waits no longer, and holds nothing.
        """
        if self._sends_away:
            raise DrainingError(self._sends_away)
        waited_seconds = 0.0
        if self._begins_at_once(share, size):
            self._take(share)
        else:
            began = time.monotonic()
            with self.counted(share, size):
                await self._turn(share, _Ticket(lane), deadline=deadline)
            waited_seconds = time.monotonic() - began
        self._metrics.waited(waited_seconds)
        return waited_seconds

    def leave(self, share: str) -> None:
        """Give a place back; the next request takes it."""
        self.running_count -= 1
        self._places.give_back(share)
        if self._looks:
            self._replace()
        else:
            self._serve()
        self._forget(share)

    def _begins_at_once(self, share: str, size: int) -> bool:
        """Whether a request need not wait at all: beside no other, or as a newcomer's."""
        if share in self._lines or not self._places.allows(share):
            return False
        if not self._places.held_by(share) and self._note_newcomer():
            return True
        return not (self.running_count and self._has_room(share, size))

    def _note_newcomer(self) -> bool:
        """Note that a client without a place has come; tell whether it has come by itself."""
        is_alone = not self._newcomer_turns
        self._newcomer_turns = _NEWCOMER_TURNS
        if is_alone:
            asyncio.get_running_loop().call_soon(self._count_turn)
        return is_alone

    def _count_turn(self) -> None:
        self._newcomer_turns -= 1
        if self._newcomer_turns:
            asyncio.get_running_loop().call_soon(self._count_turn)

    async def _turn(self, share: str, ticket: _Ticket, *, deadline: Deadline) -> None:
        line = self._lines.setdefault(share, _Line())
        line.add(ticket)
        self._arrival_count += 1
        if not self._looks:
            self._looks, self._held_since = True, time.monotonic()
            self._look_soon()
        try:
            await self._served_in_time(ticket, deadline=deadline)
        except BaseException:
            # `_serve` gave it a place in the very turn of the loop in which its wait ended.
            if ticket.turn.done() and not ticket.turn.cancelled() and not ticket.turn.exception():
                self.leave(share)
            raise
        finally:
            line.remove(ticket)
            self._forget(share)

    async def _served_in_time(self, ticket: _Ticket, *, deadline: Deadline) -> None:
        patience = min(self._most_seconds, deadline.remaining_seconds)
        try:
            async with asyncio.timeout(patience):
                await ticket.turn
        except TimeoutError:
            if patience < self._most_seconds:
                raise DeadlineError("the request's time was over before its turn") from None
            raise OverloadedError(
                f"{self.running_count} requests are running, and this one has waited for"
                f" {patience:g} s",
                retry_after_seconds=shortage.RETRY_SECONDS,
            ) from None

    def _has_room(self, share: str, size: int) -> bool:
        return self._waiting.allows(share) and self._bytes.allows(share, size)

    @contextmanager
    def counted(self, share: str, size: int) -> Iterator[None]:
        """Count a request that waits, for its turn or for its model, or refuse it.

        Raises:
            OverloadedError: The queue is full.
        """
        if not self._has_room(share, size):
            raise OverloadedError(
                f"{self.running_count} requests are running and {self.waiting_count} wait,"
                f" {self._places.held_by(share)} and {self._waiting.held_by(share)} of them this"
                " client's",
                retry_after_seconds=shortage.RETRY_SECONDS,
            )
        self._waiting.take(share)
        self._bytes.take(share, size)
        self._count(+1)
        try:
            yield
        finally:
            self._waiting.give_back(share)
            self._bytes.give_back(share, size)
            self._count(-1)

    def _count(self, change: int) -> None:
        self.waiting_count += change
        self._metrics.waiting(self.waiting_count)

    def _take(self, share: str) -> None:
        self.running_count += 1
        self._places.take(share)
        self._served += 1
        self._served_at[share] = self._served

    def _look_soon(self) -> None:
        seconds = _QUIET_SECONDS if self.waiting_count < _FLOOD else _QUIET_FLOOD_SECONDS
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, self._look, self._arrival_count, _QUIET_TURNS)

    def _look(self, arrival_count: int, turns_left: int) -> None:
        """Give places once no request has arrived for a few turns."""
        is_held = time.monotonic() - self._held_since < _LONGEST_HOLD_SECONDS
        if arrival_count != self._arrival_count and is_held:
            self._look_soon()
        elif turns_left:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._look, arrival_count, turns_left - 1)
        else:
            self._serve()

    def _beat(self, due: float) -> None:
        """See whether the loop is late, and give more places."""
        self._is_late = time.monotonic() - due > _LATE_SECONDS
        self._serve()

    def _serve(self) -> None:
        """Give places to requests that wait; if more could have one, again in a moment."""
        self._looks = False
        left = max(_BEGUN_AT_ONCE - self.running_count, _BEGUN_TOGETHER)
        while (share := self._next_share()) is not None:
            is_bearable = left > 0 and not (self._is_late and self.running_count >= _BEGUN_AT_ONCE)
            if self._places.held_by(share) and not is_bearable:
                self._looks, self._held_since = True, time.monotonic()
                due = self._held_since + _BEAT_SECONDS
                asyncio.get_running_loop().call_later(_BEAT_SECONDS, self._beat, due)
                return
            left -= self._give(share)
        self._is_late = False

    def _replace(self) -> None:
        """Give the place that has become free to the next request.

        As many are worked on as before, so this need not wait until no request arrives.
        """
        while (share := self._next_share()) is not None:
            if self._give(share):
                return

    def _next_share(self) -> str | None:
        """Return whose request is next; None if nobody waits, or may have a place."""
        served = [it for it in self._lines if self._places.allows(it)]
        if not served:
            return None
        return min(served, key=lambda it: (self._places.held_by(it), self._served_at[it]))

    def _give(self, share: str) -> bool:
        """Give a place to a client's next request; False if that one waits no longer."""
        ticket = self._lines[share].pop()
        is_there = not ticket.turn.done()
        if is_there:
            self._take(share)
            ticket.turn.set_result(None)
        self._forget(share)
        return is_there

    def _forget(self, share: str) -> None:
        """Keep nothing of a client that is not here."""
        if not self._lines.get(share, True):
            del self._lines[share]
        if share not in self._lines and not self._places.held_by(share):
            del self._served_at[share]
