"""Whose texts are known to have been where."""

from __future__ import annotations

import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_orchestrator.fleet.familiarity import Familiarity
from support.virtual_servers import VirtualServer
from support.virtual_system import VirtualDiscovery, virtual_system
from support.virtual_time import virtually

LONG = tuple(range(1000))


def lengths(known, text, *names, share="ann"):
    familiar = known.text(text, share=share)
    return [familiar.length_at(name) for name in names]


def note(known, text, *names, share="ann"):
    familiar = known.text(text, share=share)
    for name in names:
        familiar.note(name)


def test_a_server_knows_the_longest_beginning_that_it_had():
    known = Familiarity()
    note(known, LONG[:100], "near")
    note(known, LONG[:600], "far")
    assert lengths(known, LONG, "near", "far", "other") == [64, 512, 0]
    assert lengths(known, LONG[:70], "near", "far", "other") == [64, 64, 0]
    parted = (*LONG[:200], 7777, *LONG[201:])
    assert lengths(known, parted, "near", "far") == [64, 128]


@pytest.mark.parametrize(("length", "expected"), [(31, 0), (32, 32), (33, 32), (64, 64)])
def test_texts_that_no_server_keeps_are_not_known(length, expected):
    known = Familiarity()
    note(known, LONG[:length], "it")
    assert lengths(known, LONG, "it") == [expected]


def test_another_clients_text_is_another_text():
    known = Familiarity()
    note(known, LONG, "it", share="ann")
    assert lengths(known, LONG, "it", share="bob") == [0]


def test_a_text_that_is_noted_is_known_to_the_next_request_and_not_to_its_own():
    known = Familiarity()
    familiar = known.text(LONG, share="")
    familiar.note("it")
    assert familiar.length_at("it") == 0
    assert lengths(known, LONG, "it", share="") == [512]


def test_what_was_noted_long_ago_is_forgotten_first():
    known = Familiarity(most_beginnings=3)
    for start in (0, 100, 200):
        note(known, LONG[start:][:40], "it")
    note(known, LONG[:40], "it")
    note(known, LONG[300:340], "it")
    assert len(known) == 3
    found = [lengths(known, LONG[start:], "it") for start in (0, 100, 200, 300)]
    assert found == [[32], [0], [32], [32]]


def test_of_many_servers_that_had_a_beginning_the_newest_are_known():
    known = Familiarity()
    for number in range(20):
        note(known, LONG[:40], f"it-{number}")
    note(known, LONG[:40], "it-5")
    assert lengths(known, LONG, "it-3", "it-4", "it-5", "it-19") == [0, 32, 32, 32]
    assert len(known) == 1


@virtually
async def test_a_text_is_known_where_it_was_computed_for_its_client_with_its_adapter():
    loras = {"lora_fingerprints": {"law": "a", "verse": "b"}}
    first, second = (VirtualServer("target", name=f"target-{it}", **loras) for it in range(2))
    discovery = VirtualDiscovery(second)
    async with virtual_system(first, second, discovery=discovery) as system:

        async def asked(lora, **client):
            """Tell which targets it went to: the first one, unless another knows its text."""
            before = len(first.calls), len(second.calls)
            await system.generate(
                token_ids=pb.TokenIds(ids=[it % 50 for it in range(200)]),
                lora=lora,
                strategy=pb.STRATEGY_AUTOREGRESSIVE,
                **client,
            )
            await system.settle()
            return len(first.calls) > before[0], len(second.calls) > before[1]

        assert await asked("law") == (False, True), "it is the only one"
        discovery.list(first, second)
        await system.until(lambda: len(system.pool.targets(system.pool.model())) == 2)
        assert await asked("verse") == (True, False)
        assert await asked("law") == (False, True)
        assert await asked("") == (True, False)
        assert await asked("law", client="10.0.0.2") == (True, False)
