"""Drafters that fail one request after the other, though they compute a token when they are asked.

Whose fault that is nobody knows: a client may send what no drafter can take. So such a drafter
pauses for the new requests of the client whose requests it failed, and for nobody else.

- It pauses after three different requests in a row. One that is sent again is the same request.
- A request of the client that used it to its end, without a failure, ends the row.
- While it pauses, the requests that have a session there keep it.

The pause grows with each further request that fails. Requests can do without a drafter, so the
worst error costs a client its drafters for ten seconds.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from paceline_orchestrator.fleet.pauses import pause_after

if TYPE_CHECKING:
    from paceline_orchestrator.fleet.server import ModelServer

_log = logging.getLogger(__name__)

_LEAST_REQUESTS = 3
_MOST_CLIENTS = 1024


@dataclass(slots=True)
class _Row:
    """The requests of one client that one process has failed, one after the other."""

    process_name: str
    request_keys: set[str] = field(default_factory=set)
    pause_count: int = 0
    ask_again_at: float = 0.0


class FailedDrafts:
    """Which drafters get no new requests of which clients."""

    def __init__(self) -> None:
        self._rows: WeakKeyDictionary[ModelServer, OrderedDict[str, _Row]] = WeakKeyDictionary()

    def note_failure(self, drafter: ModelServer, *, share: str, request_key: str) -> None:
        """Note that a request failed there; what fails during a pause is a part of it.

        Args:
            drafter: Where.
            share: The tenant.
            request_key: The same for whatever is the same request.
        """
        row = self._row(drafter, share)
        if row is None:
            row = _Row(drafter.process_name)
            rows = self._rows.setdefault(drafter, OrderedDict())
            rows[share] = row
            rows.move_to_end(share)
            if len(rows) > _MOST_CLIENTS:
                rows.popitem(last=False)
        if time.monotonic() < row.ask_again_at:
            return
        if len(row.request_keys) < _LEAST_REQUESTS:
            row.request_keys.add(request_key)
        if len(row.request_keys) == _LEAST_REQUESTS:
            if not row.pause_count:
                _log.warning("%s fails a client's requests, one after the other", drafter.name)
            row.pause_count += 1
            row.ask_again_at = time.monotonic() + pause_after(row.pause_count)

    def note_success(self, drafter: ModelServer, *, share: str) -> None:
        """Note that a request of a client was drafted for there, up to its end."""
        if rows := self._rows.get(drafter):
            rows.pop(share, None)

    def may_be_asked(self, drafter: ModelServer, *, share: str) -> bool:
        """Whether a client's requests may open sessions there."""
        row = self._row(drafter, share)
        return row is None or time.monotonic() >= row.ask_again_at

    def _row(self, drafter: ModelServer, share: str) -> _Row | None:
        """Return the row of the process that is there now."""
        rows = self._rows.get(drafter)
        row = rows.get(share) if rows is not None else None
        return row if row is not None and row.process_name == drafter.process_name else None
