"""The life of a node that helps another one with its model."""

from __future__ import annotations

import asyncio
import threading

import pytest

from paceline_model_server.node_part import PartProcess
from paceline_model_server.settings import ModelServerSettings

GONE = "the node that serves is gone"


class Part:
    """What vLLM would hold, with two ends to wait for."""

    def __init__(self) -> None:
        self.leader_gone = threading.Event()
        self.processes_ended = threading.Event()

    def wait_for_leader(self) -> None:
        self.leader_gone.wait(60)

    def wait_for_processes(self) -> None:
        self.processes_ended.wait(60)


@pytest.fixture
def part(monkeypatch):
    made = Part()
    monkeypatch.setattr("paceline_engine.vllm_backend.load.load_part", lambda *_, **__: made)
    yield made
    made.leader_gone.set()
    made.processes_ended.set()


async def begun() -> PartProcess:
    process = PartProcess(ModelServerSettings(backend="vllm", model="a"))
    await process.begin()
    return process


@pytest.mark.parametrize("end", ["leader_gone", "processes_ended"])
async def test_after_a_signal_a_helping_node_stays_until_its_part_is_of_no_use(part, end):
    process = await begun()
    process.stop_soon()  # what a signal does
    assert await process.stopping() is None
    finish = asyncio.create_task(process.finish())
    await asyncio.sleep(0.2)
    assert not finish.done()
    getattr(part, end).set()
    await asyncio.wait_for(finish, 10)


async def test_without_a_signal_the_end_of_the_first_node_is_a_failure(part):
    process = await begun()
    part.leader_gone.set()
    assert await asyncio.wait_for(process.stopping(), 10) == GONE
    await asyncio.wait_for(process.finish(drain=False), 10)


async def test_a_helping_node_whose_first_one_is_gone_already_does_not_wait_for_it(part):
    process = await begun()
    part.leader_gone.set()
    assert await asyncio.wait_for(process.stopping(), 10) == GONE
    await asyncio.wait_for(process.finish(), 10)
