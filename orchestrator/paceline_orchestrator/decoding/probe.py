"""One token, asked of a server that fell silent, before it gets work again.

Its health says nothing: it was well all the time. And no client shall wait to find out.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from paceline.errors import CacheExhaustedError, OverloadedError, PacelineError
from paceline_contract.calls import DraftOptions
from paceline_contract.proposal import Proposal
from paceline_orchestrator.decoding.deadline import Deadline
from paceline_orchestrator.decoding.exchange import SessionSpec
from paceline_orchestrator.decoding.session import RemoteSession
from paceline_orchestrator.decoding.session_opener import SessionOpener
from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.fleet.pauses import Probed

if TYPE_CHECKING:
    from paceline_orchestrator.fleet.server import ModelServer

_log = logging.getLogger(__name__)

# A server that is busy may take its time, for it has the probe in sight; see SilenceWatch.
_PROBE_SECONDS = 60.0
_TOKENS = (0,)


async def answers(server: ModelServer) -> Probed:
    """Ask a server for one token, and tell what came of it."""
    assert server.facts is not None, "a server that was called has said what it is"
    spec = SessionSpec(
        fingerprint=server.facts.fingerprint,
        reserve_length=len(_TOKENS) + 1,
        request_id="probe",
        share="probe",
    )
    async with SessionOpener() as opener:
        session = RemoteSession(
            server,
            spec,
            opener=opener,
            deadline=Deadline.after(_PROBE_SECONDS),
            note_repair=lambda _: None,
        )
        try:
            await _compute_a_token(session)
        except (CacheExhaustedError, OverloadedError):
            return Probed.NO_ROOM
        except PacelineError:
            return Probed.NOTHING
        except Exception:  # noqa: BLE001 - the pool must not end with it
            _log.exception("%s could not be probed", server.name)
            return Probed.NOTHING
        else:
            return Probed.TOKEN
        finally:
            session.close()


async def _compute_a_token(session: RemoteSession) -> None:
    await session.opened()
    if session.server.role is Role.TARGET:
        await session.verify(_TOKENS, Proposal(), final_length=len(_TOKENS))
    else:
        await session.draft(
            _TOKENS, DraftOptions(max_tokens=1), final_length=len(_TOKENS), report=lambda _: None
        )
