"""Spans that stay in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline_serving.open_telemetry import OpenTelemetrySpans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


class CollectedSpans(OpenTelemetrySpans):
    """Keeps those that ended."""

    def __init__(self) -> None:
        provider = TracerProvider(shutdown_on_exit=False)
        self._exporter = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        super().__init__(provider)

    @property
    def ended(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()
