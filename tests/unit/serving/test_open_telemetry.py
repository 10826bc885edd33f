"""Spans: one for each call that is served, below its caller's, whatever the call ends with."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from paceline_serving import tracing
from paceline_serving.interceptors import EdgeInterceptor
from paceline_serving.open_telemetry import OpenTelemetrySpans
from paceline_serving.telemetry import RpcMetrics
from paceline_serving.transport import pod_channel
from support.bare_server import ECHO, HANG, BareServer
from support.collected_spans import CollectedSpans
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from opentelemetry.sdk.trace import ReadableSpan

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Passing(BareServer):
    """Echoes what the next server echoes, or what it makes of a request."""

    def __init__(self, channel: grpc.aio.Channel | None = None) -> None:
        super().__init__()
        self._channel = channel
        self.calls: list[tracing.CallContext | None] = []

    async def _echo(self, request: bytes, _context: Any) -> bytes:
        self.calls.append(tracing.current())
        if request == b"fail":
            raise ValueError("a secret prompt")
        if self._channel is not None:
            return await self._channel.unary_unary(ECHO)(request, timeout=20)
        return request


def edge(spans: OpenTelemetrySpans, **settings: Any) -> EdgeInterceptor:
    return EdgeInterceptor(RpcMetrics(CollectorRegistry()), spans=spans, **settings)


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    channel = pod_channel(address, credentials=None)
    try:
        yield channel
    finally:
        await channel.close()


async def ask(
    address: str, *, method: str = ECHO, flags: str = "01", request: bytes = b"x"
) -> bytes:
    metadata = (("traceparent", f"00-{TRACE}-{CALLER}-{flags}"), ("x-request-id", "r-1"))
    async with channel_to(address) as channel:
        answer: bytes = await channel.unary_unary(method)(request, timeout=20, metadata=metadata)
        return answer


def is_failed(span: ReadableSpan) -> bool:
    return span.status.status_code is StatusCode.ERROR


async def test_a_call_is_a_span_below_its_callers_and_above_what_it_calls():
    spans = CollectedSpans()
    async with (
        BareServer().running(edge(spans)) as inner,
        channel_to(inner) as channel,
        Passing(channel).running(edge(spans)) as outer,
    ):
        assert await ask(outer) == b"x"
        await until(lambda: len(spans.ended) == 2, what="both have ended")
    inner_span, outer_span = spans.ended  # in the order of their ends
    assert outer_span.name == inner_span.name == "test.Service/Echo"
    assert f"{outer_span.parent.span_id:016x}" == CALLER
    assert inner_span.parent.span_id == outer_span.context.span_id
    assert {f"{it.context.trace_id:032x}" for it in spans.ended} == {TRACE}
    told = {"paceline.request_id": "r-1", "paceline.status": "OK"}
    assert [dict(it.attributes) for it in spans.ended] == [told, told]
    assert outer_span.kind.name == "SERVER"


async def test_logs_and_calls_have_the_spans_own_ids():
    spans, server = CollectedSpans(), Passing()
    async with server.running(edge(spans)) as address:
        await ask(address)
        await until(lambda: spans.ended, what="it has ended")
    (call,), (span,) = server.calls, spans.ended
    assert (call.trace_id, call.span_id) == (TRACE, f"{span.context.span_id:016x}")


async def test_a_call_without_a_caller_begins_a_trace():
    spans = CollectedSpans()
    call = tracing.enter("/s/M", [("traceparent", "00-0-0-01")], spans=spans)
    with call.recorded(lambda: "OK"):
        assert int(call.trace_id, 16)
    (span,) = spans.ended
    assert span.parent is None
    assert f"{span.context.trace_id:032x}" == call.trace_id


async def test_a_trace_that_nobody_samples_is_passed_on_and_not_collected():
    spans, server = CollectedSpans(), Passing()
    async with server.running(edge(spans)) as address:
        await ask(address, flags="00")
    assert spans.ended == ()
    (call,) = server.calls
    assert call.traceparent.startswith(f"00-{TRACE}-")
    assert call.traceparent.endswith("-00")


async def test_a_failed_call_is_a_failed_span_without_the_exceptions_text():
    spans = CollectedSpans()
    async with Passing().running(edge(spans)) as address:
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(address, request=b"fail")
        await until(lambda: spans.ended, what="it has ended")
    (span,) = spans.ended
    assert is_failed(span)
    assert span.attributes["paceline.status"] == "INTERNAL"
    assert "secret" not in span.to_json()


async def test_a_withdrawn_call_reaches_the_server_and_is_no_failed_span():
    spans, server = CollectedSpans(), BareServer()
    async with server.running(edge(spans)) as address:
        asking = asyncio.create_task(ask(address, method=HANG))
        await until(lambda: server.begun, what="the call has begun")
        asking.cancel()
        await until(lambda: spans.ended, what="it has ended")
    (span,) = spans.ended
    assert server.cancelled == 1
    assert span.attributes["paceline.status"] == "CANCELLED"
    assert not is_failed(span)


async def test_what_is_asked_for_ever_has_no_spans():
    spans = CollectedSpans()
    async with BareServer().running(edge(spans, unbounded={"test.Service"})) as address:
        await ask(address)
    assert spans.ended == ()


@pytest.mark.parametrize(
    ("code", "fails"),
    [("200", False), ("404", False), ("499", False), ("503", True), ("UNAVAILABLE", True)],
)
def test_which_ends_are_failures(code, fails):
    spans = CollectedSpans()
    spans.begin("/s/M", parent="", request_id="r").end(code)
    (span,) = spans.ended
    assert is_failed(span) == fails


async def test_a_collector_that_hangs_holds_nobody_up():
    class Hangs(SpanProcessor):
        gate = threading.Event()

        def shutdown(self) -> None:
            self.gate.wait(60)

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Hangs())
    async with asyncio.timeout(30):
        await OpenTelemetrySpans(provider).close(within_seconds=0.01)
    assert not Hangs.gate.is_set()
    Hangs.gate.set()


async def test_closing_waits_until_the_last_spans_are_sent():
    class Sends(SpanProcessor):
        is_sent = False

        def shutdown(self) -> None:
            self.is_sent = True

    provider, sends = TracerProvider(shutdown_on_exit=False), Sends()
    provider.add_span_processor(sends)
    await OpenTelemetrySpans(provider).close(within_seconds=60)
    assert sends.is_sent


def test_without_an_endpoint_nothing_is_loaded_and_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "paceline_serving.open_telemetry", None)
    assert tracing.spans_to("", service="x") is None
    with pytest.raises(RuntimeError, match=r"trace_endpoint needs paceline\[tracing\]"):
        tracing.spans_to("http://127.0.0.1:4317", service="x")
