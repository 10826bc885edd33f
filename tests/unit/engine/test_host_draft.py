"""What a draft streams, and what its session holds afterwards."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import pytest

from paceline.errors import (
    CacheExhaustedError,
    PrefixNotHeldError,
    SupersededError,
    UnsupportedError,
)
from paceline_contract.calls import DraftOptions, VerificationRule
from paceline_contract.proposal import Proposal
from paceline_engine.sessions.host import HostLimits
from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Outcome
from unit.engine.asking import ORACLE, PROMPT, asked, drafted, opened
from unit.engine.conftest import call_on, chain, instant, running


@pytest.mark.parametrize("chunk_tokens", [1, 3, 64])
async def test_a_draft_streams_its_window_in_chunks_and_holds_it(chunk_tokens):
    async with running(instant()) as host:
        session = opened(host)
        chunks = []
        async with aclosing(
            host.draft(asked(session), DraftOptions(max_tokens=7, chunk_tokens=chunk_tokens))
        ) as stream:
            async for chunk in stream:
                assert chunk.start_length == 3 + sum(len(x.proposal) for x in chunks)
                chunks.append(chunk)
        assert all(len(chunk.proposal) == chunk_tokens for chunk in chunks[:-1])
        assert [token for chunk in chunks for token in chunk.proposal.token_ids] == ORACLE[:7]
        assert sum(chunk.timing.forward_count for chunk in chunks) == 7
        assert sum(chunk.timing.row_count for chunk in chunks) == 3 + 6
        # The window goes on from there, with nothing sent again.
        call = call_on(session, 2, base=PROMPT + ORACLE[:7], append=[])
        assert await drafted(host, call, max_tokens=3) == ORACLE[7:10]


class Bursts(SimulatedBackend):
    """A drafter whose steps find as many tokens as they are told to, of those that are wanted."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(SimulatedModel(ttft_seconds=0, tpot_seconds=0))
        self.sizes = list(sizes)

    def run(self, items, interrupt, *, row_limit=None):
        (item,) = items
        del row_limit
        lacking = item.task.max_tokens - item.found_count
        text, row_count = item.prefix[:], 0
        for _ in range(min(self.sizes.pop(0), lacking)):
            (outcome,) = super().run([replace(item, prefix=text)], interrupt)
            text.extend(outcome.drafted.token_ids)
            row_count += outcome.row_count
        return [Outcome(row_count, drafted=chain(text[len(item.prefix) :]))]


@pytest.mark.parametrize(("chunk_tokens", "sizes"), [(1, [1] * 7), (3, [3, 3, 1]), (64, [7])])
async def test_a_step_may_find_no_token_one_or_several(chunk_tokens, sizes):
    async with running(Bursts(0, 2, 0, 0, 4, 9)) as host:
        session = opened(host)
        stream = host.draft(asked(session), DraftOptions(max_tokens=7, chunk_tokens=chunk_tokens))
        async with aclosing(stream):
            chunks = [chunk async for chunk in stream]
        assert [len(chunk.proposal) for chunk in chunks] == sizes
        assert [token for chunk in chunks for token in chunk.proposal.token_ids] == ORACLE[:7]
        # What needs no row is no forward.
        assert sum(chunk.timing.forward_count for chunk in chunks) == 3
        assert sum(chunk.timing.row_count for chunk in chunks) == 3 + 6
        assert host._sessions.find(session).held_length == 3 + 7


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3])
async def test_each_token_travels_with_what_it_was_drawn_from(chunk_tokens):
    async with running(instant()) as host:
        session = opened(host, SessionSpec(400, rule=VerificationRule.REJECTION))
        stream = host.draft(asked(session), DraftOptions(max_tokens=5, chunk_tokens=chunk_tokens))
        async with aclosing(stream):
            proposals = [chunk.proposal async for chunk in stream]
    for proposal in proposals:
        names = tuple(each.token_ids for each in proposal.distributions)
        assert names == tuple((token,) for token in proposal.token_ids)


async def test_of_several_tokens_a_step_found_only_the_streamed_ones_are_held():
    async with running(Bursts(5)) as host:
        session = opened(host)
        async with aclosing(host.draft(asked(session), DraftOptions(max_tokens=5))) as stream:
            assert [(await anext(stream)).proposal.token_ids[0] for _ in range(2)] == ORACLE[:2]
        assert host._sessions.find(session).held_length == 3 + 2


class Several(SimulatedBackend):
    """Drafts three tokens in a step."""

    def _draft(self, scores, item):
        return Proposal((*super()._draft(scores, item).token_ids, 7, 8))


async def test_a_replaced_draft_holds_nothing_of_what_it_had_found_and_not_yet_streamed():
    model = Several(SimulatedModel(ttft_seconds=0.0, tpot_seconds=0.0))
    async with running(model) as host:
        session = opened(host)
        async with aclosing(host.draft(asked(session), DraftOptions(max_tokens=9))) as older:
            first = (await anext(older)).proposal.token_ids[0]
            await host.verify(call_on(session, 2, base=[*PROMPT, first], append=[42]))
            with pytest.raises(SupersededError):
                await anext(older)
        await host.verify(call_on(session, 3, base=[*PROMPT, first, 42], append=[]))


def unsure() -> SimulatedBackend:
    return instant(acceptance_rate=0.5)


@pytest.mark.parametrize("chunk_tokens", [1, 3])
async def test_a_draft_of_a_tree_streams_it_and_holds_its_chain(chunk_tokens):
    async with running(unsure()) as host:
        plain = await drafted(host, asked(opened(host)), max_tokens=7)
        session, tree = opened(host), Proposal()
        window = {"max_tokens": 7, "chunk_tokens": chunk_tokens, "width": 3, "branch_count": 2}
        starts, rows = [], 0
        async with aclosing(host.draft(asked(session), DraftOptions(**window))) as stream:
            async for chunk in stream:
                starts.append(chunk.start_length)
                rows += chunk.timing.row_count
                news = chunk.proposal
                tree = Proposal((*tree.token_ids, *news.token_ids), (*tree.parents, *news.parents))
        assert starts == list(range(3, 10, chunk_tokens))
        assert rows == 3 + 6 * 3
        chain_of_it, row = [], 0
        while row in tree.parents:
            index = tree.parents.index(row)
            chain_of_it.append(tree.token_ids[index])
            row = index + 1
        assert chain_of_it == plain
        held = PROMPT + plain
        with pytest.raises(PrefixNotHeldError):
            await drafted(host, call_on(session, 2, base=[*held, 1], append=[]), max_tokens=1)
        again = call_on(session, 3, base=held, append=[])
        async with aclosing(host.draft(again, DraftOptions(max_tokens=1))) as stream:
            assert [chunk.timing.row_count async for chunk in stream] == [1]


async def test_a_drafters_session_goes_on_with_the_branch_that_became_true():
    async with running(unsure()) as host:
        session = opened(host)
        window = {"max_tokens": 5, "width": 2, "branch_count": 3}
        async with aclosing(host.draft(asked(session), DraftOptions(**window))) as stream:
            chunks = [chunk.proposal async for chunk in stream]
        parents = [parent for chunk in chunks for parent in chunk.parents]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        # The runner-up at the first place, and the likeliest after it.
        branch = [tokens[1], tokens[parents.index(2)]]
        restart = call_on(session, 2, base=PROMPT, append=branch)
        async with aclosing(host.draft(restart, DraftOptions(max_tokens=2))) as stream:
            rows = [chunk.timing.row_count async for chunk in stream]
        assert rows == [1, 1]
        fresh = await drafted(host, asked(opened(host), append=PROMPT + branch), max_tokens=2)
        again = call_on(session, 3, base=PROMPT, append=branch)
        assert await drafted(host, again, max_tokens=2) == fresh


async def test_a_drafts_branches_take_memory_beyond_the_longest_text():
    limits = HostLimits(warm_up_rounds=0, token_budget=60)
    async with running(unsure(), limits=limits) as host:
        session = opened(host, SessionSpec(8))
        await drafted(host, asked(session), max_tokens=5, width=3, branch_count=2)
        assert host.statistics().tokens_reserved == 3 + 5 * 3
        with pytest.raises(CacheExhaustedError):
            await drafted(host, asked(session, 2), max_tokens=5, width=3, branch_count=20)
        rejecting = opened(host, SessionSpec(8, rule=VerificationRule.REJECTION))
        with pytest.raises(UnsupportedError):
            await drafted(host, asked(rejecting), max_tokens=5, width=2)
        assert len(await drafted(host, asked(session, 2), max_tokens=5)) == 5
