"""A connection is for who asks for something: silence ends it, and probes always get through."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

from paceline_gateway import process
from support.gateway import gateway_over

PROBE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def connected(gateway):
    host, _, port = gateway.process.addresses["address"].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


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
        connected(gateway) as (reader, writer),
    ):
        for _ in range(2):
            assert await asked(reader, writer) == 200
        writer.write(b"G")
        await ended(reader)


async def test_the_rest_of_a_body_that_was_answered_before_it_came_is_not_waited_for():
    early = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    async with (
        gateway_over(slow_reader_seconds=0.1) as gateway,
        connected(gateway) as (reader, writer),
    ):
        assert await asked(reader, writer, early) == 404
        writer.write(b"{")
        await ended(reader)


async def test_between_two_requests_a_connection_may_be_idle_for_longer_than_a_head_may_take():
    async with (
        gateway_over(slow_reader_seconds=0.1) as gateway,
        connected(gateway) as idle,
    ):
        assert await asked(*idle) == 200
        async with connected(gateway) as (silent, _):
            await ended(silent)
        assert await asked(*idle) == 200


async def test_a_gateway_with_too_many_connections_refuses_requests_and_answers_probes(
    monkeypatch,
):
    monkeypatch.setattr(process, "connection_limit", lambda: 2)
    async with gateway_over() as gateway, connected(gateway) as held:
        assert await asked(*held, PROBE.replace(b"health/live", b"v1/models")) == 200
        for path, status in (("/v1/models", 503), ("/health/live", 200), ("/health/ready", 200)):
            assert (await gateway.http.get(path)).status_code == status
