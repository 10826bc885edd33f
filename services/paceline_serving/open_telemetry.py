"""Spans for OpenTelemetry, written at the edges of calls. Imported only for tracing.

Our own interceptor begins and ends a server's span. OpenTelemetry's interceptors for grpc.aio lose
the cancel of unary calls (open-telemetry/opentelemetry-python-contrib#3271), and every rejection
cancels some.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.trace import Span

# These codes are no errors: a rejection cancels the calls that it made useless.
_FINE = frozenset({"OK", "CANCELLED"})


class OpenTelemetrySpans:
    """Begins spans, and hands ended spans to a provider.

    Concurrency: a thread of the provider sends them, and drops those that it cannot send in time.

    Args:
        provider: Receives the ended spans.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("paceline")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def sent_to(cls, endpoint: str, *, service: str) -> Self:
        """Send spans to a collector, by OTLP over gRPC.

        Args:
            endpoint: Its URL; https is TLS with the system's authorities.
            service: The name of this process there.
        """
        resource = Resource.create({"service.name": service})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def begin(self, method: str, *, parent: str, request_id: str) -> OpenTelemetrySpan:
        """Begin the span of a call that is served; see tracing.Spans."""
        span = self._tracer.start_span(
            method.lstrip("/"),
            context=self._propagator.extract({"traceparent": parent}),
            kind=SpanKind.SERVER,
            attributes={"paceline.request_id": request_id},
        )
        return OpenTelemetrySpan(span)

    async def close(self, *, within_seconds: float = 2.0) -> None:
        """Send the remaining spans, within the time: a collector may hang."""
        loop, is_sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop was closed before
                loop.call_soon_threadsafe(is_sent.set)

        threading.Thread(target=send, name="paceline-spans", daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_seconds):
                await is_sent.wait()


class OpenTelemetrySpan:
    """The span of one call; see tracing.Span."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """The span's place in the trace."""
        at = self._span.get_span_context()
        return f"00-{at.trace_id:032x}-{at.span_id:016x}-{at.trace_flags:02x}"

    def end(self, code: str) -> None:
        """End the span with the call's gRPC code or HTTP status."""
        self._span.set_attribute("paceline.status", code)
        if code.startswith("5") if code.isdecimal() else code not in _FINE:
            self._span.set_status(Status(StatusCode.ERROR, code))
        self._span.end()
