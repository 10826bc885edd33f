"""Long texts are worked on in threads, one of each client's at a time."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders

from paceline.errors import InvalidFieldError, OverloadedError
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.front import servicer
from paceline_orchestrator.front.text import StreamedText
from paceline_orchestrator.front.text_workers import TextWorkers
from support.fake_models import FakeModelServer
from support.fake_text import byte_tokenizer
from support.orchestrating import orchestrating
from support.waiting import until

LONG = 100_000


async def test_short_work_is_done_here_and_now():
    here = threading.current_thread()
    assert await TextWorkers().run(threading.current_thread, size=10, share="a") is here
    assert await TextWorkers().run(threading.current_thread, size=LONG, share="a") is not here


async def test_another_client_need_not_wait_for_all_the_long_texts_of_one():
    workers, release, done = TextWorkers(), threading.Event(), []

    def wait():
        release.wait(30)

    async def run(work, share):
        await workers.run(work, size=LONG, share=share)
        done.append(share)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(run(wait, "greedy"))
        await tasks.create_task(run(lambda: None, "modest"))
        assert done == ["modest"]
        release.set()
    assert done == ["modest", *["greedy"] * 5]


async def test_a_client_that_does_not_wait_gets_no_second_thread():
    workers, release, begun = TextWorkers(), threading.Event(), []

    def wait():
        begun.append(threading.current_thread())
        release.wait(30)

    impatient = [
        asyncio.create_task(workers.run(wait, size=LONG, share="greedy")) for _ in range(3)
    ]
    await asyncio.sleep(0)
    for task in impatient:
        task.cancel()
    await asyncio.wait(impatient)
    again = asyncio.create_task(workers.run(wait, size=LONG, share="greedy"))
    await workers.run(lambda: None, size=LONG, share="modest")
    assert len(begun) == 1
    release.set()
    await again
    assert len(begun) == 2


@pytest.mark.parametrize("size", [1, LONG])
async def test_what_the_work_raises_is_raised(size):
    def fail():
        raise LookupError("no such text")

    with pytest.raises(LookupError):
        await TextWorkers().run(fail, size=size, share="a")


async def test_work_that_takes_too_long_is_given_up_and_others_get_its_turn(monkeypatch):
    monkeypatch.setattr("paceline_orchestrator.front.text_workers._MOST_LOST", 3)
    workers, release = TextWorkers(most_seconds=1), threading.Event()
    stuck = [f"stuck {index}" for index in range(3)]
    for share in stuck:
        with pytest.raises(InvalidFieldError, match=r"prompt: .* has taken 1 s"):
            await workers.run(lambda: release.wait(30), size=LONG, share=share, field="prompt")
        with pytest.raises(OverloadedError, match="still works"):
            await workers.run(lambda: None, size=LONG, share=share)
        if share != stuck[-1]:
            assert await workers.run(lambda: "done", size=LONG, share="honest") == "done"
    with pytest.raises(OverloadedError, match="still works"):
        await workers.run(lambda: None, size=LONG, share="honest")
    assert await workers.run(lambda: "done", size=1, share="honest") == "done"
    release.set()
    await until(lambda: not workers._lost_shares, what="the threads have come to their end")
    for share in (*stuck, "honest"):
        assert await workers.run(lambda: "done", size=LONG, share=share) == "done"


async def test_after_a_short_text_took_long_none_is_worked_on_in_the_loop(monkeypatch):
    times = iter([0.0, 1.0])
    monkeypatch.setattr(
        "paceline_orchestrator.front.text_workers.time",
        SimpleNamespace(thread_time=lambda: next(times)),
    )
    workers, here = TextWorkers(), threading.current_thread()
    assert await workers.run(threading.current_thread, size=1, share="a") is here
    assert await workers.run(threading.current_thread, size=1, share="a") is not here


async def test_a_thread_outlives_a_panic():
    """What a library in Rust raises when it gives up is no Exception."""

    def panic():
        raise PanicException("it gave up")

    workers = TextWorkers()
    for _ in range(3):
        with pytest.raises(PanicException):
            await workers.run(panic, size=LONG, share="a")
    assert await workers.run(lambda: "done", size=LONG, share="a") == "done"


class PanicException(BaseException):
    pass


@pytest.mark.parametrize("is_probed", [True, False])
async def test_a_text_that_is_found_by_asking_the_decoder_is_long_at_fewer_tokens(
    is_probed, monkeypatch
):
    threads: list[threading.Thread] = []

    def noting_threads(work):
        def work_and_note(*arguments):
            threads.append(threading.current_thread())
            return work(*arguments)

        return work_and_note

    monkeypatch.setattr(servicer, "whole_text", noting_threads(servicer.whole_text))
    monkeypatch.setattr(StreamedText, "resume", noting_threads(StreamedText.resume))
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    if is_probed:
        steps = [decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    target = FakeModelServer("target", tokenizer=tokenizer.to_str().encode(), context_length=2000)
    async with orchestrating(targets=[target]) as system:
        for count in (20, 200):
            await system.stub.Detokenize(pb.DetokenizeRequest(token_ids=[65] * count))
            await system.generate(max_tokens=300, resume_token_ids=[65] * count)
    here = threading.current_thread()
    assert [it is here for it in threads] == [True, True, *[not is_probed] * 2]
