"""How requests end: with an error that clients understand, by leaving, by a drain."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress

import openai
import pytest

from paceline import errors
from paceline_gateway.settings import GatewaySettings
from paceline_serving import tracing
from support.collected_spans import CollectedSpans
from support.fake_orchestrator import FakeOrchestrator, Leg, serving
from support.gateway import TEMPLATE, gateway_over
from support.waiting import until

HANGS = {"hangs": True, "chunks": 2}
CUT = {"drain_seconds": 5}


def scripted(*legs: Leg) -> FakeOrchestrator:
    return FakeOrchestrator(script=list(legs), chat_template=TEMPLATE)


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (errors.InvalidFieldError.of("sampling.top_p", "must be so"), 400, "top_p", None),
        (errors.InvalidFieldError.of("text", "is too long"), 400, "prompt", None),
        (errors.InvalidFieldError.of("stop_strings", "are 5"), 400, "stop", None),
        (
            errors.ContextLengthExceededError("1030 tokens"),
            400,
            "prompt",
            "context_length_exceeded",
        ),
        (errors.UnsupportedError("no rejection"), 400, None, "unsupported"),
        (errors.OverloadedError("full", retry_after_seconds=7.2), 429, None, "overloaded"),
        (errors.CacheExhaustedError("full"), 503, None, "overloaded"),
        (errors.NoTargetError("none", retry_after_seconds=0.05), 503, None, "unavailable"),
        (errors.DeadlineError("over"), 504, None, "timeout"),
        (errors.InternalError("secret"), 500, None, "internal"),
        (errors.PermissionDeniedError("secret"), 502, None, "gateway_refused"),
    ],
)
async def test_an_orchestrators_error_is_said_in_openais_form(error, status, param, code):
    legs = [Leg(error=error, refuses=True) for _ in range(5)]
    async with gateway_over(scripted(*legs)) as gateway:
        response = await gateway.post("/v1/completions", prompt="p")
        with pytest.raises(openai.APIStatusError) as raised:
            await gateway.client.completions.create(model="fake", prompt="p", stream=True)
    told = response.json()["error"]
    assert (response.status_code, told["param"], told["code"]) == (status, param, code)
    assert "secret" not in told["message"]
    assert raised.value.status_code == status
    seconds = str(max(1, round((error.retry_after_seconds or 1) + 0.4)))
    wants = {429: seconds, 503: seconds}
    assert response.headers.get("retry-after") == wants.get(status)


async def test_no_error_tells_where_machines_inside_are():
    places = [
        *("ipv4:10.1.2.3:50050", "ipv6:[fd00::1]:50050", "10.1.2.3:50051", "10.1.2.3"),
        *("[fd00::1]:443", "unix:/run/paceline.sock", "localhost:50051"),
        "orchestrator-0.paceline.svc.cluster.local:50050",
    ]
    fake = scripted()
    async with gateway_over(fake) as gateway:
        for place in places:
            error = errors.OverloadedError(f"none at {place}; last error")
            fake.script = [Leg(error=error, refuses=True)]
            response = await gateway.post("/v1/completions", prompt="p")
            assert response.json()["error"]["message"] == "none at (an address); last error"


async def test_orchestrators_that_do_not_say_what_their_model_is_are_unavailable():
    # 504 would tell the client to ask for less.
    fake = FakeOrchestrator()
    async with gateway_over(fake) as gateway:
        fake.info_errors = [errors.DeadlineError("over")]
        response = await gateway.post("/v1/completions", prompt="p")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
    assert response.headers["retry-after"] == "1"


async def test_where_none_serves_nobody_waits_long_for_their_word(monkeypatch):
    fake = FakeOrchestrator()
    async with AsyncExitStack() as life:
        await life.enter_async_context(serving(fake))
        async with gateway_over(orchestrators=(fake.address,)) as gateway:
            orchestrators = gateway.process.orchestrators
            await life.aclose()
            await until(lambda: not orchestrators.any_serves, what="it is known to be gone")
            asked = []

            async def hangs(*, timeout):
                asked.append(timeout)
                raise errors.DeadlineError("over")

            monkeypatch.setattr(orchestrators.client, "info", hangs)
            monkeypatch.setattr(orchestrators._info, "_kept", None)
            response = await gateway.post("/v1/completions", prompt="p")
    assert asked == [2.0]
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "within 2 s" in response.json()["error"]["message"]


async def test_an_orchestrator_that_is_away_for_a_moment_is_asked_once_more_what_its_model_is():
    gone = errors.ConnectionLostError("gone")
    fake = FakeOrchestrator()
    async with gateway_over(fake) as gateway:
        fake.info_errors = [gone]
        assert (await gateway.post("/v1/completions", prompt="p")).status_code == 200
    fake = FakeOrchestrator()
    async with gateway_over(fake) as gateway:
        fake.info_errors = [gone, gone]
        response = await gateway.post("/v1/completions", prompt="p")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")


async def test_openais_client_tries_again_by_itself_and_succeeds():
    overloaded = Leg(error=errors.OverloadedError("full"), refuses=True)
    async with gateway_over(scripted(overloaded)) as gateway:
        patient = gateway.client.with_options(max_retries=1)
        whole = await patient.completions.create(model="fake", prompt="p", max_tokens=2)
    assert whole.choices[0].text == "3 4 "


async def test_an_error_in_mid_stream_is_the_streams_last_event():
    leg = Leg(error=errors.InvariantViolatedError("secret"), chunks=2)
    async with gateway_over(scripted(leg)) as gateway:
        stream = await gateway.client.completions.create(model="fake", prompt="p", stream=True)
        texts = [(await anext(stream)).choices[0].text for _ in range(2)]
        with pytest.raises(openai.APIError, match="gateway got no answer"):
            await anext(stream)
    assert texts == ["3 ", "4 "]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_goes_away_before_its_answer_cancels_the_work(streamed):
    fake = scripted(Leg(hangs=True))  # before a text, so that no status is sent
    async with gateway_over(fake) as gateway:
        asking = asyncio.create_task(gateway.post("/v1/completions", prompt="p", stream=streamed))
        await until(lambda: fake.requests, what="the orchestrator is asked")
        asking.cancel()
        await is_cancelled(gateway, status="499")


async def test_a_client_that_goes_away_in_mid_stream_cancels_the_work():
    fake = scripted(Leg(**HANGS))
    async with gateway_over(fake) as gateway:
        stream = await gateway.client.completions.create(model="fake", prompt="p", stream=True)
        await anext(stream)  # so it has a status
        await stream.close()
        await is_cancelled(gateway, status="200")


async def is_cancelled(gateway, *, status):
    """Wait until the orchestrator's work is cancelled and the request counted."""
    (fake,) = gateway.fakes
    await until(fake.cancelled.is_set, what="the orchestrator hears of it")
    count, labels = gateway.registry.get_sample_value, {"route": "/v1/completions"}
    await until(
        lambda: count("paceline_http_requests_total", {**labels, "status": status}) == 1,
        what=f"it is counted with {status}",
    )


async def test_a_choice_that_fails_cancels_the_others():
    fake = scripted(Leg(**HANGS), Leg(error=errors.InternalError("x"), refuses=True))
    async with gateway_over(fake) as gateway:
        response = await gateway.post("/v1/completions", prompt="p", n=2)
        assert response.status_code == 500
        await fake.cancelled.wait()


async def test_a_trace_goes_through_to_the_servers():
    async with gateway_over() as gateway:
        headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        asked = {"model": "fake", "prompt": "p", "max_tokens": 1}
        await gateway.http.post("/v1/completions", json=asked, headers=headers)
        *_, generate = gateway.fakes[0].metadata
    assert generate["traceparent"].split("-")[1] == "0af7651916cd43dd8448eb211c80319c"
    assert generate["traceparent"] != headers["traceparent"], "a span of its own"


async def test_a_request_is_a_span_above_its_generations(monkeypatch):
    spans = CollectedSpans()
    monkeypatch.setattr(tracing, "spans_to", lambda *_, **__: spans)
    async with gateway_over() as gateway:
        assert (await gateway.post("/v1/completions", prompt="p", n=2)).status_code == 200
        await until(lambda: spans.ended, what="it has ended")
        (span,) = spans.ended
        at = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-"
        *_, first, second = gateway.fakes[0].metadata
        assert first["traceparent"] == second["traceparent"]
        assert first["traceparent"].startswith(at)
    assert span.name == "POST /v1/completions"
    assert span.attributes["paceline.status"] == "200"


async def test_request_ids_go_through_to_the_servers():
    async with gateway_over() as gateway:
        asked = {"json": {"model": "fake", "prompt": "p"}}
        mine = await gateway.http.post(
            "/v1/completions", **asked, headers={"x-request-id": "my.id-1"}
        )
        bad = await gateway.http.post(
            "/v1/completions", **asked, headers={"x-request-id": "no spaces, please"}
        )
        assert mine.headers["x-request-id"] == "my.id-1" == gateway.requests[0].request_id
        assert bad.headers["x-request-id"] == gateway.requests[1].request_id != "no spaces, please"


async def test_requests_beyond_the_limit_are_refused_at_once():
    fake = scripted(Leg(**HANGS))
    async with gateway_over(fake, request_limit=1) as gateway:
        asking = asyncio.create_task(gateway.post("/v1/completions", prompt="p"))
        await until(lambda: fake.requests, what="the orchestrator is asked")
        response = await gateway.post("/v1/completions", prompt="p")
        assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
        assert response.headers["retry-after"] == "1"
        asking.cancel()


async def test_more_choices_than_the_limit_are_refused_and_as_many_are_not():
    async with gateway_over(choice_limit=3) as gateway:
        allowed = await gateway.post("/v1/completions", prompt=["a", "b", "c"])
        response = await gateway.post("/v1/completions", prompt=["a", "b"], n=2)
    assert [each["index"] for each in allowed.json()["choices"]] == [0, 1, 2]
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


async def test_a_body_that_does_not_come_is_not_waited_for():
    async with gateway_over(slow_reader_seconds=0.1) as gateway:
        host, _, port = gateway.process.addresses["address"].partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        )
        async with asyncio.timeout(90):
            assert b"408" in await reader.readline()
        writer.close()


@pytest.mark.parametrize("begun", [b"", b"POST /v1/comp"])
async def test_a_connection_without_a_request_is_ended(begun):
    async with gateway_over(slow_reader_seconds=0.1) as gateway:
        host, _, port = gateway.process.addresses["address"].partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(begun)
        async with asyncio.timeout(90):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


async def test_a_reader_that_reads_nothing_is_given_up():
    fake = FakeOrchestrator()
    async with gateway_over(fake, slow_reader_seconds=0.3) as gateway:
        host, _, port = gateway.process.addresses["address"].partition(":")
        body = b'{"model":"fake","prompt":"p","stream":true,"max_tokens":100000}'
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            % len(body)
        )
        writer.write(body)
        await until(lambda: fake.requests, what="the orchestrator is asked")
        async with asyncio.timeout(90):
            await fake.cancelled.wait()
            await gateway.process.requests.idle()
        writer.close()
        del reader


async def test_a_drain_ends_what_runs_and_then_says_why():
    fake = scripted(Leg(**HANGS))
    async with gateway_over(fake, drain_seconds=0.2) as gateway:
        stream = await gateway.client.completions.create(model="fake", prompt="p", stream=True)
        assert (await anext(stream)).choices[0].text == "3 "
        finishing = asyncio.create_task(gateway.process.finish())
        assert (await anext(stream)).choices[0].text == "4 "
        with pytest.raises(openai.APIError, match="shutting down"):
            await anext(stream)
        await fake.cancelled.wait()
        await finishing


@pytest.mark.parametrize(
    ("said", "seconds"),
    [({}, 600), ({"call_limit_seconds": 77}, 77), ({"call_limit_seconds": 77, **CUT}, 5)],
)
def test_a_gateway_drains_for_as_long_as_a_call_may_take_unless_told_otherwise(said, seconds):
    assert GatewaySettings(orchestrators=("127.0.0.1:1",), **said).drain_seconds == seconds


async def test_a_gateway_that_would_cut_calls_says_so_at_its_start(caplog):
    async with gateway_over(**CUT):
        assert "a call may take 600 s here (--call-limit-seconds), and is cut after 5 s" in (
            caplog.text
        )
    caplog.clear()
    async with gateway_over(**CUT, call_limit_seconds=5):
        assert "is cut after" not in caplog.text


async def test_readiness_follows_the_orchestrators_and_the_drain():
    async with gateway_over(drain_delay_seconds=600) as gateway:
        assert (await gateway.http.get("/health/live")).status_code == 200
        assert (await gateway.http.get("/health/ready")).status_code == 200
        finishing = asyncio.create_task(gateway.process.finish())
        await until(lambda: gateway.process.readiness.why_not, what="it leaves")
        for path in ("/health/ready", "/health"):
            assert (await gateway.http.get(path)).status_code == 503
        assert (await gateway.post("/v1/completions", prompt="p")).status_code == 200
        finishing.cancel()  # nobody waits for the delay's end
        await asyncio.wait((finishing,))
        soon = {"drain_delay_seconds": 0}
        gateway.process._settings = gateway.process._settings.model_copy(update=soon)


async def test_other_paths_and_methods_are_refused_in_openais_form():
    async with gateway_over() as gateway:
        lost = await gateway.http.get("/v1/embeddings")
        wrong = await gateway.http.get("/v1/completions")
    assert (lost.status_code, wrong.status_code) == (404, 405)
    assert lost.json()["error"]["message"] == "GET /v1/embeddings is not served here"
    assert wrong.json()["error"]["type"] == "invalid_request_error"
