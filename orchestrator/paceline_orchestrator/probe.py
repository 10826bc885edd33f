"""One token, asked of a server that fell silent, before it gets work again.

Its health says nothing: it was well all the time. And no client shall wait to find out.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.v1.session_pb2 import SessionSpec
from paceline_orchestrator.deadline import Deadline
from paceline_orchestrator.discovery import Role
from paceline_orchestrator.keeper import SessionKeeper
from paceline_orchestrator.session import Session

if TYPE_CHECKING:
    from paceline_orchestrator.server import ModelServer

__all__ = ["answers", "until_it_answers"]

_log = logging.getLogger(__name__)

# A server that is busy may take its time, for it has the probe in sight; see SilenceWatch. One that
# hangs costs the patience of a cold call, so it is back within some five seconds of being well: a
# probe that hangs, a pause, and one that does not.
_PROBE_SECONDS = 60.0
_PAUSES_SECONDS = (0.5, 1.0)
_TOKENS = (0,)


async def until_it_answers(server: ModelServer) -> None:
    """Return once a server has computed a token. Tries again and again, so bound it by a cancel."""
    tries = 0
    while not await answers(server):
        await asyncio.sleep(_PAUSES_SECONDS[min(tries, len(_PAUSES_SECONDS) - 1)])
        tries += 1


async def answers(server: ModelServer) -> bool:
    """Ask a server for one token, and tell whether it came."""
    assert server.facts is not None, "a server that was called has said what it is"
    spec = SessionSpec(
        expected_model_fingerprint=server.facts.fingerprint,
        reserve_length=len(_TOKENS) + 1,
        request_id="probe",
        share="probe",
    )
    async with SessionKeeper() as keeper:
        session = Session(
            server,
            spec,
            keeper=keeper,
            deadline=Deadline.after(_PROBE_SECONDS),
            note_repair=lambda _: None,
        )
        try:
            await _compute_a_token(session)
        except PacelineError:
            return False
        except Exception:  # noqa: BLE001 - the pool must not end with it
            _log.exception("%s could not be probed", server.name)
            return False
        else:
            return True
        finally:
            session.close()


async def _compute_a_token(session: Session) -> None:
    await session.opened()
    if session.server.role is Role.TARGET:
        await session.verify(_TOKENS, (), final_length=len(_TOKENS))
    else:
        await session.draft(_TOKENS, max_tokens=1, final_length=len(_TOKENS), report=lambda _: None)
