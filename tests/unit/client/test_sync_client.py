import asyncio
import threading
from contextlib import suppress

import pytest

from paceline import Client, TimelineEvent, errors
from support.fake_orchestrator import Leg
from support.waiting import eventually

WHOLE_TEXT = "3 4 5 6 7 "


@pytest.fixture
def in_thread(fake):
    """Run a function of a blocking client beside the event loop that serves it."""

    async def run(function):
        def call():
            with Client(fake.address, timeout=60) as client:
                return function(client)

        return await asyncio.to_thread(call)

    return run


async def test_streams_collects_and_describes(in_thread):
    def use(client):
        stream = client.generate("x")
        texts = [chunk.text for chunk in stream]
        return texts, stream.finished, client.generate("x").text(), client.info()

    texts, finished, whole, info = await in_thread(use)
    assert "".join(texts) == whole == WHOLE_TEXT
    assert finished.usage.completion_token_count == 5
    assert info.model_name == "fake"


async def test_timeline_events_come_between_the_chunks(in_thread):
    events = await in_thread(lambda c: list(c.generate("x", stream_timeline=True).events()))
    assert isinstance(events[1], TimelineEvent)


async def test_break_cancels_the_call(in_thread, fake):
    fake.script = [Leg(chunks=2, hangs=True)]

    def leave(client):
        held = client.generate("x")
        for _ in held:
            break
        # Held, and its client open, so that only the break can have cancelled it.
        eventually(fake.cancelled.is_set, what="the server hears of it")
        assert held.finished is None

    await in_thread(leave)


async def test_a_left_generation_goes_on_where_it_was(in_thread):
    def use(client):
        with client.generate("x") as stream:
            for chunk in stream:
                if chunk.position == 4:
                    break
        with pytest.raises(errors.ClientCancelledError):
            next(iter(stream))
        return [chunk.position for chunk in client.resume(stream)]

    assert await in_thread(use) == [5, 6, 7]


@pytest.mark.parametrize("closed", ["generation", "client"])
async def test_closing_wakes_a_reader_that_waits_to_go_on(in_thread, fake, closed):
    fake.script = [Leg(error=errors.DrainingError("away", retry_after_seconds=100))]

    def use(client):
        stream, ended = client.generate("x", timeout=1000, resume_attempts=1), []

        def read():
            with suppress(errors.ClientCancelledError):
                ended.append(stream.text())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        (endpoint,) = client.endpoints
        eventually(
            lambda: stream.resumption_count and not endpoint.running_count,
            what="it waits to go on, and keeps no place at the endpoint",
        )
        {"generation": stream, "client": client}[closed].close()
        reader.join(90)
        assert not reader.is_alive()
        assert ended == []

    await in_thread(use)
    assert len(fake.requests) == 1


async def test_two_threads_cannot_read_one_generation(in_thread, fake):
    fake.script = [Leg(chunks=1, hangs=True)]

    def use(client):
        stream, ended = client.generate("x"), []

        def read():
            with suppress(errors.ClientCancelledError):
                ended.append(stream.text())

        reader = threading.Thread(target=read)
        reader.start()
        waits(stream)
        with pytest.raises(errors.InvalidFieldError, match="two readers"):
            stream.text()
        stream.close()
        reader.join(90)
        assert not reader.is_alive()
        assert ended == []

    await in_thread(use)


async def test_a_refused_request_connects_anew(in_thread, fake):
    fake.script = [Leg(), Leg(error=errors.DrainingError("away"), refuses=True), Leg()]

    def use(client):
        chunks = iter(client.generate("x"))
        next(chunks)
        other = client.generate("y").text()
        wires = next(iter(client.endpoints)).connection._wires
        assert [wire.is_left for wire in wires] == [True, False]
        rest = [chunk.position for chunk in chunks]
        assert [wire.is_left for wire in wires] == [False], "the other one is closed"
        return other, rest

    assert await in_thread(use) == (WHOLE_TEXT, [4, 5, 6, 7])
    one, refused, other = fake.peers
    assert one == refused != other


@pytest.mark.parametrize("closed", ["generation", "client"])
async def test_closing_under_a_reader_gives_it_a_typed_error(in_thread, fake, closed):
    fake.script = [Leg(chunks=1, hangs=True)]

    def use(client):
        stream = client.generate("x")
        close = {"generation": stream, "client": client}[closed].close
        closing = threading.Thread(target=lambda: (waits(stream), close()))
        closing.start()
        with pytest.raises(errors.ClientCancelledError, match=f"the {closed} was closed"):
            stream.text()
        closing.join(90)

    await in_thread(use)
    assert len(fake.requests) == 1


async def test_closing_the_client_under_a_unary_call_gives_it_a_typed_error(in_thread, fake):
    fake.info_hangs = True

    def use(client):
        closing = threading.Thread(
            target=lambda: (eventually(fake.info_asked.is_set, what="it asks"), client.close())
        )
        closing.start()
        with pytest.raises(errors.ClientCancelledError, match="the client was closed"):
            client.info()
        closing.join(90)

    await in_thread(use)


@pytest.mark.parametrize("call", ["info", "generate"])
def test_a_client_that_is_closed_while_a_call_gets_its_token_says_so(call):
    def token():
        client.close()
        return "key"

    client = Client("127.0.0.1:1", token=token)
    calls = {"info": client.info, "generate": lambda: client.generate("x").text()}
    with pytest.raises(errors.ClientCancelledError, match="the client was closed"):
        calls[call]()


def waits(stream):
    eventually(lambda: stream.transcript.chunks and stream._is_awaited, what="it waits")


async def test_a_closed_client_says_so_in_its_own_words(in_thread):
    def use(client):
        client.close()
        with pytest.raises(errors.ClientCancelledError):
            client.generate("x").text()
        with pytest.raises(errors.ClientCancelledError):
            client.info()

    await in_thread(use)
