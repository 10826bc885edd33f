"""Headers and tokens that go along with calls, also through an authenticating proxy."""

import asyncio
import re
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider

from paceline import AsyncClient, Client, errors
from support.fake_orchestrator import FakeOrchestrator, Leg, serving

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LOST = errors.ConnectionLostError("gone")


async def test_a_clients_and_a_calls_metadata_go_along(use, fake):
    own = {"traceparent": TRACEPARENT, "x-bytes-bin": b"\x00\xff"}
    await use(
        fake.address,
        lambda client: client.generate("x", metadata=own).text(),
        metadata={"X-Tenant": "blue"},
    )
    await use(fake.address, lambda client: client.info(metadata=own))
    for seen in fake.metadata:
        assert seen["traceparent"] == TRACEPARENT
        assert seen["x-bytes-bin"] == b"\x00\xff"
    assert [seen.get("x-tenant") for seen in fake.metadata] == ["blue", None]


async def test_metadata_can_be_told_for_each_call(use, fake):
    numbers = iter("12")
    fake.script = [Leg(error=LOST, chunks=2)]
    await use(
        fake.address,
        lambda client: client.generate("x", resume_attempts=1).text(),
        metadata=lambda: {"x-call": next(numbers)},
    )
    assert [seen["x-call"] for seen in fake.metadata] == ["1", "2"]


async def test_each_call_has_a_token_of_its_own_resumptions_too(use, fake):
    tokens = iter(["first", "second"])
    fake.script = [Leg(error=LOST, chunks=2)]
    await use(
        fake.address,
        lambda client: client.generate("x", resume_attempts=1).text(),
        token=lambda: next(tokens),
    )
    assert [seen["authorization"] for seen in fake.metadata] == ["Bearer first", "Bearer second"]


async def test_a_token_can_be_waited_for(fake):
    async def token():
        await asyncio.sleep(0)
        return "late"

    async with AsyncClient(fake.address, token=token) as client:
        await client.generate("x").text()
        await client.info()
    assert [seen["authorization"] for seen in fake.metadata] == ["Bearer late"] * 2


async def test_a_generation_that_is_closed_while_it_waits_for_a_token_is_not_sent(fake):
    asked, given = asyncio.Event(), asyncio.Event()

    async def token():
        asked.set()
        await given.wait()
        return "late"

    async with AsyncClient(fake.address, token=token) as client, asyncio.TaskGroup() as tasks:
        stream = client.generate("x")
        reading = tasks.create_task(expect(errors.ClientCancelledError, stream.text()))
        await asked.wait()
        await stream.aclose()
        given.set()
        await reading
    assert not fake.requests


CALLS = {
    "generation": lambda client: client.generate("x").text(),
    "question": lambda client: client.info(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_token_is_waited_for_as_long_as_the_call_has_time(fake, call):
    async with (
        asyncio.timeout(90),
        AsyncClient(fake.address, token=asyncio.Event().wait, timeout=0.05) as client,
    ):
        with pytest.raises(errors.DeadlineError, match="the token did not come"):
            await call(client)
    assert not fake.requests


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_closed_client_waits_for_no_token(fake, call):
    asked = asyncio.Event()

    async def token():
        asked.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
        client = AsyncClient(fake.address, token=token)
        tasks.create_task(expect(errors.ClientCancelledError, call(client)))
        await asked.wait()
        await client.close()


async def test_a_generation_that_another_loop_closes_waits_for_no_token(fake):
    asked = threading.Event()

    async def token():
        asked.set()
        await asyncio.Event().wait()

    client = AsyncClient(fake.address, token=token)
    reading = asyncio.to_thread(asyncio.run, expect(errors.ClientCancelledError, client.info()))
    async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
        tasks.create_task(reading)
        await asyncio.to_thread(asked.wait)
        await client.close()


async def test_what_a_token_raises_as_a_timeout_the_call_raises_too(fake):
    async def token():
        raise TimeoutError("the vault sleeps")

    async with AsyncClient(fake.address, token=token) as client:
        await expect(TimeoutError, client.info())


async def expect(error, awaitable):
    with pytest.raises(error):
        await awaitable


async def test_what_a_token_raises_the_call_raises(use, fake):
    def token():
        raise LookupError("the vault is shut")

    with pytest.raises(LookupError, match="vault"):
        await use(fake.address, lambda client: client.generate("x").text(), token=token)
    with pytest.raises(LookupError, match="vault"):
        await use(fake.address, lambda client: client.info(), token=token)
    assert not fake.requests


@pytest.mark.parametrize("told", ["", "two words", "line\n", "ö", None, b"bytes"])
async def test_a_token_that_is_none_is_refused_and_never_shown(use, fake, told):
    with pytest.raises(errors.InvalidFieldError, match="token") as caught:
        await use(fake.address, lambda client: client.info(), token=lambda: told)
    assert not told or repr(told)[1:-1] not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"": "x"}, "not a metadata name"),
        ({"a b": "x"}, "not a metadata name"),
        ({":path": "x"}, "not a metadata name"),
        ({"grpc-timeout": "1S"}, "not a metadata name"),
        ({1: "x"}, "not a metadata name"),
        ({"x-a": "se\ncret"}, "printable ASCII"),
        ({"x-a": "secretö"}, "printable ASCII"),
        ({"x-a": 5}, "printable ASCII"),
        ({"x-a": b"secret"}, "-bin"),
        ({"x-a-bin": "secret"}, "-bin"),
    ],
)
def test_metadata_that_cannot_be_sent_is_refused_and_never_shown(metadata, why):
    with pytest.raises(errors.InvalidFieldError, match=why) as caught:
        AsyncClient("127.0.0.1:1", metadata=metadata)
    assert "cret" not in str(caught.value)
    with pytest.raises(errors.InvalidFieldError, match=why):
        Client("127.0.0.1:1").generate("x", metadata=metadata)


async def test_a_proxy_that_asks_who_calls_is_answered_wherever_a_stream_goes_on():
    one, two = (FakeOrchestrator(script=[Leg(error=LOST, chunks=1)]) for _ in range(2))
    async with AsyncExitStack() as stack:
        addresses = [
            (await stack.enter_async_context(serving(each))).address for each in (one, two)
        ]
        client = await stack.enter_async_context(AsyncClient(addresses, token=lambda: "t"))
        await client.generate("x").text()
    seen = [*one.metadata, *two.metadata]
    assert [each["authorization"] for each in seen] == ["Bearer t"] * 3


async def test_the_example_about_traces_puts_calls_below_the_current_span(fake):
    page = OPERATIONS.read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names = {}

    def call():
        exec(example.replace("127.0.0.1:50050", fake.address), names)
        tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
        with names["client"] as client, tracer.start_as_current_span("ask") as span:
            client.generate("x").text()
        return span.get_span_context()

    at = await asyncio.to_thread(call)
    (metadata,) = fake.metadata
    assert metadata["traceparent"].startswith(f"00-{at.trace_id:032x}-{at.span_id:016x}-")
