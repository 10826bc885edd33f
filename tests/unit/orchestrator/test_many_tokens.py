"""Lists of a million tokens are read and written off the event loop, part by part."""

from __future__ import annotations

import threading

import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.front import order_maker, servicer
from paceline_orchestrator.front.prompts import request_key, token_ids_of, tokens_message
from support.orchestrating import orchestrating, targets

MANY = 100_000


class Watched(list):
    """Tokens that say on which threads they were read, and how many at once."""

    def __init__(self, count):
        super().__init__(range(count))
        self.threads, self.counts = set(), set()

    def __getitem__(self, places):
        self.threads.add(threading.get_ident())
        found = super().__getitem__(places)
        self.counts.add(len(found))
        return found

    def __iter__(self):
        self.threads.add(threading.get_ident())
        return super().__iter__()


@pytest.mark.parametrize("count", [0, 1, 1000, MANY])
async def test_many_tokens_are_read_on_a_thread_in_parts(count):
    ids = Watched(count)
    assert await token_ids_of(ids) == tuple(range(count))
    assert (threading.get_ident() in ids.threads) == (count < MANY)
    assert not ids.counts or max(ids.counts) < MANY


@pytest.mark.parametrize("count", [0, 1, MANY])
def test_tokens_are_written_down_whole(count):
    message = tokens_message(tuple(range(count)), bytes_of=lambda it: b"%d" % it)
    assert [*message.token_ids] == [*range(count)]
    assert [*message.token_bytes] == [b"%d" % it for it in range(count)]
    assert not tokens_message((1,), bytes_of=None).token_bytes


@pytest.mark.parametrize(("count", "is_here"), [(100, None), (600_000, False)])
async def test_the_key_of_a_large_request_is_made_on_a_thread(count, is_here, monkeypatch):
    threads = []

    def watched(*arguments, **options):
        threads.append(threading.get_ident() == here)
        return request_key(*arguments, **options)

    here = threading.get_ident()
    monkeypatch.setattr(order_maker, "request_key", watched)
    async with orchestrating(targets=targets(1, context_length=1 << 20)) as system:
        await system.generate(token_ids=pb.TokenIds(ids=[200] * count), max_tokens=1)
    assert threads == ([] if is_here is None else [is_here]), "of a small one it is not needed"


async def test_many_tokens_are_written_down_on_a_thread(monkeypatch):
    threads = []

    def watched(*arguments, **options):
        threads.append(threading.get_ident())
        return tokens_message(*arguments, **options)

    monkeypatch.setattr(servicer, "tokens_message", watched)
    async with orchestrating(targets=targets(1)) as system:
        for length in (10, 1000):
            told = await system.stub.Tokenize(pb.TokenizeRequest(text="a" * length))
            assert len(told.token_ids) == length
    here = threading.get_ident()
    assert [it == here for it in threads] == [True, False]
