"""Sessions are opened and closed in tasks of their own, apart from requests."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from weakref import WeakValueDictionary

from paceline.errors import DeadlineError, InternalError, PacelineError
from paceline_orchestrator.decoding.rpcs import close_session, open_session
from paceline_orchestrator.fleet.bad_answers import demand
from paceline_orchestrator.fleet.silence import SilenceError

if TYPE_CHECKING:
    from paceline_orchestrator.decoding.exchange import SessionSpec
    from paceline_orchestrator.fleet.server import ModelServer

_log = logging.getLogger(__name__)

# Opening takes no forward: a server that takes longer hangs, and another one may be free.
_OPENING_SECONDS = 2.0
_CLOSING_SECONDS = 5.0
_CONCURRENT_CLOSINGS = 64
# Texts shorter than this take less than a millisecond.
_LONG_TOKENS = 16_384
# The pause after a long text, at least as long as the text takes: some 10 ms for 190,000 tokens, at
# this process and at the server that reads it.
_SECONDS_PER_TOKEN = 2e-7


@dataclass(frozen=True, slots=True)
class Opening:
    """What came of opening a session: a handle, or an error."""

    session_id: str = ""
    error: PacelineError | None = None


class SessionOpener:
    """Opens and closes sessions in tasks of its own. Use it as an asynchronous context manager.

    A client that leaves does not wait, and a session that was still being opened is closed, too. If
    a server cannot be reached, the session's lease ends it there.

    Attributes:
        long_texts: Where long texts wait: a session's first call carries all its text.
    """

    def __init__(self) -> None:
        self.long_texts = LongTextQueue()
        self._tasks = asyncio.TaskGroup()
        self._closings = asyncio.Semaphore(_CONCURRENT_CLOSINGS)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Wait for the last closings."""
        await self._tasks.__aexit__(None, None, None)

    def open(self, server: ModelServer, spec: SessionSpec) -> asyncio.Task[Opening]:
        """Begin to open a session; the task itself never fails."""
        return self._tasks.create_task(
            self._open(server, spec), name=f"open a session at {server.name}"
        )

    def close(self, server: ModelServer, opening: asyncio.Task[Opening]) -> None:
        """Begin to close a session, also if it is still being opened."""
        self._tasks.create_task(
            self._close(server, opening), name=f"close a session at {server.name}"
        )

    def forget(self, server: ModelServer, opening: asyncio.Task[Opening]) -> None:
        """Take note that a server has lost a session: there is nothing to close."""
        server.handles.discard(opening.result().session_id)

    async def _open(self, server: ModelServer, spec: SessionSpec) -> Opening:
        try:
            await self.long_texts.wait_turn(spec.reserve_length, share=spec.share)
            session_id = await open_session(server, spec, timeout_seconds=_OPENING_SECONDS)
            # Else two requests would supersede each other, and the end of one would end both.
            demand(session_id not in server.handles, "session_id", "is that of another session")
            server.handles.add(session_id)
            return Opening(session_id)
        except DeadlineError:
            return Opening(error=SilenceError(f"{server.name} opens no session"))
        except PacelineError as error:
            return Opening(error=error)
        except Exception:  # noqa: BLE001 - it would end all requests, as they share a task group
            _log.exception("a session could not be opened at %s", server.name)
            return Opening(error=InternalError(f"{server.name}: the session could not be opened"))

    async def _close(self, server: ModelServer, opening: asyncio.Task[Opening]) -> None:
        session_id = (await opening).session_id
        if not session_id:
            return
        server.handles.discard(session_id)
        async with self._closings:
            try:
                await close_session(server, session_id, timeout_seconds=_CLOSING_SECONDS)
            except PacelineError:
                pass  # its lease will end it
            except Exception:  # noqa: BLE001 - it would end all requests, as they share a task group
                _log.exception("a session could not be closed at %s", server.name)


class LongTextQueue:
    """Sends long texts one after the other, in turn by client.

    A stream waits for one long text at most, and a client's long text for one of each other client.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def wait_turn(self, length: int, *, share: str) -> None:
        """Wait until a text may be handed on; at once if it is short.

        Args:
            length: Its tokens.
            share: Whose it is.
        """
        if length < _LONG_TOKENS:
            return
        async with self._locks.setdefault(share, asyncio.Lock()):
            await self._turn.acquire()
        rest_seconds = length * _SECONDS_PER_TOKEN
        asyncio.get_running_loop().call_later(rest_seconds, self._turn.release)
