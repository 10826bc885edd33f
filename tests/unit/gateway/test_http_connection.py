"""A connection is for who asks for something: silence ends it, and probes always get through."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress

import pytest

from paceline_gateway import process
from support.fake_orchestrator import FakeOrchestrator, Leg
from support.gateway import gateway_over
from support.waiting import until

PROBE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
MODELS = PROBE.replace(b"health/live", b"v1/models")
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
GENERATE = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 32\r\n\r\n"
    b'{"model": "fake", "prompt": "p"}'
)


async def asked(reader, writer, request=PROBE):
    """Send a request and return the answer's status."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    await reader.readexactly(int(length))
    return int(head.split()[1])


async def ended(reader):
    async with asyncio.timeout(30):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""


async def test_a_later_head_that_does_not_come_ends_the_connection_as_a_first_one():
    async with (
        gateway_over(slow_reader_seconds=0.1) as gateway,
        gateway.connected() as (reader, writer),
    ):
        for _ in range(2):
            assert await asked(reader, writer) == 200
        writer.write(b"G")
        await ended(reader)


async def test_the_rest_of_a_body_that_was_answered_before_it_came_is_not_waited_for():
    early = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    async with (
        gateway_over(slow_reader_seconds=0.1) as gateway,
        gateway.connected() as (reader, writer),
    ):
        assert await asked(reader, writer, early) == 404
        writer.write(b"{")
        await ended(reader)


async def test_between_two_requests_a_connection_may_be_idle_for_longer_than_a_head_may_take():
    async with (
        gateway_over(slow_reader_seconds=0.1) as gateway,
        gateway.connected() as idle,
    ):
        assert await asked(*idle) == 200
        async with gateway.connected() as (silent, _):
            await ended(silent)
        assert await asked(*idle) == 200


@pytest.mark.parametrize(
    ("settings", "served_after", "closed_after"),
    [({}, 601, 621), ({"keep_alive_seconds": 5}, 4, 6)],
    ids=["by default", "as set"],
)
async def test_an_idle_connection_outlives_those_of_the_balancers_in_front(
    monkeypatch, settings, served_after, closed_after
):
    loop, later = asyncio.get_running_loop(), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + later)
    async with gateway_over(**settings) as gateway, gateway.connected() as idle:
        for _ in range(2):
            assert await asked(*idle) == 200
            later += served_after
            await asyncio.sleep(0)  # what is due by now runs before the next request comes
        assert await asked(*idle) == 200
        later += closed_after
        await ended(idle[0])


async def test_a_gateway_whose_connections_are_all_busy_refuses_requests_and_answers_probes(
    monkeypatch,
):
    monkeypatch.setattr(process, "connection_limit", lambda: 1)
    fake = FakeOrchestrator(script=[Leg(hangs=True)])
    async with gateway_over(fake) as gateway, gateway.connected() as (_, writer):
        writer.write(GENERATE)
        await until(lambda: fake.requests, what="the request runs")
        for path, status in (("/v1/models", 503), ("/health/live", 200), ("/health", 200)):
            assert (await gateway.http.get(path)).status_code == status


async def test_the_connection_that_is_silent_for_longest_makes_room_and_the_log_counts_them(
    monkeypatch, caplog
):
    monkeypatch.setattr(process, "connection_limit", lambda: 2)
    async with AsyncExitStack() as held, gateway_over() as gateway:
        used = await held.enter_async_context(gateway.connected())
        silent, _ = await held.enter_async_context(gateway.connected())
        # The first one spoke after the second one had come, so the second one is older.
        assert await asked(*used, MODELS) == 200
        oldest_first = [silent, used[0]]
        for _ in range(3):
            new = await held.enter_async_context(gateway.connected())
            assert await asked(*new, MODELS) == 200
            await ended(oldest_first.pop(0))
            oldest_first.append(new[0])
    told = [it.getMessage() for it in caplog.records if "limit of connections" in it.getMessage()]
    assert [int(line.split()[6]) for line in told] == [1, 2]


async def test_what_a_body_in_chunks_is_followed_by_is_not_read():
    hidden = (
        b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    )
    async with gateway_over() as gateway, gateway.connected() as (reader, writer):
        writer.write(hidden + b"\n" + PROBE)
        assert (await reader.read()).count(b"HTTP/1.1") == 1


async def test_a_body_that_breaks_while_it_is_awaited_is_refused_and_no_error_of_the_gateway(
    caplog,
):
    async with gateway_over() as gateway, gateway.connected() as (reader, writer):
        writer.write(CHUNKED + b"zz\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    assert not [it for it in caplog.records if it.levelname == "ERROR"]


async def test_a_body_that_breaks_after_it_was_answered_is_no_error_of_the_gateway(caplog):
    early = CHUNKED.replace(b"/v1/completions", b"/nowhere")
    async with gateway_over() as gateway, gateway.connected() as (reader, writer):
        writer.write(early)
        assert await asked(reader, writer, b"") == 404
        writer.write(b"zz\r\n")
        await ended(reader)
    assert not [it for it in caplog.records if it.levelname == "ERROR"]


async def test_a_client_that_waits_for_a_go_ahead_or_offers_another_protocol_is_answered():
    body = b'{"model": "fake", "prompt": "p"}'
    head = GENERATE.partition(b"\r\n\r\n")[0]
    async with gateway_over() as gateway:
        async with gateway.connected() as (reader, writer):
            writer.write(head + b"\r\nExpect: 100-continue\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            assert await asked(reader, writer, body) == 200
        async with gateway.connected() as ends:
            offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
            for _ in range(2):
                assert await asked(*ends, PROBE[:-2] + offer + b"\r\n") == 200
