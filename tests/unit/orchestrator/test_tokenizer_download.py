"""What a server sends as its tokenizer is believed within limits."""

from __future__ import annotations

import asyncio
import hashlib
from types import SimpleNamespace

import pytest

from paceline.errors import DeadlineError, LoadingError, NoTargetError, UnsupportedError
from paceline.v1.model_service_pb2 import GetTokenizerResponse
from paceline_contract.limits import MOST_TOKENIZER_BYTES
from paceline_orchestrator.fleet import wire
from paceline_orchestrator.fleet.bad_answers import BadAnswerError
from paceline_orchestrator.front.tokenizer import Codecs
from support.fake_text import byte_tokenizer
from support.virtual_time import virtually

TOKENIZER = byte_tokenizer().to_str().encode()
OTHER = TOKENIZER + b"\n"


class Stream:
    """A server's answer, and how much of it was read."""

    def __init__(self, messages, *, total_bytes=0, pauses_seconds=()):
        self._messages = messages
        self._pauses_seconds = iter(pauses_seconds)
        self._total_bytes = total_bytes
        self.read_bytes = 0
        self.is_cancelled = False

    async def __aiter__(self):
        for data in self._messages:
            await asyncio.sleep(next(self._pauses_seconds, 0))
            self.read_bytes += len(data)
            yield GetTokenizerResponse(data=data, total_bytes=self._total_bytes)

    def cancel(self):
        self.is_cancelled = True


def a_server(stream, *, tokenizer=TOKENIZER, incarnation="1", name="target-0"):
    fingerprint = hashlib.sha256(tokenizer).hexdigest()
    return SimpleNamespace(
        name=name,
        facts=SimpleNamespace(tokenizer_fingerprint=fingerprint, incarnation=incarnation),
        models=SimpleNamespace(GetTokenizer=lambda *_, **__: stream),
    )


async def test_a_tokenizer_that_is_too_large_is_left_at_the_limit(monkeypatch):
    monkeypatch.setattr(wire, "MOST_TOKENIZER_BYTES", 10_000)
    stream, codecs = Stream([bytes(1000)] * 100), Codecs()
    with pytest.raises(BadAnswerError, match="more than 10000 bytes"):
        await codecs.fetch(a_server(stream))
    assert stream.read_bytes == 11_000
    assert stream.is_cancelled


async def test_a_tokenizer_as_large_as_the_limit_is_taken(monkeypatch):
    monkeypatch.setattr(wire, "MOST_TOKENIZER_BYTES", len(TOKENIZER))
    server, codecs = a_server(Stream([TOKENIZER[:100], TOKENIZER[100:]])), Codecs()
    await codecs.fetch(server)
    assert codecs.get(server.facts.tokenizer_fingerprint) is not None


async def test_a_tokenizer_that_came_damaged_is_not_kept():
    server, codecs = a_server(Stream([TOKENIZER[:-1]])), Codecs()
    with pytest.raises(BadAnswerError, match="not what it says"):
        await codecs.fetch(server)
    assert not codecs.has(server.facts.tokenizer_fingerprint)


@pytest.mark.parametrize("tokenizer", [b'{"version": "9.0"}', b"\xff"])
async def test_a_tokenizer_that_cannot_be_read_is_told_with_its_server(tokenizer):
    server, codecs = a_server(Stream([tokenizer]), tokenizer=tokenizer), Codecs()
    with pytest.raises(BadAnswerError, match="target-0's tokenizer cannot be read"):
        await codecs.fetch(server)
    assert not codecs.has(server.facts.tokenizer_fingerprint)


async def test_a_tokenizer_that_says_it_is_too_large_is_left_at_its_first_message():
    stream = Stream([bytes(1000)] * 100, total_bytes=MOST_TOKENIZER_BYTES + 1)
    with pytest.raises(BadAnswerError, match=f"more than {MOST_TOKENIZER_BYTES} bytes"):
        await Codecs().fetch(a_server(stream))
    assert stream.read_bytes == 1000


@virtually
async def test_a_server_that_sends_nothing_is_given_up_in_seconds():
    stream = Stream([TOKENIZER], pauses_seconds=[10.1])
    with pytest.raises(DeadlineError, match="target-0 sent nothing of its tokenizer for 10 s"):
        await Codecs().fetch(a_server(stream))
    assert stream.is_cancelled


@virtually
async def test_a_tokenizer_may_come_slowly_once_it_comes():
    stream = Stream([TOKENIZER[:100], TOKENIZER[100:]], pauses_seconds=[9.9, 40])
    server, codecs = a_server(stream), Codecs()
    await codecs.fetch(server)
    assert codecs.get(server.facts.tokenizer_fingerprint) is not None


@virtually
async def test_two_tokenizers_are_received_at_a_time_and_who_says_nothing_is_no_third():
    slow = [
        Stream([TOKENIZER[:100], TOKENIZER[100:]], pauses_seconds=[0, seconds])
        for seconds in (30, 40, 0)
    ]
    silent = Stream([TOKENIZER], pauses_seconds=[9])
    codecs = Codecs()
    async with asyncio.TaskGroup() as tasks:
        for stream in (silent, *slow):
            tasks.create_task(codecs.fetch(a_server(stream)))
        await asyncio.sleep(29)
        assert [it.read_bytes for it in slow] == [100, 100, 100]
        assert silent.read_bytes == len(TOKENIZER), "its message waits, and no more comes"
        await asyncio.sleep(2)
        assert slow[2].read_bytes == len(TOKENIZER)
        assert slow[1].read_bytes == 100


def without_tokenizer(name="target-0", **others):
    server = a_server(Stream([]), name=name, **others)
    server.models.GetTokenizer = lambda *_, **__: Failing(UnsupportedError("no such method"))
    return server


async def test_a_server_without_the_tokenizer_that_it_names_does_not_speak_for_the_others():
    old, whole = without_tokenizer(), a_server(Stream([TOKENIZER]), name="target-1")
    fingerprint, codecs = whole.facts.tokenizer_fingerprint, Codecs()
    assert codecs.choose([old, whole]) is old
    await codecs.fetch(old)
    assert not codecs.conclude(fingerprint, [old, whole])
    with pytest.raises(LoadingError, match="being fetched"):
        codecs.get(fingerprint)
    assert codecs.choose([old, whole]) is whole
    await codecs.fetch(whole)
    assert codecs.conclude(fingerprint, [old, whole])
    assert codecs.get(fingerprint) is not None


async def test_there_is_no_tokenizer_once_all_have_said_so_until_another_server_has_it():
    servers = [without_tokenizer(), without_tokenizer("target-1")]
    fingerprint, codecs = servers[0].facts.tokenizer_fingerprint, Codecs()
    assert not codecs.conclude(fingerprint, [])
    for server in servers:
        assert not codecs.conclude(fingerprint, servers)
        await codecs.fetch(server)
    assert codecs.choose(servers) is None
    assert codecs.conclude(fingerprint, servers)
    assert codecs.get(fingerprint) is None
    restarted = without_tokenizer(incarnation="2")
    assert codecs.choose([restarted]) is restarted
    whole = a_server(Stream([TOKENIZER]), name="target-2")
    assert codecs.choose([*servers, whole]) is whole
    assert codecs.conclude(fingerprint, [*servers, whole]), "requests go on meanwhile"
    await codecs.fetch(whole)
    assert codecs.get(fingerprint) is not None


async def test_a_damaged_tokenizer_is_not_taken_for_none():
    damaged, old = a_server(Stream([b"damaged"]), name="target-1"), without_tokenizer()
    fingerprint, codecs = old.facts.tokenizer_fingerprint, Codecs()
    await codecs.fetch(old)
    with pytest.raises(BadAnswerError):
        await codecs.fetch(damaged)
    assert not codecs.conclude(fingerprint, [old, damaged])
    with pytest.raises(NoTargetError, match="target-1 sent a tokenizer that is not what it says"):
        codecs.get(fingerprint)


async def test_a_refused_tokenizer_is_not_fetched_again_until_its_server_is_another():
    damaged, whole = a_server(Stream([b"damaged"])), a_server(Stream([TOKENIZER]), name="target-1")
    codecs = Codecs()
    fingerprint = damaged.facts.tokenizer_fingerprint
    with pytest.raises(LoadingError, match="being fetched"):
        codecs.get(fingerprint)
    assert codecs.choose([damaged]) is damaged
    with pytest.raises(BadAnswerError):
        await codecs.fetch(damaged)
    assert codecs.choose([damaged]) is None
    with pytest.raises(NoTargetError, match="target-0 sent a tokenizer that is not what it says"):
        codecs.get(fingerprint)
    assert codecs.choose([damaged, whole]) is whole
    restarted = a_server(Stream([TOKENIZER]), incarnation="2")
    assert codecs.choose([restarted]) is restarted
    await codecs.fetch(restarted)
    assert codecs.choose([damaged, restarted]) is None
    assert codecs.get(fingerprint) is not None


async def test_nothing_is_kept_of_servers_that_are_gone():
    damaged, codecs = a_server(Stream([b"damaged"])), Codecs()
    other = a_server(Stream([OTHER]), tokenizer=OTHER, name="target-1")
    fingerprint = damaged.facts.tokenizer_fingerprint
    with pytest.raises(BadAnswerError):
        await codecs.fetch(damaged)
    await codecs.fetch(other)
    codecs.forget_all_but([damaged, other])
    assert codecs.why_refused(fingerprint)
    assert codecs.has(other.facts.tokenizer_fingerprint)
    codecs.forget_all_but([])
    assert not codecs.why_refused(fingerprint)
    assert codecs.has(other.facts.tokenizer_fingerprint), "it may be back soon"
    codecs.forget_all_but([a_server(Stream([]), name="target-2")])
    assert not codecs.has(other.facts.tokenizer_fingerprint)


async def test_a_tokenizer_that_could_not_be_fetched_is_fetched_again():
    broken = a_server(Stream([]))
    broken.models.GetTokenizer = lambda *_, **__: Failing(LoadingError("not yet"))
    codecs = Codecs()
    with pytest.raises(LoadingError):
        await codecs.fetch(broken)
    assert codecs.choose([broken]) is broken


class Failing:
    """A call that a server ends with an error."""

    def __init__(self, error):
        self._error = error

    async def __aiter__(self):
        raise self._error
        yield

    def cancel(self):
        pass
