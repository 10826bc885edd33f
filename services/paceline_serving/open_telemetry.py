"""Spans for OpenTelemetry, written at the edges of calls. Imported where they are wanted only.

A server's span is begun and ended by who serves the call, so that no library stands between a call
and its cancel: OpenTelemetry's own interceptors for grpc.aio lose the cancel of unary calls
(open-telemetry/opentelemetry-python-contrib#3271), and every rejection cancels some.
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

# A call that is withdrawn is the normal end of what a rejection made worthless.
_FINE = frozenset({"OK", "CANCELLED"})


class OpenTelemetrySpans:
    """Begins spans, and hands those that ended to a provider.

    Concurrency: a thread of the provider's sends them; what it is too late for is dropped.

    Args:
        provider: Where they go.
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
            service: What this process is called there.
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
        """Send what is left; a collector that hangs holds nobody up."""
        loop, is_sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop did not wait, and is closed
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
        """Its place in the trace."""
        at = self._span.get_span_context()
        return f"00-{at.trace_id:032x}-{at.span_id:016x}-{at.trace_flags:02x}"

    def end(self, code: str) -> None:
        """End it with what the call ended with: a gRPC code's name, or an HTTP status."""
        self._span.set_attribute("paceline.status", code)
        if code.startswith("5") if code.isdecimal() else code not in _FINE:
            self._span.set_status(Status(StatusCode.ERROR, code))
        self._span.end()
