"""What a verification answers, and what its session holds afterwards."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from paceline.errors import CacheExhaustedError, InvalidFieldError, PrefixNotHeldError
from paceline_contract.calls import DraftOptions, VerificationRule, VerifyOptions
from paceline_contract.proposal import Proposal, SparseDistribution
from paceline_contract.sampling import SamplingParameters
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.sessions.host import HostLimits
from paceline_engine.terms.calls import SessionSpec
from unit.engine.asking import ORACLE, PROMPT, asked, drafted, opened
from unit.engine.conftest import call_on, chain, continuation, instant, path, running, until


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


async def test_nothing_appended_computes_the_last_row_again():
    async with running(instant()) as host:
        session = opened(host)
        await host.verify(asked(session), chain(ORACLE[:2]))
        again = await host.verify(call_on(session, 2, base=PROMPT, append=[]))
        assert (again.next_token, again.timing.row_count) == (ORACLE[0], 1)


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
            drafter_host.draft(asked(at_drafter), DraftOptions(max_tokens=4, chunk_tokens=4))
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
