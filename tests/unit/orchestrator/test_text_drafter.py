"""The request's text as a drafter: what it says, when it sits, and what it counts."""

from __future__ import annotations

import asyncio

import pytest

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_contract.max_gram import IndexRoom, MaxGram, MaxGramRules
from paceline_contract.suffix_index import Tie
from paceline_orchestrator.decoding import text_drafter
from paceline_orchestrator.decoding.text_drafter import TextDrafter
from paceline_protocol.messages import CapacityChanged, StartDraft
from support.virtual_servers import targets
from support.virtual_system import virtual_system
from support.virtual_time import virtually

PROMPT = (1, 2, 3, 4, 1, 2)
PAPERS = MaxGramRules()


def a_proposer(rules=PAPERS):
    return rules.begin(vocabulary_size=len(rules.bigrams))


async def a_drafter(
    prompt=PROMPT, *, slot=1, is_beside=False, rules=PAPERS, proposer=None, **settings
):
    proposer = a_proposer(rules) if proposer is None else proposer
    drafter = TextDrafter(prompt, proposer=proposer, slot=slot, is_beside=is_beside, **settings)
    await drafter.read_prompt()
    return drafter


def ask(drafter, prefix, count=3):
    return drafter.propose(StartDraft(1, 1, tuple(prefix), max_tokens=count)).token_ids


async def test_it_sits_after_the_servers_while_there_is_none_or_always():
    nobody, server = CapacityChanged((0,), ()), CapacityChanged((0,), (0,))
    fills_in, beside = await a_drafter(), await a_drafter(is_beside=True)
    assert fills_in.join(nobody) == CapacityChanged((0,), (1,), text=1)
    assert fills_in.join(server) == server
    assert beside.join(server) == CapacityChanged((0,), (0, 1), text=1)
    unread = TextDrafter(PROMPT, proposer=MaxGram(), slot=1, is_beside=True)
    assert unread.join(nobody) == nobody


async def test_it_follows_texts_that_come_and_go():
    drafter, text = await a_drafter(), [*PROMPT]
    for final, assumed in (((), (3,)), ((3, 4), (1, 2, 9)), ((7,), ()), ((3, 4, 1), (2, 3, 4))):
        drafter.finalize(final)
        text += final
        reference = MaxGram()
        reference.extend((*text, *assumed))
        assert ask(drafter, (*text, *assumed)) == tuple(reference.propose(3))


async def test_it_copies_from_the_place_and_falls_back_to_the_table_that_the_operator_says():
    twice = (1, 2, 1, 3, 1)
    for tie, expected in ((Tie.EARLIEST, (2,)), (Tie.LATEST, (3,))):
        assert ask(await a_drafter(twice, rules=MaxGramRules(tie)), twice, 1) == expected
    assert ask(await a_drafter((3,)), (3,)) == ()
    assert ask(await a_drafter((3,), rules=MaxGramRules(bigrams=(None, 0, 1, 2))), (3,)) == (
        2,
        1,
        0,
    )


async def test_it_counts_what_became_of_what_it_said():
    drafter = await a_drafter()
    assert ask(drafter, PROMPT) == (3, 4, 1)
    assert ask(drafter, (*PROMPT, 3, 4, 1)) == (2, 3, 4), "it goes on from there"
    drafter.finalize((3, 4, 1, 2, 9, 4))
    took = drafter.statistics
    assert (took.drafted, took.accepted, took.rejected) == (6, 4, 1)


async def test_what_it_said_of_another_text_is_not_judged():
    drafter = await a_drafter()
    assert ask(drafter, (*PROMPT, 4)) == (1, 2, 4)
    drafter.finalize((3, 1, 2))
    assert (drafter.statistics.accepted, drafter.statistics.rejected) == (0, 0)


async def test_of_a_long_prompt_the_end_is_searched(monkeypatch):
    monkeypatch.setattr(text_drafter, "_MOST_TOKENS", 4)
    drafter = await a_drafter((9, 8, 1, 2, 3, 1))
    assert ask(drafter, (9, 8, 1, 2, 3, 1)) == (2, 3, 1)
    assert not ask(drafter, (9, 8, 1, 2, 3, 1, 9))
    drafter.finalize((2,))
    assert ask(drafter, (9, 8, 1, 2, 3, 1, 2)) == (3, 1, 2)


def free(room):
    """How many tokens there is room for."""
    count = room.take(10**9)
    room.give_back(count)
    return count


async def test_a_later_text_has_the_room_that_others_leave_it_and_nothing_is_indexed_beyond():
    room = IndexRoom(10)
    proposer = a_proposer()
    first = await a_drafter(PROMPT, room=room)
    second = await a_drafter(PROMPT, room=room, proposer=proposer)
    assert ask(first, PROMPT) == (3, 4, 1), "it has all of its prompt"
    assert ask(second, PROMPT) == (), "it has the last four tokens, which repeat nothing"
    second.finalize((3,))
    assert ask(second, (*PROMPT, 3)) == (), "there is no room for another"
    first.close()
    assert ask(first, PROMPT) == ()
    assert ask(second, (*PROMPT, 3)) == (4, 1, 2), "there is again"
    assert len(proposer) == 5
    second.close()
    assert room.take(99) == 10


async def test_a_text_without_any_room_reads_nothing_and_says_nothing():
    proposer = a_proposer()
    drafter = await a_drafter(PROMPT, room=IndexRoom(0), proposer=proposer)
    assert ask(drafter, PROMPT) == ()
    drafter.finalize((3,))
    assert ask(drafter, (*PROMPT, 3)) == ()
    assert len(proposer) == 0


@virtually
async def test_a_request_leaves_its_room_to_others_however_it_ends():
    async with virtual_system(*targets(1)) as system:
        room = system.servicer._text_rules.room
        everything = free(room)
        request = {"drafter": pb.DRAFTER_KIND_MAX_GRAM, "strategy": pb.STRATEGY_SPECULATIVE}
        await system.generate(**request)
        reading = asyncio.ensure_future(system.generate(**request, max_tokens=999))
        await asyncio.sleep(1)
        assert free(room) < everything
        reading.cancel()
        await asyncio.wait([reading])
        await system.settle()
        assert free(room) == everything


@pytest.mark.parametrize("make", [None, lambda token_id: ("one hot", token_id)])
async def test_its_tokens_come_with_what_they_were_drawn_from_if_asked_for(make):
    drafter = await a_drafter(make_distribution=make)
    found = drafter.propose(StartDraft(1, 1, PROMPT, max_tokens=2))
    assert found.distributions == ((("one hot", 3), ("one hot", 4)) if make else ())


async def test_what_it_said_before_the_targets_own_token_is_judged_too():
    drafter = await a_drafter()
    assert ask(drafter, PROMPT) == (3, 4, 1)
    assert ask(drafter, (*PROMPT, 3, 4, 1, 2), 1) == (3,), "the target's 2 came between"
    drafter.finalize((3, 4, 1, 2, 3))
    assert (drafter.statistics.accepted, drafter.statistics.rejected) == (4, 0)
