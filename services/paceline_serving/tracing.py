"""Which call is being served: its name in logs, and its place in a W3C trace.

`current()` follows the task, and with it every log record and every outgoing call.
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.names import is_name

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CallContext", "current", "enter", "outgoing_metadata"]

_REQUEST_ID_KEY = "x-request-id"
_TRACEPARENT_KEY = "traceparent"
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class CallContext:
    """One call: a request id and a trace id are safe to log, whatever a peer sent."""

    method: str
    request_id: str
    trace_id: str
    span_id: str
    trace_flags: str = "01"

    @property
    def traceparent(self) -> str:
        """The header that makes a called server's span a child of this one."""
        return f"00-{self.trace_id}-{self.span_id}-{self.trace_flags}"


_CURRENT: ContextVar[CallContext | None] = ContextVar("paceline_call", default=None)


def current() -> CallContext | None:
    """Return the call that this task serves, if it serves one."""
    return _CURRENT.get()


def enter(method: str, metadata: Iterable[tuple[str, str | bytes]]) -> CallContext:
    """Begin serving a call in this task: go on with the peer's trace, or begin one."""
    values = dict(metadata)
    request_id = str(values.get(_REQUEST_ID_KEY, ""))
    trace = _TRACEPARENT.fullmatch(str(values.get(_TRACEPARENT_KEY, "")))
    call = CallContext(
        method=method,
        request_id=request_id if request_id and is_name(request_id) else secrets.token_hex(8),
        trace_id=trace[1] if trace else secrets.token_hex(16),
        span_id=secrets.token_hex(8),
        trace_flags=trace[2] if trace else "01",
    )
    _CURRENT.set(call)
    return call


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """Return what an outgoing call carries, so that the called server continues the trace."""
    call = _CURRENT.get()
    if call is None:
        return ()
    return ((_REQUEST_ID_KEY, call.request_id), (_TRACEPARENT_KEY, call.traceparent))
