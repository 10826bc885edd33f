"""A client of several orchestrators: spread, and what one leaves unfinished goes on at another."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from paceline import AsyncClient, Client, errors
from support.fake_orchestrator import SEED, BareCancelError, FakeOrchestrator, Leg, serving

LOST = errors.ConnectionLostError("gone")
WHOLE_TEXT = "3 4 5 6 7 "
NOBODY = "127.0.0.1:1"


@pytest.fixture
async def fakes():
    async with serving(FakeOrchestrator()) as one, serving(FakeOrchestrator()) as other:
        yield [one, other]


def addresses(fakes):
    return [fake.address for fake in fakes]


def requests(fakes):
    return [request for fake in fakes for request in fake.requests]


async def test_requests_are_spread(use, fakes):
    def streams(client):
        return [client.generate(str(number)) for number in range(6)]

    def do(client):
        if isinstance(client, Client):
            return [stream.text() for stream in streams(client)]
        return asyncio.gather(*(stream.text() for stream in streams(client)))

    assert set(await use(addresses(fakes), do)) == {WHOLE_TEXT}
    assert [len(fake.requests) for fake in fakes] == [3, 3]


@pytest.mark.parametrize("between", ["a list", "commas"])
async def test_a_stream_that_breaks_goes_on_at_another_by_itself(use, fakes, between):
    for fake in fakes:  # whichever comes first breaks; each breaks once
        fake.script = [Leg(error=LOST, chunks=2)]
    given = {
        "a list": addresses(fakes),
        "commas": ", ".join(addresses(fakes)),
    }[between]
    assert await use(given, lambda client: client.generate("x").text()) == WHOLE_TEXT
    parts = sorted((list(it.resume_token_ids) for it in requests(fakes)), key=len)
    assert parts == [[], [3, 4], [3, 4, 5, 6]]
    assert {it.seed for it in requests(fakes) if it.resume_token_ids} == {SEED}
    assert all(fake.requests for fake in fakes)


async def test_a_name_that_leads_to_several_is_as_good_as_a_list():
    async with AsyncExitStack() as servers:
        fakes = [FakeOrchestrator(script=[Leg(chunks=2, hangs=True)]) for _ in range(2)]
        ends = {}
        for fake in fakes:
            end = AsyncExitStack()
            await servers.enter_async_context(end)
            await end.enter_async_context(serving(fake))
            ends[fake.address] = end
        target = f"ipv4:{','.join(addresses(fakes))}"  # what DNS would make of a name
        async with AsyncClient(target, timeout=60) as client:
            text = ""
            async for chunk in client.generate("x"):
                text += chunk.text
                if chunk.position == 4:
                    (first,) = [fake for fake in fakes if fake.requests]
                    for fake in fakes:
                        fake.script = []
                    await ends[first.address].aclose()
            assert text == WHOLE_TEXT
    assert all(fake.requests for fake in fakes)


async def test_resume_attempts_of_0_leave_it_to_the_caller(use, fakes):
    for fake in fakes:
        fake.script = [Leg(error=LOST, chunks=2)]
    with pytest.raises(errors.ConnectionLostError):
        await use(addresses(fakes), lambda client: client.generate("x", resume_attempts=0).text())
    assert len(requests(fakes)) == 1


async def test_with_one_orchestrator_a_broken_stream_is_the_callers(use, fakes):
    fakes[0].script = [Leg(error=LOST, chunks=2)]
    with pytest.raises(errors.ConnectionLostError):
        await use(fakes[0].address, lambda client: client.generate("x").text())


@pytest.mark.parametrize("what", ["generate", "info"])
async def test_who_cannot_be_reached_is_passed_over(use, fakes, what):
    do = {
        "generate": lambda client: client.generate("x").text(),
        "info": lambda client: client.info(),
    }[what]
    for given in ([NOBODY, fakes[0].address], [fakes[0].address, NOBODY]):
        assert await use(given, do)


async def test_where_nobody_can_be_reached_an_unheard_request_says_so_soon(use):
    with pytest.raises(errors.ConnectionLostError):
        await use([NOBODY, "127.0.0.1:2"], lambda client: client.generate("x").text())
    with pytest.raises(errors.ConnectionLostError):
        await use([NOBODY, "127.0.0.1:2"], lambda client: client.info())


@pytest.mark.parametrize(
    "error", [errors.OverloadedError("full"), errors.NoTargetError("none"), BareCancelError("x")]
)
async def test_who_refuses_is_not_the_last_word(use, fakes, error):
    for fake in fakes:
        fake.script = [Leg(error=error, refuses=True)]
    fakes[1].script = []
    for _ in range(2):
        assert await use(addresses(fakes), lambda client: client.generate("x").text())


async def test_where_all_are_full_an_unheard_request_is_not_sent_again(use, fakes):
    for fake in fakes:
        fake.script = [Leg(error=errors.OverloadedError("full"), refuses=True)] * 9
    with pytest.raises(errors.OverloadedError):
        await use(addresses(fakes), lambda client: client.generate("x").text())
    assert [len(fake.requests) for fake in fakes] == [1, 1]


async def test_a_wrong_request_goes_to_nobody_else(use, fakes):
    for fake in fakes:
        fake.script = [Leg(error=errors.InvalidFieldError.of("top_p", "must be in (0, 1]"))]
    with pytest.raises(errors.InvalidFieldError):
        await use(addresses(fakes), lambda client: client.generate("x").text())
    assert len(requests(fakes)) == 1


async def test_a_stream_counts_how_often_it_went_on(fakes):
    for fake in fakes:
        fake.script = [Leg(error=LOST, chunks=1)]
    async with AsyncClient(addresses(fakes)) as client:
        stream = client.generate("x")
        await stream.text()
    assert stream.resumption_count == 2


async def test_leaving_the_stream_cancels_it_where_it_runs_now(fakes):
    for fake in fakes:
        fake.script = [Leg(error=LOST, chunks=2), Leg(chunks=1, hangs=True)]
    fakes[1].script = fakes[0].script  # one script: the first call breaks, the second hangs
    async with AsyncClient(addresses(fakes), timeout=60) as client:
        async for chunk in client.generate("x"):
            if chunk.position == 5:
                break
        async with asyncio.timeout(90):
            await asyncio.wait(
                [asyncio.ensure_future(fake.cancelled.wait()) for fake in fakes],
                return_when=asyncio.FIRST_COMPLETED,
            )
    assert [each.running_count for each in client.endpoints] == [0, 0]


@pytest.mark.parametrize("address", [[], "", ",", "127.0.0.1:1,"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(errors.InvalidFieldError, match="HOST:PORT"):
        AsyncClient(address)
