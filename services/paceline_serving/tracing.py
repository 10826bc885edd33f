"""The call that is being served: its id in logs, and its place in a W3C trace.

`current()` follows the task, and with it every log record and every outgoing call.
"""

from __future__ import annotations

import re
import secrets
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline_contract.names import is_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from paceline_serving.open_telemetry import OpenTelemetrySpans

_REQUEST_ID_KEY = "x-request-id"
_TRACEPARENT_KEY = "traceparent"
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")


class Span(Protocol):
    """A call's entry in a collected trace."""

    @property
    def traceparent(self) -> str:
        """The span's own place in the trace."""

    def end(self, code: str) -> None:
        """End the span with the call's gRPC code or HTTP status."""


class Spans(Protocol):
    """Makes the spans of calls."""

    def begin(self, method: str, *, parent: str, request_id: str) -> Span:
        """Begin a span, below the caller's `traceparent` if there is one."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """One call. Its request id and trace id are safe to log: they were checked."""

    method: str
    request_id: str
    trace_id: str
    span_id: str
    trace_flags: str = "01"
    span: Span | None = None

    @property
    def traceparent(self) -> str:
        """The header that makes a called server's span a child of this one."""
        return f"00-{self.trace_id}-{self.span_id}-{self.trace_flags}"

    @contextmanager
    def recorded(self, code: Callable[[], str]) -> Iterator[None]:
        """End the call's span, if there is one, with the call's code."""
        try:
            yield
        finally:
            if self.span is not None:
                self.span.end(code())


_CURRENT: ContextVar[CallContext | None] = ContextVar("paceline_call", default=None)


def current() -> CallContext | None:
    """Return the call that this task serves, if it serves one."""
    return _CURRENT.get()


def enter(
    method: str, metadata: Iterable[tuple[str, str | bytes]], *, spans: Spans | None = None
) -> CallContext:
    """Begin serving a call in this task: continue the peer's trace, or begin one.

    Args:
        method: The called method.
        metadata: The call's metadata.
        spans: Makes the call's span; without it there is none, and its ids are drawn here.
    """
    values = dict(metadata)
    named = str(values.get(_REQUEST_ID_KEY, ""))
    request_id = named if named and is_name(named) else secrets.token_hex(8)
    peer = _TRACEPARENT.fullmatch(str(values.get(_TRACEPARENT_KEY, "")))
    span = None
    if spans is not None:
        span = spans.begin(method, parent=peer[0] if peer else "", request_id=request_id)
    own = span.traceparent if span is not None else _drawn(peer)
    _, trace_id, span_id, trace_flags = own.split("-")
    call = CallContext(
        method,
        request_id=request_id,
        trace_id=trace_id,
        span_id=span_id,
        trace_flags=trace_flags,
        span=span,
    )
    _CURRENT.set(call)
    return call


def _drawn(peer: re.Match[str] | None) -> str:
    """Draw the ids of a place in the peer's trace, or in a new one."""
    trace_id, flags = (peer[1], peer[2]) if peer else (secrets.token_hex(16), "01")
    return f"00-{trace_id}-{secrets.token_hex(8)}-{flags}"


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """Return the metadata of an outgoing call, by which the called server continues the trace."""
    call = _CURRENT.get()
    if call is None:
        return ()
    return ((_REQUEST_ID_KEY, call.request_id), (_TRACEPARENT_KEY, call.traceparent))


def spans_to(endpoint: str, *, service: str) -> OpenTelemetrySpans | None:
    """Make spans that are sent to a collector; None without an endpoint.

    Args:
        endpoint: Its URL, or empty.
        service: The name of this process there.

    Raises:
        RuntimeError: OpenTelemetry is not installed.
    """
    if not endpoint:
        return None
    try:
        from paceline_serving.open_telemetry import OpenTelemetrySpans
    except ModuleNotFoundError as error:
        raise RuntimeError(f"trace_endpoint needs paceline[tracing] ({error})") from None
    return OpenTelemetrySpans.sent_to(endpoint, service=service)
