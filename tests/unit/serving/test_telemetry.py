from __future__ import annotations

import io
import json
import logging
import urllib.error
import urllib.request

import pytest

from paceline_serving import telemetry, tracing
from paceline_serving.metrics_endpoint import MetricsEndpoint
from paceline_serving.server_settings import RunSettings

CANARY = "a secret prompt"


@pytest.fixture
def stream():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = before
    root.setLevel(level)


def fail_with_a_prompt() -> None:
    try:
        raise ValueError(CANARY)
    except ValueError as error:
        raise RuntimeError(CANARY) from error


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_the_text_of_an_exception_is_never_logged(stream, log_format):
    telemetry.configure_logging(level="debug", log_format=log_format, stream=stream)
    try:
        fail_with_a_prompt()
    except RuntimeError:
        logging.getLogger("test").exception("it failed")
    written = stream.getvalue()
    assert CANARY not in written
    for expected in ("it failed", "RuntimeError", "ValueError", "fail_with_a_prompt"):
        assert expected in written


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_of_a_group_of_failures_each_is_logged_with_where_it_was(stream, log_format):
    telemetry.configure_logging(level="debug", log_format=log_format, stream=stream)
    failures = []
    for _ in range(2):
        try:
            fail_with_a_prompt()
        except RuntimeError as error:
            failures.append(error)
    inner = ExceptionGroup(CANARY, [KeyError(CANARY)])
    try:
        raise ExceptionGroup(CANARY, [*failures, inner])
    except ExceptionGroup:
        logging.getLogger("test").exception("it failed")
    written = stream.getvalue()
    assert CANARY not in written
    assert written.count("in fail_with_a_prompt") == 4  # both, and the cause of each
    assert "KeyError" in written


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_what_others_say_is_on_the_line_of_its_entry(stream, log_format):
    telemetry.configure_logging(level="info", log_format=log_format, stream=stream)
    words = "a\nforged\r\x1b[2Jb\x85\u2028\u2029\u202e\ud800 \N{LATIN SMALL LETTER E WITH ACUTE}"
    logging.getLogger("test").info("it said: %s", words, extra={"detail": words})
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    assert line.count("forged") == 2
    if log_format == "text":
        escaped = r"a\nforged\r\x1b[2Jb\x85\u2028\u2029\u202e\ud800 é"
        assert line.endswith(f"it said: {escaped} detail={escaped}")


# A test that enters a call is async: its context ends with it, and so no later test is in the call.
async def test_a_json_log_is_one_object_a_line_with_the_call_it_belongs_to(stream):
    telemetry.configure_logging(level="info", log_format="json", stream=stream)
    call = tracing.enter("/service/Method", [("x-request-id", "request-1")])
    logging.getLogger("test").info("done", extra={"rows": 3})
    logging.getLogger("test").debug("too fine")
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry["message"] == "done"
    assert entry["rows"] == 3
    assert entry["request_id"] == "request-1"
    assert entry["trace_id"] == call.trace_id


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_endpoint_serves_metrics_and_pages(host):
    registry = telemetry.new_registry()
    with telemetry.RpcMetrics(registry).rpc("/service/Method") as outcome:
        outcome.code = "CANCELLED"
    endpoint = MetricsEndpoint(
        f"{host}:0", registry=registry, pages={"/debug/calls": lambda: [{"rows": 1}]}
    )
    assert endpoint.address.startswith(f"{host}:")
    try:
        base = f"http://{endpoint.address}"
        with urllib.request.urlopen(f"{base}/metrics", timeout=60) as page:
            metrics = page.read().decode()
        assert (
            'paceline_rpcs_total{code="CANCELLED",method="service/Method",reason=""} 1.0' in metrics
        )
        assert 'paceline_cancelled_rpcs_total{reason="client_cancel"} 1.0' in metrics
        assert "paceline_build_info{" in metrics
        with urllib.request.urlopen(f"{base}/debug/calls", timeout=60) as page:
            assert json.loads(page.read()) == [{"rows": 1}]
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{base}/other", timeout=60)
    finally:
        endpoint.close()


@pytest.mark.parametrize(
    "traceparent",
    ["", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", "ff-x", "00-4bf92f3577b34da6a3ce929d0e0e4736"],
)
async def test_a_trace_that_is_none_is_begun_anew(traceparent):
    call = tracing.enter("/service/Method", [("traceparent", traceparent)])
    assert len(call.trace_id) == 32
    assert int(call.trace_id, 16)


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 65, "\n", "ü"])
async def test_a_request_id_that_is_unsafe_to_log_is_replaced(request_id):
    assert tracing.enter("/s/M", [("x-request-id", request_id)]).request_id != request_id


def test_latencies_are_told_apart_up_to_the_longest_call_that_can_be():
    (longest,) = (
        it.le for it in RunSettings.model_fields["call_limit_seconds"].metadata if hasattr(it, "le")
    )
    assert telemetry.LATENCY_BUCKETS[-1] >= longest
