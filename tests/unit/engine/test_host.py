from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace

import pytest

from paceline.errors import (
    CacheExhaustedError,
    DrainingError,
    InvalidFieldError,
    LoadingError,
    OverloadedError,
    PacelineError,
    PrefixMismatchError,
    PrefixNotHeldError,
    SessionNotFoundError,
    StaleCallError,
    SupersededError,
    UnsupportedError,
)
from paceline_engine.backends.base import DeviceLostError, ModelLoadError, TokenMemory
from paceline_engine.backends.simulated import SimulatedBackend, SimulatedModel
from paceline_engine.calls import (
    PrefixCall,
    SamplingParameters,
    SessionSpec,
    VerificationRule,
    VerifyOptions,
)
from paceline_engine.host import HostLimits, ModelHost
from paceline_engine.items import Outcome
from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.model_text import ModelText
from paceline_engine.proposal import Proposal, SparseDistribution
from unit.engine.conftest import (
    QUICK,
    Gate,
    call_on,
    chain,
    continuation,
    instant,
    path,
    running,
    until,
)

PROMPT = [1, 2, 3]
SPEC = SessionSpec(400)
ORACLE = continuation(ModelText(instant(), SPEC), PROMPT, 40)


def opened(host: ModelHost, spec: SessionSpec = SPEC) -> str:
    return host.open_session(spec).session_id


def asked(session_id: str, sequence: int = 1, append: list[int] | None = None) -> PrefixCall:
    return call_on(session_id, sequence, base=[], append=PROMPT if append is None else append)


async def drafted(host: ModelHost, call: PrefixCall, **window: int) -> list[int]:
    async with aclosing(host.draft(call, **window)) as stream:
        return [token async for chunk in stream for token in chunk.proposal.token_ids]


async def entered(gate: Gate, count: int = 1) -> None:
    await until(lambda: len(gate.entered) >= count)


def verifying(group: asyncio.TaskGroup, host: ModelHost, call: PrefixCall, block=(), **options):
    """Start a verification whose error is its result, so that it does not end the group."""

    async def verify():
        try:
            return await host.verify(call, chain(block), options=VerifyOptions(**options))
        except PacelineError as error:
            return error

    return group.create_task(verify(), name=f"verify {call.sequence}")


# --- what calls do ----------------------------------------------------------------------------


async def test_a_conversation_by_the_one_rule_gives_the_plain_text():
    async with running(instant()) as host:
        session = opened(host)
        first = await host.verify(asked(session))
        assert (first.accepted_path, first.next_token) == (path(0), ORACLE[0])
        assert (first.prefix_length, first.held_length) == (3, 3)

        block = [*ORACLE[1:3], 0]
        call = call_on(session, 2, base=PROMPT, append=ORACLE[:1])
        second = await host.verify(call, chain(block))
        assert (second.accepted_path, second.next_token) == (path(2), ORACLE[3])
        # The rejected 0 is not held, nor is the next token.
        assert (second.prefix_length, second.held_length) == (4, 6)

        base = PROMPT + ORACLE[:3]
        third = await host.verify(
            call_on(session, 3, base=base, append=ORACLE[3:5]), chain(ORACLE[5:9])
        )
        assert (third.accepted_path, third.next_token) == (path(4), ORACLE[9])
        assert third.timing.row_count == 2 + 4


async def test_a_session_holds_what_was_accepted_and_no_rejected_token():
    async with running(instant()) as host:
        session = opened(host)
        verdict = await host.verify(asked(session), chain([*ORACLE[:2], 0, ORACLE[3]]))
        assert (verdict.accepted_path, verdict.held_length) == (path(2), 5)
        for beyond in (0, ORACLE[2]):
            base = [*PROMPT, *ORACLE[:2], beyond]
            with pytest.raises(PrefixNotHeldError) as caught:
                await host.verify(call_on(session, 2 + bool(beyond), base=base, append=[]))
            assert caught.value.metadata == {"held_length": "5"}
        call = call_on(session, 4, base=PROMPT + ORACLE[:2], append=ORACLE[2:3])
        assert (await host.verify(call)).next_token == ORACLE[3]


async def test_a_malformed_tree_is_refused_before_its_fence_and_any_forward():
    async with running(instant()) as host:
        session = opened(host)
        for parents in ((0,), (0, 2)):
            with pytest.raises(InvalidFieldError, match=r"proposal\.parents"):
                await host.verify(asked(session), Proposal(tuple(ORACLE[:2]), parents=parents))
        with pytest.raises(InvalidFieldError, match=r"proposal\.token_ids\[1\]"):
            await host.verify(asked(session), Proposal((3, 3), parents=(0, 0)))
        assert host.statistics().forwards == 0
        spelled_out = Proposal(tuple(ORACLE[:2]), parents=(0, 1))
        assert (await host.verify(asked(session), spelled_out)).accepted_path == path(2)


async def test_after_a_tree_a_session_holds_the_accepted_path():
    tree = Proposal((0, ORACLE[0], 1, ORACLE[1], ORACLE[1]), parents=(0, 0, 2, 2, 1))
    async with running(instant()) as host:
        session = opened(host)
        verdict = await host.verify(asked(session), tree)
        assert (verdict.accepted_path, verdict.next_token) == ((1, 3), ORACLE[2])
        assert (verdict.held_length, verdict.timing.row_count) == (5, 3 + 5)
        for beyond in (0, ORACLE[2]):
            base = [*PROMPT, *ORACLE[:2], beyond]
            with pytest.raises(PrefixNotHeldError) as caught:
                await host.verify(call_on(session, 2 + bool(beyond), base=base, append=[]))
            assert caught.value.metadata == {"held_length": "5"}
        call = call_on(session, 4, base=PROMPT + ORACLE[:2], append=ORACLE[2:3])
        verdict = await host.verify(call)
        assert (verdict.next_token, verdict.timing.row_count) == (ORACLE[3], 1)


async def test_the_target_goes_on_by_itself_after_a_trees_path():
    wrong = (ORACLE[1] + 1) % 256
    tree = Proposal((0, ORACLE[0], wrong), parents=(0, 0, 2))
    async with running(instant()) as host:
        session = opened(host, SessionSpec(6))
        await host.verify(asked(session), tree, options=VerifyOptions(anticipate=True))
        await until(lambda: host.statistics().forwards == 2)
        verdict = await host.verify(
            call_on(session, 2, base=PROMPT + ORACLE[:1], append=ORACLE[1:2])
        )
        assert (verdict.next_token, verdict.timing.began_early) == (ORACLE[2], True)


async def test_a_trees_branches_take_memory_beyond_the_longest_text():
    limits = HostLimits(warm_up_rounds=0, token_budget=20)
    async with running(instant(), limits=limits) as host:
        session = opened(host, SessionSpec(5))
        many = Proposal(tuple(range(12)), parents=(0,) * 12)
        await host.verify(asked(session), many)
        assert host.statistics().tokens_reserved == 3 + 12
        too_many = Proposal(tuple(range(100, 140)), parents=(0,) * 40)
        with pytest.raises(CacheExhaustedError):
            await host.verify(asked(session, 2), too_many)
        assert (await host.verify(asked(session, 2), chain(ORACLE[:2]))).accepted_path == path(2)


class Several(SimulatedBackend):
    """Drafts three tokens in a step."""

    def _draft(self, scores, item):
        return Proposal((*super()._draft(scores, item).token_ids, 7, 8))


async def test_a_replaced_draft_holds_nothing_of_what_it_had_found_and_not_yet_streamed():
    model = Several(SimulatedModel(ttft_seconds=0.0, tpot_seconds=0.0))
    async with running(model) as host:
        session = opened(host)
        async with aclosing(host.draft(asked(session), max_tokens=9)) as older:
            first = (await anext(older)).proposal.token_ids[0]
            await host.verify(call_on(session, 2, base=[*PROMPT, first], append=[42]))
            with pytest.raises(SupersededError):
                await anext(older)
        await host.verify(call_on(session, 3, base=[*PROMPT, first, 42], append=[]))


async def test_nothing_appended_computes_the_last_row_again():
    async with running(instant()) as host:
        session = opened(host)
        await host.verify(asked(session), chain(ORACLE[:2]))
        again = await host.verify(call_on(session, 2, base=PROMPT, append=[]))
        assert (again.next_token, again.timing.row_count) == (ORACLE[0], 1)


async def test_log_probabilities_come_when_asked_for():
    async with running(instant()) as host:
        session = opened(host)
        options = VerifyOptions(logprobs=True)
        verdict = await host.verify(asked(session), chain(ORACLE[:2]), options=options)
        assert verdict.logprobs == (0.0, 0.0, 0.0)


def unsure() -> SimulatedBackend:
    return instant(acceptance_rate=0.5)


@pytest.mark.parametrize("chunk_tokens", [1, 3])
async def test_a_draft_of_a_tree_streams_it_and_holds_its_chain(chunk_tokens):
    async with running(unsure()) as host:
        plain = await drafted(host, asked(opened(host)), max_tokens=7)
        session, tree = opened(host), Proposal()
        window = {"max_tokens": 7, "chunk_tokens": chunk_tokens, "width": 3, "branch_count": 2}
        starts, rows = [], 0
        async with aclosing(host.draft(asked(session), **window)) as stream:
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
        async with aclosing(host.draft(again, max_tokens=1)) as stream:
            assert [chunk.timing.row_count async for chunk in stream] == [1]


async def test_a_drafters_session_goes_on_with_the_branch_that_became_true():
    async with running(unsure()) as host:
        session = opened(host)
        window = {"max_tokens": 5, "width": 2, "branch_count": 3}
        async with aclosing(host.draft(asked(session), **window)) as stream:
            chunks = [chunk.proposal async for chunk in stream]
        parents = [parent for chunk in chunks for parent in chunk.parents]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        # The runner-up at the first place, and the likeliest after it.
        branch = [tokens[1], tokens[parents.index(2)]]
        restart = call_on(session, 2, base=PROMPT, append=branch)
        async with aclosing(host.draft(restart, max_tokens=2)) as stream:
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


@pytest.mark.parametrize("chunk_tokens", [1, 3, 64])
async def test_a_draft_streams_its_window_in_chunks_and_holds_it(chunk_tokens):
    async with running(instant()) as host:
        session = opened(host)
        chunks = []
        async with aclosing(
            host.draft(asked(session), max_tokens=7, chunk_tokens=chunk_tokens)
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
        stream = host.draft(asked(session), max_tokens=7, chunk_tokens=chunk_tokens)
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
        stream = host.draft(asked(session), max_tokens=5, chunk_tokens=chunk_tokens)
        async with aclosing(stream):
            proposals = [chunk.proposal async for chunk in stream]
    for proposal in proposals:
        names = tuple(each.token_ids for each in proposal.distributions)
        assert names == tuple((token,) for token in proposal.token_ids)


async def test_of_several_tokens_a_step_found_only_the_streamed_ones_are_held():
    async with running(Bursts(5)) as host:
        session = opened(host)
        async with aclosing(host.draft(asked(session), max_tokens=5)) as stream:
            assert [(await anext(stream)).proposal.token_ids[0] for _ in range(2)] == ORACLE[:2]
        assert host._sessions.find(session).held_length == 3 + 2


async def test_two_drafts_take_turns_and_keep_their_texts_apart():
    async with running(instant()) as host:
        sessions = [opened(host), opened(host)]
        other = continuation(ModelText(instant(), SPEC), [9, 9], 20)
        texts = await asyncio.gather(
            drafted(host, asked(sessions[0]), max_tokens=20),
            drafted(host, asked(sessions[1], append=[9, 9]), max_tokens=20),
        )
        assert texts == [ORACLE[:20], other]


async def test_real_models_draft_and_verify_each_others_text(target, drafter):
    spec = SessionSpec(200, SamplingParameters(temperature=0.9), seed=4)
    oracle = continuation(ModelText(target, spec), PROMPT, 24)
    async with running(target) as target_host, running(drafter) as drafter_host:
        at_target, at_drafter = opened(target_host, spec), opened(drafter_host, spec)
        text, accepted, sequence = list(PROMPT), 0, 0
        while len(text) < len(PROMPT) + 24:
            sequence += 1
            call = call_on(at_drafter, sequence, base=[], append=text)
            block = await drafted(drafter_host, call, max_tokens=4)
            verdict = await target_host.verify(
                call_on(at_target, sequence, base=[], append=text), chain(block)
            )
            accepted += len(verdict.accepted_path)
            text += [*block[: len(verdict.accepted_path)], verdict.next_token]
        assert text[len(PROMPT) :][:24] == oracle
        # Neither nothing nor everything: the pair's models differ, and are related.
        assert 0 < accepted < target_host.statistics().judged_tokens
        # Whole prefixes were sent each time, and none was computed twice.
        assert target_host.statistics().rows < 24 * 5 + len(PROMPT)


async def test_rejection_goes_through_with_its_distributions(target, drafter):
    spec = SessionSpec(200, SamplingParameters(1.0), seed=4, rule=VerificationRule.REJECTION)
    async with running(target) as target_host, running(drafter) as drafter_host:
        at_target, at_drafter = opened(target_host, spec), opened(drafter_host, spec)
        async with aclosing(
            drafter_host.draft(asked(at_drafter), max_tokens=4, chunk_tokens=4)
        ) as stream:
            (chunk,) = [chunk async for chunk in stream]
        assert len(chunk.proposal.distributions) == 4
        verdict = await target_host.verify(asked(at_target), chunk.proposal)
        assert verdict.held_length == 3 + len(verdict.accepted_path)
        forwards = target_host.statistics().forwards
        broken = SparseDistribution((1, 2), (0.5, 0.4))
        with pytest.raises(InvalidFieldError, match=r"proposal\.distributions"):
            await target_host.verify(
                asked(at_target, 2), chain(chunk.proposal.token_ids, (broken,) * 4)
            )
        assert target_host.statistics().forwards == forwards


# --- fencing ----------------------------------------------------------------------------------


async def test_stale_and_misfounded_calls_are_told_what_is_wrong():
    async with running(instant()) as host:
        session = opened(host)
        await host.verify(asked(session, 5))
        with pytest.raises(StaleCallError):
            await host.verify(asked(session, 5))
        with pytest.raises(PrefixNotHeldError) as caught:
            await host.verify(call_on(session, 6, base=[1, 2, 3, 4], append=[]))
        assert caught.value.metadata == {"held_length": "3"}
        with pytest.raises(PrefixMismatchError):
            await host.verify(call_on(session, 7, base=[1, 2, 4], append=[]))
        assert (await host.verify(asked(session, 8))).next_token == ORACLE[0]
        assert host.statistics().calls_refused == 3


async def test_a_call_that_is_refused_as_invalid_changes_nothing():
    async with running(instant()) as host:
        session = opened(host)
        await host.verify(asked(session))
        forwards = host.statistics().forwards
        for call, block in [
            (asked(session, 2, append=[1, 2048]), []),
            (asked(session, 2), [-1]),
            (asked(session, 2, append=[]), []),
            (asked(session, 2, append=[1] * 401), []),
            (replace(asked(session, 2), base_digest=b"short"), []),
        ]:
            with pytest.raises(InvalidFieldError):
                await host.verify(call, chain(block))
        with pytest.raises(InvalidFieldError):
            await drafted(host, asked(session, 2), max_tokens=398)
        assert host.statistics().forwards == forwards
        await host.verify(call_on(session, 2, base=PROMPT, append=[]))


@pytest.mark.parametrize("tampering", ["list", "cache"])
async def test_tampering_is_found_or_healed(tampering):
    async with running(instant()) as host:
        session = opened(host)
        await host.verify(asked(session), chain(ORACLE[:4]))
        inside = host._sessions.find(session)
        call = call_on(session, 2, base=PROMPT + ORACLE[:4], append=[])
        if tampering == "list":
            inside._prefix = type(inside._prefix)([7] * 7)
            with pytest.raises(PrefixMismatchError):
                await host.verify(call)
        else:
            inside.cache.clear()
            assert (await host.verify(call)).next_token == ORACLE[4]


async def test_a_newer_call_supersedes_a_running_one_at_once():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        older = verifying(group, host, asked(session), ORACLE[:2])
        await entered(gate)
        newer = verifying(group, host, asked(session, 2), ORACLE[:3])
        assert isinstance(await older, SupersededError)
        gate.open.set()
        assert (await newer).accepted_path == path(3)
        statistics = host.statistics()
        assert (statistics.forwards, statistics.forwards_interrupted) == (1, 1)
        assert statistics.calls_superseded == 1
        assert statistics.forwards_wasted == 1
        assert statistics.wasted_ns > statistics.freeing_ns > 0


async def test_a_newer_call_supersedes_a_queued_one():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        blocker, session = opened(host), opened(host)
        first = verifying(group, host, asked(blocker))
        await entered(gate)
        older = verifying(group, host, asked(session), ORACLE[:2])
        await until(lambda: host.statistics().queue_length == 1)
        newer = verifying(group, host, asked(session, 2), ORACLE[:3])
        assert isinstance(await older, SupersededError)
        assert host.statistics().queue_length == 1
        gate.open.set()
        await first
        await newer
        assert len(gate.entered) == 2


async def test_a_newer_call_that_fails_its_checks_still_supersedes():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        older = verifying(group, host, asked(session))
        await entered(gate)
        with pytest.raises(PrefixNotHeldError):
            await host.verify(call_on(session, 2, base=PROMPT, append=[]))
        assert isinstance(await older, SupersededError)
        gate.open.set()


async def test_the_same_call_takes_over_a_running_forward():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        older = verifying(group, host, asked(session), ORACLE[:2], depth=3)
        await entered(gate)
        newer = verifying(group, host, asked(session, 2), ORACLE[:2], depth=0)
        error = await older
        assert isinstance(error, SupersededError)
        assert error.metadata == {"taken_over_by": "2"}
        gate.open.set()
        assert (await newer).accepted_path == path(2)
        statistics = host.statistics()
        assert (statistics.forwards, statistics.forwards_interrupted) == (1, 0)
        assert statistics.calls_adopted == 1
        assert statistics.forwards_wasted == 0
        await host.verify(call_on(session, 3, base=PROMPT + ORACLE[:2], append=[]))


async def test_the_same_question_about_another_prefix_takes_nothing_over():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        older = verifying(group, host, asked(session), ORACLE[:2])
        await entered(gate)
        newer = verifying(group, host, asked(session, 2, append=[3, 2, 1]), ORACLE[:2])
        error = await older
        assert isinstance(error, SupersededError)
        assert not error.metadata
        gate.open.set()
        assert (await newer).accepted_path == ()
        assert host.statistics().calls_adopted == 0


async def test_the_same_draft_again_starts_anew():
    """What the older one found may have gone to its caller."""
    gate = Gate()
    async with running(gate) as host:
        session = opened(host)
        older = asyncio.create_task(drafted(host, asked(session), max_tokens=3), name="older")
        await entered(gate)
        newer = asyncio.create_task(drafted(host, asked(session, 2), max_tokens=3), name="newer")
        with pytest.raises(SupersededError):
            await older
        gate.open.set()
        assert await newer == ORACLE[:3]
        assert host.statistics().calls_adopted == 0


async def test_the_same_call_at_a_lower_depth_overtakes_in_the_queue():
    gate, order = Gate(), []
    async with running(gate) as host, asyncio.TaskGroup() as group:
        sessions = [opened(host) for _ in range(3)]
        first = verifying(group, host, asked(sessions[0]))
        await entered(gate)
        calls = [
            verifying(group, host, asked(sessions[1]), ORACLE[:1], depth=1),
            verifying(group, host, asked(sessions[2]), ORACLE[:2], depth=2),
        ]
        await until(lambda: host.statistics().queue_length == 2)
        calls.append(verifying(group, host, asked(sessions[2], 2), ORACLE[:2], depth=0))
        for index, call in enumerate(calls):
            call.add_done_callback(lambda _, index=index: order.append(index))
        await until(lambda: order == [1])
        gate.open.set()
        await first
        await asyncio.wait(calls)
        assert order == [1, 2, 0]


async def test_a_superseded_draft_keeps_what_it_streamed():
    async with running(instant()) as host:
        session = opened(host)
        async with aclosing(host.draft(asked(session), max_tokens=50)) as stream:
            assert [(await anext(stream)).proposal.token_ids[0] for _ in range(4)] == ORACLE[:4]
            follow = call_on(session, 2, base=PROMPT + ORACLE[:4], append=[])
            assert await drafted(host, follow, max_tokens=2) == ORACLE[4:6]
            with pytest.raises(SupersededError):
                await anext(stream)


# --- cancellation -----------------------------------------------------------------------------


async def test_a_cancelled_verification_leaves_its_base_and_no_work():
    gate = Gate()
    async with running(gate) as host:
        session = opened(host)
        gate.open.set()
        await host.verify(asked(session), chain(ORACLE[:3]))
        gate.open.clear()
        call = call_on(session, 2, base=PROMPT, append=ORACLE[:5])
        task = asyncio.create_task(host.verify(call, chain(ORACLE[5:7])), name="cancelled")
        await entered(gate, 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert host.statistics().calls_live == 0
        assert host._sessions.find(session).held_length == 3
        gate.open.set()
        follow = call_on(session, 3, base=PROMPT, append=ORACLE[:5])
        assert (await host.verify(follow)).next_token == ORACLE[5]
        assert host.statistics().forwards_interrupted == 1
        assert host.statistics().calls_cancelled == 1


async def test_a_call_cancelled_in_the_queue_never_runs():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        first = verifying(group, host, asked(opened(host)))
        await entered(gate)
        task = asyncio.create_task(host.verify(asked(opened(host))), name="cancelled")
        await until(lambda: host.statistics().queue_length == 1)
        task.cancel()
        await asyncio.wait([task])
        assert host.statistics().queue_length == 0
        gate.open.set()
        await first
        assert len(gate.entered) == 1


async def test_the_old_callers_cancel_does_not_hurt_who_took_over():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        older = asyncio.create_task(host.verify(asked(session), chain(ORACLE[:2])), name="older")
        await entered(gate)
        newer = verifying(group, host, asked(session, 2), ORACLE[:2])
        await until(lambda: host.statistics().calls_adopted == 1)
        older.cancel()
        await asyncio.wait([older])
        gate.open.set()
        assert (await newer).accepted_path == path(2)


async def test_a_draft_that_is_left_stops_and_keeps_what_it_streamed():
    async with running(instant()) as host:
        session = opened(host)
        async with aclosing(host.draft(asked(session), max_tokens=300)) as stream:
            first = [(await anext(stream)).proposal.token_ids[0] for _ in range(2)]
        assert first == ORACLE[:2]
        assert host._sessions.find(session).held_length == 5
        assert host.statistics().calls_live == 0
        await until(lambda: not host.statistics().forwards_running)
        assert host.statistics().queue_length == 0
        follow = call_on(session, 2, base=PROMPT + ORACLE[:2], append=[])
        assert await drafted(host, follow, max_tokens=3) == ORACLE[2:5]


async def test_a_cancelled_real_forward_runs_fewer_layers_and_the_next_answer_is_right(target):
    oracle = continuation(ModelText(target, SPEC), PROMPT, 6)
    async with running(target) as host:
        session = opened(host)
        await host.verify(asked(session), chain(oracle[:2]))
        before = host.statistics().layers_run
        hook = target._before_layer
        target.decoder.layers[2].register_forward_pre_hook(
            lambda *_: target.interrupt.wait(5), prepend=True
        )
        try:
            call = call_on(session, 2, base=PROMPT, append=oracle[:3])
            task = asyncio.create_task(host.verify(call, chain(oracle[3:5])), name="cancelled")
            await until(lambda: host.statistics().layers_run == before + 2)
            task.cancel()
            await asyncio.wait([task])
            await until(lambda: host.statistics().forwards_interrupted == 1)
        finally:
            hooks = target.decoder.layers[2]._forward_pre_hooks
            hooks.popitem(last=False)
            assert list(hooks.values()) == [hook]
        assert host.statistics().layers_run == before + 2
        follow = await host.verify(replace(call, sequence=3), chain(oracle[3:5]))
        assert (follow.accepted_path, follow.next_token) == (path(2), oracle[5])


# --- sessions ---------------------------------------------------------------------------------


async def test_closing_ends_the_live_call_and_is_idempotent():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        call = verifying(group, host, asked(session))
        await entered(gate)
        host.close_session(session)
        assert isinstance(await call, SupersededError)
        host.close_session(session)
        host.close_session("unknown")
        with pytest.raises(SessionNotFoundError):
            await host.verify(asked(session, 2))
        with pytest.raises(SessionNotFoundError):
            host.renew_session(session)
        statistics = host.statistics()
        assert (statistics.sessions_opened, statistics.sessions_released) == (1, 1)
        gate.open.set()


async def test_a_lease_does_not_run_out_during_a_call_and_starts_anew_after_it():
    now = 0.0
    gate = Gate()
    async with running(gate, clock=lambda: now) as host, asyncio.TaskGroup() as group:
        session = opened(host, SessionSpec(100, lease_seconds=2.0))
        call = verifying(group, host, asked(session))
        await entered(gate)
        now = 50.0
        host._sessions.expire()
        gate.open.set()
        assert (await call).next_token == ORACLE[0]
        now = 51.9
        assert host.renew_session(session) == 2.0
        now = 53.9
        with pytest.raises(SessionNotFoundError):
            host.renew_session(session)
        assert host.statistics().sessions_expired == 1


async def test_a_session_says_which_call_of_it_is_in_sight():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        assert host.live_sequence(session) == 0
        call = verifying(group, host, asked(session))
        await entered(gate)
        assert host.live_sequence(session) == 1
        host._worker._running.jobs[0].work.patience_ns = 0
        assert host.live_sequence(session) == 0, "a forward that hangs answers nobody"
        host._worker._running.jobs[0].work.patience_ns = None
        gate.open.set()
        await call
        assert host.live_sequence(session) == 0
        with pytest.raises(SessionNotFoundError):
            host.live_sequence("another")


async def test_a_call_that_fails_after_the_fence_starts_the_lease_anew():
    now = 0.0
    gate = Gate()
    async with running(gate, clock=lambda: now) as host, asyncio.TaskGroup() as group:
        session = opened(host, SessionSpec(100, lease_seconds=2.0))
        older = verifying(group, host, asked(session))
        await entered(gate)
        now = 50.0
        with pytest.raises(PrefixNotHeldError):
            await host.verify(call_on(session, 2, base=PROMPT, append=[]))
        assert isinstance(await older, SupersededError)
        now = 51.9
        assert host.renew_session(session) == 2.0
        gate.open.set()


async def test_the_reaper_runs_by_itself():
    now = 0.0
    limits = HostLimits(warm_up_rounds=0, reap_seconds=0.001)
    async with running(instant(), limits=limits, clock=lambda: now) as host:
        opened(host)
        now = 100.0
        await host.settled()
        assert host.statistics().sessions_open == 0
        assert host.statistics().sessions_expired == 1


async def test_a_rule_the_model_lacks_is_unsupported():
    async with running(instant()) as host:
        sampled = SamplingParameters(temperature=1.0)
        with pytest.raises(UnsupportedError):
            host.open_session(SessionSpec(10, sampled, rule=VerificationRule.REJECTION))


async def test_a_growing_session_has_the_text_of_one_that_reserved_all(target):
    oracle = continuation(ModelText(target, SPEC), PROMPT, 300)
    async with running(target) as host:
        session = opened(host, SessionSpec(3, limit_length=400))
        assert await drafted(host, asked(session), max_tokens=100) == oracle[:100]
        assert host.statistics().tokens_reserved == 103 + 256
        assert await drafted(host, asked(session, 2), max_tokens=300) == oracle
        assert host.statistics().tokens_reserved == 400
        assert host._sessions.find(session).cache.capacity == 400


async def test_a_call_that_finds_no_room_leaves_the_running_one_and_the_lease_alone():
    now, gate = 0.0, Gate()
    limits = HostLimits(warm_up_rounds=0, token_budget=100)
    async with (
        running(gate, limits=limits, clock=lambda: now) as host,
        asyncio.TaskGroup() as group,
    ):
        opened(host, SessionSpec(80, share="another"))
        session = opened(host, SessionSpec(5, limit_length=50, lease_seconds=2.0))
        older = verifying(group, host, asked(session))
        await entered(gate)
        with pytest.raises(CacheExhaustedError):
            await host.verify(asked(session, 2), chain(ORACLE[:30]))
        with pytest.raises(CacheExhaustedError):
            await drafted(host, asked(session, 2), max_tokens=30)
        gate.open.set()
        assert (await older).next_token == ORACLE[0]
        now = 1.9
        with pytest.raises(CacheExhaustedError):
            await host.verify(asked(session, 2), chain(ORACLE[:30]))
        now = 3.8
        # A session whose calls are refused is in use.
        assert (await host.verify(asked(session, 2))).next_token == ORACLE[0]
        assert host.statistics().calls_refused == 3


async def test_the_calls_of_a_share_leave_the_queue_to_others():
    gate = Gate()
    limits = HostLimits(warm_up_rounds=0, queue_limit=5)
    async with running(gate, limits=limits) as host, asyncio.TaskGroup() as group:
        calls = [verifying(group, host, asked(opened(host, SessionSpec(9, share="greedy"))))]
        await entered(gate)
        greedy = [opened(host, SessionSpec(9, share="greedy")) for _ in range(5)]
        calls += [verifying(group, host, asked(session)) for session in greedy]
        refused = await calls[-1]
        assert isinstance(refused, OverloadedError)
        modest = opened(host, SessionSpec(9, share="modest"))
        calls.append(verifying(group, host, asked(modest)))
        await until(lambda: host.statistics().queue_length == 5 or calls[-1].done())
        gate.open.set()
        answers = [await call for call in calls]
        assert [each for each in answers if isinstance(each, PacelineError)] == [refused]


async def test_a_session_is_there_for_its_owner_only():
    async with running(instant()) as host:
        session = opened(host, SessionSpec(9, owner="mine"))
        call = replace(asked(session), caller="mine")
        for caller in ("", "theirs"):
            with pytest.raises(SessionNotFoundError):
                await host.verify(replace(call, caller=caller))
            with pytest.raises(SessionNotFoundError):
                host.renew_session(session, caller=caller)
            host.close_session(session, caller=caller)
        await host.verify(call)
        host.close_session(session, caller="mine")
        assert host.statistics().sessions_open == 0


async def test_a_model_that_hangs_is_noticed_and_forgiven(monkeypatch):
    monkeypatch.setattr("paceline_engine.latencies._LEAST_PATIENCE_NS", 1)
    gate = Gate()
    gate.open.set()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        await host.verify(asked(session))
        assert host.overdue_seconds() == 0
        gate.open.clear()
        # The same length as the first, whose time is all that is known.
        call = verifying(group, host, asked(session, 2))
        await until(lambda: host.overdue_seconds() > 0)
        gate.open.set()
        await call
        assert host.overdue_seconds() == 0
        gate.open.clear()
        window = group.create_task(drafted(host, asked(session, 3), max_tokens=2))
        await until(lambda: host.overdue_seconds() > 0)
        gate.open.set()
        await window


# --- life and death ---------------------------------------------------------------------------


async def test_before_the_start_everything_says_loading():
    host = ModelHost(instant)
    with pytest.raises(LoadingError):
        host.open_session(SPEC)
    with pytest.raises(LoadingError):
        _ = host.description
    assert not host.ready


async def test_a_model_that_cannot_be_loaded_fails_the_start_and_leaves_no_thread():
    host = ModelHost(lambda: load_backend(LoadOptions(backend="none")))
    with pytest.raises(ModelLoadError, match="simulated, transformers"):
        await host.start()
    host._worker._thread.join(30)
    assert not host._worker._thread.is_alive()


class Remembering(SimulatedBackend):
    """An instant simulated model whose tokens take memory."""

    def __init__(self, *, free_bytes: int) -> None:
        super().__init__(SimulatedModel(ttft_seconds=0, tpot_seconds=0))
        self.free_bytes = free_bytes

    def token_memory(self) -> TokenMemory:
        return TokenMemory(free_bytes=self.free_bytes, usable_share=0.5, bytes_per_token=10)


async def test_the_token_budget_is_what_fits_into_the_memory_that_is_left(caplog):
    limits = HostLimits(warm_up_rounds=0, token_budget=1000, fits_memory=True)
    with caplog.at_level("INFO"):
        async with running(Remembering(free_bytes=8019), limits=limits) as host:
            assert host.limits.token_budget == 400
            opened(host, SessionSpec(400))
            with pytest.raises(CacheExhaustedError, match="0 of 400 free"):
                opened(host, SessionSpec(1))
    (told,) = (record for record in caplog.records if record.message == "token budget")
    assert (
        vars(told).items()
        >= {
            "token_budget": 400,
            "free_bytes": 8019,
            "usable_share": 0.5,
            "bytes_per_token": 10,
        }.items()
    )


@pytest.mark.parametrize(
    ("free_bytes", "fits_memory"), [(10**9, True), (8019, False)], ids=["plenty", "overridden"]
)
async def test_a_token_budget_is_never_raised_and_only_lowered_on_request(free_bytes, fits_memory):
    limits = HostLimits(warm_up_rounds=0, token_budget=1000, fits_memory=fits_memory)
    async with running(Remembering(free_bytes=free_bytes), limits=limits) as host:
        assert host.limits.token_budget == 1000
        opened(host, SessionSpec(1000))


async def test_where_tokens_take_no_memory_the_budget_stays():
    limits = HostLimits(warm_up_rounds=0, fits_memory=True)
    async with running(instant(), limits=limits) as host:
        assert host.limits == limits


async def test_a_model_that_leaves_no_memory_is_not_served():
    limits = HostLimits(warm_up_rounds=0, fits_memory=True)
    host = ModelHost(lambda: Remembering(free_bytes=19), limits=limits)
    with pytest.raises(ModelLoadError, match="19 bytes are free, and a token takes 10"):
        await host.start()
    assert not host.ready


async def test_the_start_measures_forwards_and_prefill():
    async with running(instant(), limits=HostLimits(warm_up_rounds=1)) as host:
        found = host.latencies()
        assert [forward.rows for forward in found.forwards] == [1, 2, 4, 8, 16]
        assert host.ready


async def test_a_host_is_settled_when_its_last_session_is_closed():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        sessions = [opened(host), opened(host)]
        call = verifying(group, host, asked(sessions[0]))
        await entered(gate)
        settled = group.create_task(host.settled(), name="settled")
        host.close_session(sessions[1])
        gate.open.set()
        assert (await call).next_token == ORACLE[0]
        assert not settled.done()
        host.close_session(sessions[0])
        await settled
        assert host.statistics().sessions_open == 0


async def test_a_call_that_comes_after_its_session_was_cut_hears_draining():
    async with running(instant()) as host:
        session = opened(host)
        host.end_sessions()
        with pytest.raises(DrainingError):
            await host.verify(asked(session), [])
        with pytest.raises(DrainingError):
            await drafted(host, asked(session, 2), max_tokens=1)


async def test_stopping_interrupts_what_runs_and_refuses_new_calls():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        session = opened(host)
        call = verifying(group, host, asked(session))
        await entered(gate)
        await host.stop()
        assert isinstance(await call, DrainingError)
        assert host.statistics().sessions_open == 0
        with pytest.raises(DrainingError):
            opened(host)
        with pytest.raises(DrainingError):
            await host.verify(asked(session, 2))


async def test_an_error_in_one_call_does_not_harm_another():
    gate = Gate()
    gate.open.set()
    async with running(gate) as host:
        sessions = [opened(host), opened(host)]
        gate.failures.append(ZeroDivisionError("a bug"))
        with pytest.raises(ZeroDivisionError):
            await host.verify(asked(sessions[0]), chain(ORACLE[:2]))
        assert (await host.verify(asked(sessions[1]), chain(ORACLE[:2]))).accepted_path == path(2)
        assert host._sessions.find(sessions[0]).held_length == 0
        again = await host.verify(asked(sessions[0], 2), chain(ORACLE[:2]))
        assert again.accepted_path == path(2)


async def test_a_lost_device_is_told_and_ends_the_service():
    gate, told = Gate(), []
    gate.open.set()
    gate.failures.append(DeviceLostError("illegal access"))
    async with running(gate, on_device_lost=told.append) as host:
        session = opened(host)
        with pytest.raises(DrainingError):
            await host.verify(asked(session))
        await until(lambda: bool(told))
        assert not host.ready
        with pytest.raises(DrainingError):
            await host.verify(asked(session, 2))


async def test_forwards_and_draft_tokens_are_counted():
    async with running(instant()) as host:
        await host.verify(asked(opened(host)), chain([*ORACLE[:2], 0]))
        statistics = host.statistics()
        assert (statistics.forwards, statistics.rows) == (1, 6)
        assert (statistics.judged_tokens, statistics.accepted_tokens) == (3, 2)
        assert (statistics.verify_calls, statistics.draft_calls) == (1, 0)
        await drafted(host, asked(opened(host)), max_tokens=7, chunk_tokens=2)
        statistics = host.statistics()
        assert (statistics.verify_calls, statistics.draft_calls) == (1, 1)
        assert (statistics.draft_tokens, statistics.judged_tokens) == (7, 3)


async def test_a_call_is_told_how_long_it_waited_and_how_long_it_was_computed():
    gate = Gate()
    async with running(gate) as host, asyncio.TaskGroup() as group:
        first = verifying(group, host, asked(opened(host)))
        await entered(gate)
        second = verifying(group, host, asked(opened(host)))
        await until(lambda: host.statistics().queue_length == 1)
        queued_ns = time.monotonic_ns()
        await until(lambda: time.monotonic_ns() > queued_ns)
        least_ns = time.monotonic_ns() - queued_ns
        gate.open.set()
        assert (await first).timing.forward_ns > least_ns
        timing = (await second).timing
        assert timing.queue_ns > least_ns
        assert timing.forward_ns > 0


def test_the_limits_of_the_tests_are_quick():
    assert QUICK.warm_up_rounds == 0
