"""Servers that may be assigned to a request: they are ready, and have not failed it lately."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from paceline.errors import (
    CacheExhaustedError,
    ConnectionLostError,
    DeadlineError,
    DrainingError,
    InvalidFieldError,
    MalformedRequestError,
    OverloadedError,
    PacelineError,
    TokenizerMismatchError,
    UnsupportedError,
)
from paceline_contract.calls import VerificationRule
from paceline_orchestrator.decoding.crashes import Crashes
from paceline_orchestrator.decoding.doubts import SOON_SECONDS, Doubts, is_doubtful
from paceline_orchestrator.decoding.statistics import Fallback
from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.fleet.fitting import fits
from paceline_orchestrator.fleet.silence import NeglectError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from paceline_orchestrator.fleet.familiarity import FamiliarText
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.wire import ModelFacts

_LOST = {Role.TARGET: Fallback.TARGET_LOST, Role.DRAFTER: Fallback.DRAFTER_LOST}

# A server without room for a session is asked again after so long, if it did not say when.
_REFUSAL_SECONDS = 1.0
# The shortest pause, whatever it said: otherwise it would be asked as fast as it answers.
_LEAST_REFUSAL_SECONDS = 0.1
# One that has a call and does not answer it is left alone for so long, times the tolerance: a probe
# of it that is not answered either has ended by then.
_NEGLECT_SECONDS = 20.0
# A broken connection is noticed at once, by whoever waits for something on it.
_SUDDENLY_SECONDS = 0.2


def is_refusal(error: PacelineError) -> bool:
    """Whether a server says that it cannot, or must not, do what was asked: at no time."""
    return isinstance(error, InvalidFieldError | MalformedRequestError | UnsupportedError)


def _went_suddenly(server: ModelServer, error: PacelineError) -> bool:
    """Whether a server ended under a call, without having said before that it would.

    One that has lost its device says of the calls which it had that it is about to end.
    """
    if isinstance(error, DrainingError):
        return True
    announced_seconds = 0.0 if server.ready else time.monotonic() - server.unready_since
    return isinstance(error, ConnectionLostError) and announced_seconds < _SUDDENLY_SECONDS


class Candidates:
    """The servers that one request may use.

    Args:
        pool: Where servers come from; hears of those that fail.
        model: The target model that the request is pinned to.
        rule: How its draft tokens are judged: drafters that do not know it are no candidates.
        self_drafting: Whether targets that draft for themselves come first.
        text: Who has had it comes first among equals; None: nobody has.
        suits: Whether a server's context is long enough for the text by now: others are none.
        share: The tenant.
        request_key: Returns a name that is the same for all resumptions of the request.

    Attributes:
        model: See above.
        crashes: The servers that ended under its calls.
        doubts: The failures that may be the request's own fault.
        tolerance: How many times as long as at first a server may have a call in sight. It doubles
            with each that is given up, so that one which needs long is let finish in the end.
    """

    def __init__(
        self,
        pool: ServerPool,
        model: ModelFacts,
        *,
        rule: VerificationRule = VerificationRule.EXACT,
        self_drafting: bool = False,
        text: FamiliarText | None = None,
        suits: Callable[[ModelFacts, Role], bool] = lambda *_: True,
        share: str = "",
        request_key: Callable[[], str] = lambda: "",
    ) -> None:
        self._pool = pool
        self.model = model
        self._rule = rule
        self._self_drafting = self_drafting
        self._text = text
        self._suits = suits
        self._barred_until: dict[ModelServer, float] = {}
        self._share = share
        self._request_key = request_key
        self.crashes = Crashes(pool.quarantine, past=pool.past_losses, request_key=request_key)
        self.doubts = Doubts(pool)
        self.tolerance = 1.0

    def not_among(self, assigned: Collection[ModelServer], *, role: Role) -> list[ModelServer]:
        """Return those of a role that can be assigned and are not yet, the least loaded first."""
        now = time.monotonic()
        free = [
            server
            for server in self._ready(role)
            if server not in assigned
            and (server.facts is None or self._suits(server.facts, role))
            and now >= self._barred_until.get(server, 0.0)
        ]
        allowed = self.doubts.allow(free, role=role, assigned=assigned)
        return self.crashes.allow(allowed, role=role, assigned=assigned)

    def have_come_since(self, at: float) -> bool:
        """Whether a server has become ready since then, on the monotonic clock."""
        return self._pool.latest_ready_at > at

    @property
    def all_refuse(self) -> bool:
        """Whether each target with this model has refused the request, those that are out too.

        One whose context is too short was not asked.
        """
        targets = (it for it in self._pool.servers if it.role is Role.TARGET and not it.twin)
        return all(
            self._barred_until.get(it) == math.inf
            for it in targets
            if it.facts and fits(it.facts, self.model) and self._suits(it.facts, Role.TARGET)
        )

    def verdict(self, targets: Collection[ModelServer]) -> PacelineError | None:
        """Return what the request ends with, if targets fail for its own fault; None: not known.

        Args:
            targets: Those that work on it.
        """
        if crash := self.crashes.verdict:
            return crash
        if not self.doubts.has_any:
            return None
        return self.doubts.verdict((*targets, *self._able_soon()))

    @property
    def shortage(self) -> PacelineError:
        """What the request ends with, if it has waited for a target for too long."""
        return self.crashes.shortage or self.doubts.shortage(self._able_soon())

    def note_opening(self, server: ModelServer) -> None:
        """Note that a session is being opened at a server for the request."""
        self._pool.note_order_at(server)
        self.crashes.note_opening(server)

    def note_drafted(self, drafter: ModelServer) -> None:
        """Note that a drafter has drafted for the request, which is at its end."""
        if not self.doubts.about(drafter):
            self._pool.failed_drafts.note_success(drafter, share=self._share)

    def note_assigned(self, server: ModelServer) -> None:
        """Note that a server is about to have the text."""
        if self._text is not None:
            self._text.note(server.process_name)

    def blame(
        self,
        server: ModelServer,
        error: PacelineError,
        *,
        asked_at: float,
        reach: int,
        was_open: bool,
    ) -> tuple[Fallback, float | None]:
        """Draw the consequences of a failure: bar the server, doubt it, or report it to the pool.

        Args:
            server: Where a call failed.
            error: What with.
            asked_at: When it was made, on the monotonic clock.
            reach: How long the text is with all tokens that the call was about.
            was_open: Whether it was a call to an open session.

        Returns:
            What the failure counts as; and after how many seconds the server may be assigned again,
            if that is known.
        """
        if isinstance(error, CacheExhaustedError | OverloadedError):
            pause_seconds = error.retry_after_seconds or _REFUSAL_SECONDS
            pause_seconds = max(pause_seconds, _LEAST_REFUSAL_SECONDS)
            self._barred_until[server] = time.monotonic() + pause_seconds
            return Fallback.SESSION_REFUSED, pause_seconds
        if is_refusal(error):
            # The request is too much for its model; of others it may be capable.
            self._barred_until[server] = math.inf
            return _LOST[server.role], None
        if isinstance(error, NeglectError):
            # It may be busy with others: it works on if it computes the token that a probe wants.
            pause_seconds = _NEGLECT_SECONDS * self.tolerance
            self.tolerance *= 2
            self._barred_until[server] = time.monotonic() + pause_seconds
            self._pool.suspect(server)
            return Fallback.DEADLINE, pause_seconds
        if is_doubtful(error):
            self.doubts.add(server, error, asked_at=asked_at, reach=reach)
            if server.role is Role.DRAFTER:
                self._pool.failed_drafts.note_failure(
                    server, share=self._share, request_key=self._request_key()
                )
            return _LOST[server.role], SOON_SECONDS
        if was_open and _went_suddenly(server, error):
            self.crashes.add(server, asked_at=asked_at, reach=reach)
        self.doubts.note_other(server)
        self._pool.report_failure(server, error, asked_at=asked_at)
        is_late = isinstance(error, DeadlineError)
        return Fallback.DEADLINE if is_late else _LOST[server.role], None

    def _able_soon(self) -> list[ModelServer]:
        """Return the targets that can work on it, those that are full or away for a moment, too."""
        return [
            it
            for it in self._pool.servers
            if it.role is Role.TARGET and not it.twin and (it.ready or it.may_be_back_soon)
            if it.facts and fits(it.facts, self.model) and self._suits(it.facts, Role.TARGET)
            if self._barred_until.get(it) != math.inf
        ]

    def _ready(self, role: Role) -> list[ModelServer]:
        if role is Role.TARGET:
            targets = self._pool.targets(self.model, self._text)
            if self._self_drafting:
                targets.sort(key=lambda it: it.facts is None or not it.facts.self_draft_depth)
            return targets
        try:
            drafters = self._pool.drafters(self.model, self._text)
        except TokenizerMismatchError:
            return []
        may_be_asked = self._pool.failed_drafts.may_be_asked
        return [
            it
            for it in drafters
            if it.facts and it.facts.knows(self._rule) and may_be_asked(it, share=self._share)
        ]
