"""A client's connection, without a network: who stalls is given up, who leaves is noticed."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from paceline.errors import ClientCancelledError
from paceline_gateway.errors import RequestError
from paceline_gateway.http.connection import Connection
from paceline_gateway.http.request_body import BodyRules


def connection(*, receive=None, send=None, stall_seconds=5.0, has_cut=None):
    async def forever(*_):
        await asyncio.Event().wait()

    return Connection(
        {"path": "/", "method": "POST"},
        receive or forever,
        send or forever,
        request_id="r",
        stall_seconds=stall_seconds,
        has_cut=has_cut or asyncio.Event(),
    )


def rules(**changed):
    async def a_mebibyte():
        return 1 << 20

    values = {
        "ceiling_bytes": 4 << 20,
        "most_bytes": a_mebibyte,
        "keep": lambda _: None,
        "mebibyte_seconds": 5.0,
    }
    return BodyRules(**values | changed)


async def test_a_client_whose_buffers_stay_full_is_given_up():
    async with asyncio.timeout(90):
        with pytest.raises(ClientCancelledError, match="does not read"):
            await connection(stall_seconds=0.01).event("x")


async def test_a_body_that_drips_is_not_waited_for():
    async def drips():
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"", "more_body": True}

    async with asyncio.timeout(30):
        with pytest.raises(RequestError) as refused:
            await connection(receive=drips).body(rules(mebibyte_seconds=0.05), headers={})
    assert refused.value.status == 408


async def test_the_rest_of_a_refused_body_is_not_waited_for_once_the_gateway_ends():
    sent, has_cut, is_answered = [], asyncio.Event(), asyncio.Event()

    async def send(message):
        sent.append(message)
        if "body" in message:
            is_answered.set()

    client = connection(send=send, stall_seconds=1000.0, has_cut=has_cut)
    refusing = asyncio.ensure_future(client.refuse(RequestError("too large", status=413)))
    await is_answered.wait()
    await asyncio.sleep(0)
    assert not refusing.done()
    assert sent[-1]["more_body"]
    has_cut.set()
    async with asyncio.timeout(90):
        await refusing
    assert not sent[-1].get("more_body")


async def test_work_ends_with_its_client_and_knows_it():
    ends = []

    async def work():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def leaves():
        return {"type": "http.disconnect"}

    with pytest.raises(ClientCancelledError, match="went away"):
        await connection(receive=leaves).while_connected(work())
    assert ends == ["cancelled"]


async def test_the_works_result_and_failure_are_the_callers():
    async def fail():
        raise ValueError("mine")

    assert await connection().while_connected(asyncio.sleep(0, result=7)) == 7
    with pytest.raises(ValueError, match="mine"):
        await connection().while_connected(fail())


async def test_a_cancel_from_outside_is_no_leaving_client():
    waiting = asyncio.create_task(connection().while_connected(asyncio.Event().wait()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_what_is_no_number_of_json_is_told_as_null(value):
    sent = []

    async def send(message):
        sent.append(message.get("body", b"").decode())

    content = {"rates": [0.5, value], "inner": {"each": (value, 1, "text")}}
    expected = {"rates": [0.5, None], "inner": {"each": [None, 1, "text"]}}
    client = connection(send=send)
    await client.answer(content)
    await client.event(content)
    whole, event = sent[1], sent[2].removeprefix("data: ")
    for text in (whole, event):
        assert json.loads(text, parse_constant=lambda word: pytest.fail(word)) == expected


@pytest.mark.parametrize("separator", ["\x85", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c"])
async def test_an_event_is_one_line_for_whoever_reads_by_lines(separator):
    sent = []

    async def send(message):
        sent.append(message.get("body", b"").decode())

    await connection(send=send).event({"text": f"a{separator}b"})
    (event,) = [it for it in sent if it]
    line, empty = event.splitlines()
    assert not empty
    assert json.loads(line.removeprefix("data: ")) == {"text": f"a{separator}b"}
