"""One call of a session: sent at once, and sent again after the session was repaired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from paceline.errors import (
    ConnectionLostError,
    PacelineError,
    SessionError,
    SupersededError,
)
from paceline_orchestrator.fleet.bad_answers import BadAnswerError
from paceline_orchestrator.fleet.silence import NeglectError, SilenceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from paceline_contract.calls import PrefixCall
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.silence import Waiting

_T = TypeVar("_T")

# A call is repaired so often; then the server is at fault.
_REPAIRS = 3


@dataclass(frozen=True, slots=True)
class Sent:
    """What was sent: the call's fence, its RPC, the wait for it, and the time (perf_counter_ns)."""

    call: PrefixCall
    rpc: Any
    waiting: Waiting
    at_ns: int


class CallSession(Protocol):
    """What a call needs of its session."""

    @property
    def server(self) -> ModelServer:
        """Where it is."""

    @property
    def handle(self) -> str:
        """Its handle, once it is open; else empty."""

    async def opened(self) -> str:
        """Wait until it is open, and return its handle."""

    def begin(self, call: CallUnderWay[Any]) -> None:
        """Note that a call is under way."""

    def end(self, call: CallUnderWay[Any]) -> None:
        """Note that a call is over; the first time counts."""

    def repair(self, error: SessionError, call: PrefixCall) -> None:
        """Make good what the server lost, so that the same call can be sent again."""


class CallUnderWay(Generic[_T]):
    """A call of a session. Await it once.

    The call is sent when it is made. If the session is still being opened then, the call is sent
    when the session is open and the call is awaited. A session that the server lost is opened anew,
    and a prefix that the server does not hold is sent again.

    Cancellation:
        `cancel` it, after the task that awaits it: that task may not even have begun to.

    Args:
        session: Whose call it is.
        send: Sends it to the session with this handle.
        read: Waits for the answer.
        is_repeatable: Whether it may be sent again: nothing of its answer has been used.
    """

    def __init__(
        self,
        session: CallSession,
        send: Callable[[str], Sent],
        read: Callable[[Sent], Awaitable[_T]],
        *,
        is_repeatable: Callable[[], bool],
    ) -> None:
        self._session = session
        self._send = send
        self._read = read
        self._is_repeatable = is_repeatable
        self._is_wanted = True
        self._sent: Sent | None = None
        self._failure: PacelineError | None = None
        if session.handle:
            try:
                self._sent = send(session.handle)
            except PacelineError as error:  # the channel is closed: told where it is awaited
                self._failure = error
        session.begin(self)

    def __await__(self) -> Generator[Any, None, _T]:
        """Wait for the answer.

        Raises:
            PacelineError: What could not be repaired.
        """
        return self._answer().__await__()

    def release(self) -> None:
        """Give up the answer: the call is neither repaired nor sent again."""
        self._is_wanted = False

    def cancel(self) -> None:
        """Withdraw the call: the server is told to stop."""
        if self._sent is not None:
            self._session.server.silence.end(self._sent.waiting, rpc=self._sent.rpc)
            self._sent.rpc.cancel()
        self._session.end(self)

    def end_unanswered(self) -> bool:
        """Note that the request is over before the answer came; see SilenceWatch."""
        silence = self._session.server.silence
        return self._sent is not None and silence.end_unanswered(self._sent.waiting)

    async def _answer(self) -> _T:
        try:
            if self._failure is not None:
                raise self._failure
            for _ in range(_REPAIRS):
                if self._sent is None:
                    handle = await self._session.opened()
                    if not self._is_wanted:
                        raise SupersededError("it was withdrawn before it was sent")
                    self._sent = self._send(handle)
                try:
                    return await self._read_patiently(self._sent)
                except SessionError as error:
                    if not self._is_wanted:
                        raise
                    self._session.repair(error, self._sent.call)
                    if not self._is_repeatable():
                        raise
                    self._sent = None
            raise BadAnswerError("it keeps losing what it holds")
        finally:
            self._session.end(self)

    async def _read_patiently(self, sent: Sent) -> _T:
        try:
            return await self._read(sent)
        except ConnectionLostError:
            if not sent.waiting.is_given_up:
                raise
            name = self._session.server.name
            if sent.waiting.is_neglected:
                raise NeglectError(f"{name} has a call, and does not answer it") from None
            raise SilenceError(f"{name} is silent") from None
        finally:
            self._session.server.silence.end(sent.waiting, rpc=sent.rpc)
