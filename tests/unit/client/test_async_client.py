import asyncio
import math

import pytest

from paceline import AsyncClient, FinishReason, Strategy, TimelineEvent, TokenOrigin, errors
from support.fake_orchestrator import (
    PROMPT_LENGTH,
    SEED,
    FakeOrchestrator,
    Leg,
    serving,
)
from support.ports import free_address
from support.waiting import until

WHOLE_TEXT = "3 4 5 6 7 "


@pytest.fixture
async def client(fake):
    async with AsyncClient(fake.address, timeout=60) as opened:
        yield opened


async def cancel_is_seen(fake):
    async with asyncio.timeout(90):
        await fake.cancelled.wait()


async def test_chunks_have_absolute_positions_text_and_origins(client):
    chunks = [chunk async for chunk in client.generate("x")]
    assert "".join(chunk.text for chunk in chunks) == WHOLE_TEXT
    assert [chunk.position for chunk in chunks] == [3, 4, 5, 6, 7]
    assert chunks[0].origins == (TokenOrigin.ACCEPTED_DRAFT,)


async def test_the_stream_tells_how_it_started_and_finished(client):
    stream = client.generate("x")
    assert stream.started is None
    assert stream.finished is None
    completion = await stream.collect()
    assert completion.text == WHOLE_TEXT
    assert completion.token_ids == (3, 4, 5, 6, 7)
    assert stream.started.strategy is Strategy.DISTRIBUTED
    assert stream.started.seed == SEED
    assert stream.finished.finish_reason is FinishReason.LENGTH
    assert stream.finished.usage.prompt_token_count == PROMPT_LENGTH
    assert stream.finished.statistics.fallbacks == {"target_lost": 1}
    assert stream.finished.timeline[0].server == "target-0"


async def test_nothing_is_sent_before_the_stream_is_iterated(client, fake):
    client.generate("x")
    assert await client.generate("y").text() == WHOLE_TEXT
    assert [request.text for request in fake.requests] == ["y"]


async def test_timeline_events_come_between_the_chunks(client):
    stream = client.generate("x", stream_timeline=True, max_tokens=2)
    kinds = [type(event).__name__ async for event in stream.events()]
    assert kinds == ["Chunk", "TimelineEvent"] * 2
    assert TimelineEvent.__name__ not in [
        type(chunk).__name__ async for chunk in client.generate("x", stream_timeline=True)
    ]


async def test_break_cancels_the_call(client, fake):
    fake.script = [Leg(chunks=2, hangs=True)]
    stream = client.generate("x")
    async for _ in stream:
        break
    await cancel_is_seen(fake)


async def test_the_end_of_the_with_block_cancels_the_call(client, fake):
    fake.script = [Leg(chunks=2, hangs=True)]
    async with client.generate("x") as stream:
        chunks = aiter(stream)
        await anext(chunks)
    await cancel_is_seen(fake)


async def test_cancelling_the_reading_task_cancels_the_call(client, fake):
    fake.script = [Leg(chunks=1, hangs=True)]
    reading = asyncio.create_task(client.generate("x").text())
    await until(lambda: fake.requests, what="it is asked")
    reading.cancel()
    await asyncio.wait((reading,))
    assert reading.cancelled()
    await cancel_is_seen(fake)


async def test_closing_under_a_reader_gives_it_a_typed_error(client, fake):
    fake.script = [Leg(chunks=1, hangs=True)]
    stream = client.generate("x")
    first = asyncio.Event()

    async def read():
        async for _ in stream:
            first.set()

    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(expect(errors.ClientCancelledError, read()))
        await first.wait()
        await stream.aclose()
    assert reader.done()


async def test_closing_the_client_under_a_reader_gives_it_a_typed_error(fake):
    fake.script = [Leg(chunks=1, hangs=True)]
    async with AsyncClient(fake.address, timeout=60) as client:
        stream = client.generate("x")

        async def read():
            async for _ in stream:
                await client.close()

        await expect(errors.ClientCancelledError, read())


@pytest.mark.parametrize("closed", ["generation", "client"])
async def test_closing_wakes_a_reader_that_waits_to_go_on(client, fake, closed):
    fake.script = [Leg(error=errors.DrainingError("away", retry_after_seconds=100))]
    stream = client.generate("x", timeout=1000, resume_attempts=1)
    async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
        tasks.create_task(expect(errors.ClientCancelledError, stream.text()))
        await until(lambda: stream.resumption_count, what="it waits to go on")
        await {"generation": stream.aclose, "client": client.close}[closed]()
    assert len(fake.requests) == 1


async def test_who_waits_to_go_on_keeps_no_place_at_the_endpoint_that_failed(client, fake):
    fake.script = [Leg(error=errors.DrainingError("away", retry_after_seconds=100))]
    stream = client.generate("x", timeout=1000, resume_attempts=1)
    (endpoint,) = client.endpoints
    async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
        tasks.create_task(expect(errors.ClientCancelledError, stream.text()))
        await until(lambda: stream.resumption_count, what="it waits to go on")
        assert endpoint.running_count == 0
        await stream.aclose()


async def test_a_closed_client_says_so_in_its_own_words(client):
    await client.close()
    await expect(errors.ClientCancelledError, client.generate("x").text())
    await expect(errors.ClientCancelledError, client.info())


async def expect(error, awaitable):
    with pytest.raises(error):
        await awaitable


async def test_a_left_generation_goes_on_without_gap_or_duplicate(client, fake):
    stream = client.generate("x", request_id="mine")
    async for chunk in stream:
        if chunk.position == 4:
            break
    rest = client.resume(stream)
    assert [chunk.position async for chunk in rest] == [5, 6, 7]
    assert await client.resume(stream).text() == WHOLE_TEXT
    assert list(fake.requests[1].resume_token_ids) == [3, 4]
    assert fake.requests[1].seed == SEED
    assert fake.requests[1].request_id == "mine"


async def test_iterating_again_goes_on_where_it_was_left(client, fake):
    stream = client.generate("x")
    async for chunk in stream:
        if chunk.position == 4:
            break
    assert await stream.text() == WHOLE_TEXT
    assert list(fake.requests[1].resume_token_ids) == [3, 4]


async def test_two_tasks_cannot_read_one_generation(client, fake):
    fake.script = [Leg(chunks=1, hangs=True)]
    stream = client.generate("x")
    first = asyncio.Event()

    async def read():
        async for _ in stream:
            first.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(expect(errors.ClientCancelledError, read()))
        await first.wait()
        with pytest.raises(errors.InvalidFieldError, match="two readers"):
            await stream.text()
        await stream.aclose()
    assert len(fake.requests) == 1


async def test_a_reader_that_comes_between_two_messages_takes_over(client, fake):
    stream = client.generate("x")
    one = aiter(stream)
    assert (await anext(one)).position == 3
    assert await stream.text() == WHOLE_TEXT
    with pytest.raises(errors.InvalidFieldError, match="two readers"):
        await anext(one)
    assert list(fake.requests[1].resume_token_ids) == [3]


async def test_a_refused_request_leaves_running_streams_where_they_are(client, fake):
    fake.script = [Leg(), Leg(error=errors.DrainingError("away"), refuses=True), Leg()]
    running = client.generate("x")
    chunks = aiter(running)
    assert (await anext(chunks)).position == 3
    assert await client.generate("y").text() == WHOLE_TEXT
    assert [chunk.position async for chunk in chunks] == [4, 5, 6, 7]
    one, refused, other = fake.peers
    assert one == refused != other


async def test_closing_the_client_under_a_unary_call_gives_it_a_typed_error(fake):
    fake.info_hangs = True
    async with AsyncClient(fake.address, timeout=60) as client, asyncio.TaskGroup() as tasks:
        info = tasks.create_task(expect(errors.ClientCancelledError, client.info()))
        await fake.info_asked.wait()
        await client.close()
    assert not info.cancelled()


async def test_the_connection_that_was_left_is_closed_with_its_last_stream(client, fake):
    fake.script = [Leg(), Leg(error=errors.DrainingError("away"), refuses=True), Leg()]
    chunks = aiter(client.generate("x"))
    await anext(chunks)
    await client.generate("y").text()
    (wires,) = next(iter(client.endpoints)).connection._wires.values()
    assert [wire.call_count for wire in wires] == [1, 0]
    await chunks.aclose()
    assert [wire.is_left for wire in wires] == [False]


def test_a_client_can_be_made_before_any_loop_and_used_by_one_after_the_other():
    address = free_address()
    client = AsyncClient(address)

    async def use():
        async with serving(FakeOrchestrator(address=address)):
            assert await client.generate("x").text() == WHOLE_TEXT
            return (await client.info()).model_name

    assert [asyncio.run(use()), asyncio.run(use())] == ["fake", "fake"]
    asyncio.run(client.close())


async def test_a_client_can_be_used_by_two_loops_at_once(client, fake):
    chunks = aiter(client.generate("x"))
    await anext(chunks)
    other = await asyncio.to_thread(asyncio.run, client.generate("y").text())
    assert other == WHOLE_TEXT
    assert [chunk.position async for chunk in chunks] == [4, 5, 6, 7]


@pytest.mark.parametrize("timeout", [-1, math.nan, -math.inf, "1", None])
def test_a_time_that_is_none_is_refused(timeout):
    with pytest.raises(errors.InvalidFieldError, match="timeout"):
        AsyncClient("127.0.0.1:1", timeout=timeout)


async def test_info_describes_the_servers(client):
    info = await client.info()
    assert info.model_name == "fake"
    assert info.servers[0].role == "target"
    assert info.servers[0].ready
