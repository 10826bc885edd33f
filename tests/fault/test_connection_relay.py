"""The relay of connections is true to what it relays, and each of its faults is what it says."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from support.connection_relay import ConnectionRelay
from support.waiting import until

SOON_SECONDS = 0.1


@asynccontextmanager
async def relayed():
    """Yield a relay before a server that sends back what it gets."""
    heard = []

    async def echo(reader, writer):
        try:
            while data := await reader.read(65536):
                heard.append(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            heard.append("reset")
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with ConnectionRelay(f"127.0.0.1:{port}") as relay:
        yield relay, heard
    server.close()


@asynccontextmanager
async def connected(relay):
    host, _, port = relay.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    yield reader, writer
    writer.transport.abort()


async def hears_nothing(reader):
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(reader.read(1), SOON_SECONDS)
    return True


async def said(reader, writer, words=b"hello"):
    writer.write(words)
    return await asyncio.wait_for(reader.readexactly(len(words)), 30)


async def test_bytes_pass_both_ways_whatever_their_number():
    async with relayed() as (relay, _), connected(relay) as (reader, writer):
        megabytes = bytes(range(256)) * 8192
        writer.write(megabytes)
        assert await reader.readexactly(len(megabytes)) == megabytes
        assert relay.hits == 0


async def test_the_end_of_one_side_is_the_end_of_the_other():
    async with relayed() as (relay, _), connected(relay) as (reader, writer):
        await said(reader, writer)
        writer.close()
        await until(lambda: not relay.connection_count, what="the relay's connection ended")


async def test_a_delay_is_that_of_a_round_trip():
    async with relayed() as (relay, _), connected(relay) as (reader, writer):
        relay.delay(round_trip_seconds=0.4)
        begins = asyncio.get_running_loop().time()
        await said(reader, writer)
        assert asyncio.get_running_loop().time() - begins >= 0.4
        assert relay.hits > 0


async def test_what_is_delayed_does_not_wait_for_each_other():
    async with relayed() as (relay, heard), connected(relay) as (_, writer):
        relay.delay(round_trip_seconds=0.6)
        words = [b"%d," % index for index in range(100)]
        for word in words:
            writer.write(word)
            await writer.drain()
            await asyncio.sleep(0.001)
        # One after the other they would take 30 s.
        await until(
            lambda: b"".join(heard) == b"".join(words), what="all of it came", within_seconds=20
        )
        assert len(heard) > 10, "they came apart"


@pytest.mark.parametrize("directions", [(), ("up",), ("down",)])
async def test_a_stalled_connection_stays_open_and_goes_on_later(directions):
    async with relayed() as (relay, heard), connected(relay) as (reader, writer):
        await said(reader, writer, b"before")
        relay.stall(*directions)
        writer.write(b"during")
        await until(lambda: relay.hits, what="it stalls")
        assert await hears_nothing(reader)
        assert (b"during" in heard) == (directions == ("down",))
        relay.heal()
        assert await reader.readexactly(6) == b"during"


async def test_a_black_hole_takes_connections_and_says_nothing():
    async with relayed() as (relay, heard):
        relay.black_hole()
        async with connected(relay) as (reader, writer):
            writer.write(b"hello")
            await until(lambda: relay.hits, what="it is taken")
            assert await hears_nothing(reader)
            assert not heard
            relay.heal()
            assert await reader.readexactly(5) == b"hello"


async def test_a_cut_comes_in_the_middle_of_what_is_said():
    async with relayed() as (relay, _), connected(relay) as (reader, writer):
        await said(reader, writer)
        relay.cut()
        writer.write(b"12345678")
        assert await reader.read() == b"1234"
        assert relay.hits == 1
        async with connected(relay) as again:
            assert await said(*again) == b"hello"


async def test_a_reset_is_felt_on_both_sides_and_does_not_last():
    async with relayed() as (relay, heard), connected(relay) as (reader, writer):
        await said(reader, writer)
        relay.reset()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await until(lambda: "reset" in heard, what="the server feels it, too")
        async with connected(relay) as again:
            assert await said(*again) == b"hello"


async def test_where_no_server_is_connections_end():
    async with (
        ConnectionRelay("127.0.0.1:1") as relay,
        connected(relay) as (reader, _),
    ):
        assert await reader.read() == b""
