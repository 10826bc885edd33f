"""Random calls against a host, with a plain list as the model of what its session holds."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.errors import (
    PrefixMismatchError,
    PrefixNotHeldError,
    StaleCallError,
    SupersededError,
)
from paceline_contract.calls import DecodeOptions, DraftOptions
from paceline_contract.proposal import Proposal
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.sessions.host import ModelHost
from paceline_engine.terms.calls import SessionSpec, Verdict
from support.trees import random_tree
from unit.engine.conftest import QUICK, call_on, chain, continuation, instant, path

SPEC = SessionSpec(100_000)
SHARE = st.floats(0, 1)
TOKENS = st.lists(st.integers(0, 2), max_size=4)


class SessionMachine(RuleBasedStateMachine):
    """Every call either fails as the proto says, or answers what a fresh cache would."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.backend = instant(vocabulary_size=3, context_length=100_000)
        self.host = self._await(self._start())
        self.session = self.host.open_session(SPEC).session_id
        self.held: list[int] = []
        self.sequence = 0

    async def _start(self) -> ModelHost:
        host = ModelHost(lambda: self.backend, limits=QUICK)
        await host.start()
        return host

    def _await(self, awaitable):
        return self.loop.run_until_complete(awaitable)

    def _call(self, share: float, append: list[int], *, base: list[int] | None = None):
        self.sequence += 1
        base = self.held[: int(share * len(self.held))] if base is None else base
        if not base and not append:
            append = [1]
        return base, append, call_on(self.session, self.sequence, base=base, append=append)

    @rule(share=SHARE, append=TOKENS, block=TOKENS)
    def verify(self, share, append, block):
        base, append, call = self._call(share, append)
        verdict = self._await(self.host.verify(call, chain(block)))
        text, fresh = base + append, ModelText(self.backend, SPEC)
        while len(accepted := text[len(base + append) :]) < len(block):
            if continuation(fresh, text, 1) != [block[len(accepted)]]:
                break
            text = [*text, block[len(accepted)]]
        assert verdict.accepted_path == path(len(accepted))
        assert [verdict.next_token] == continuation(fresh, text, 1)
        self.held = text
        assert verdict.held_length == len(self.held)

    @rule(share=SHARE, append=TOKENS, size=st.integers(1, 9), seed=st.integers(0, 9))
    def verify_a_tree(self, share, append, size, seed):
        base, append, call = self._call(share, append)
        text = base + append
        right = continuation(ModelText(self.backend, SPEC), text, size + 1)
        tree = random_tree(random.Random(seed), right, size=size, vocabulary_size=3)
        verdict = self._await(self.host.verify(call, tree))
        expected = tree.follow(lambda _, depth: right[depth])
        assert (verdict.accepted_path, verdict.next_token) == expected
        self.held = text + right[: len(verdict.accepted_path)]
        assert verdict.held_length == len(self.held)

    @rule(share=SHARE, append=TOKENS, window=st.integers(1, 5), taken=st.integers(1, 5))
    def draft_and_leave(self, share, append, window, taken):
        base, append, call = self._call(share, append)

        async def take() -> list[int]:
            got: list[int] = []
            async with aclosing(self.host.draft(call, DraftOptions(max_tokens=window))) as stream:
                async for chunk in stream:
                    got += chunk.proposal.token_ids
                    if len(got) == taken:
                        break
            return got

        got = self._await(take())
        assert got == continuation(ModelText(self.backend, SPEC), base + append, min(window, taken))
        self.held = base + append + got

    @rule(share=SHARE, append=TOKENS, branches=st.integers(0, 4), taken=st.integers(1, 5))
    def draft_a_tree_and_leave(self, share, append, branches, taken):
        base, append, call = self._call(share, append)
        window = {"max_tokens": 4, "width": 2, "branch_count": branches}

        async def take() -> int:
            count = 0
            async with aclosing(self.host.draft(call, DraftOptions(**window))) as stream:
                async for _ in stream:
                    if (count := count + 1) == taken:
                        break
            return count

        count = self._await(take())
        text = base + append
        self.held = text + continuation(ModelText(self.backend, SPEC), text, count)

    @rule(share=SHARE, append=TOKENS, window=st.integers(1, 5), taken=st.integers(1, 5))
    def decode_and_leave(self, share, append, window, taken):
        base, append, call = self._call(share, append)

        async def take() -> list[int]:
            got: list[int] = []
            async with aclosing(
                self.host.decode(call, DecodeOptions(max_tokens=window))
            ) as messages:
                async for message in messages:
                    got += message.token_ids
                    if len(got) >= taken:
                        break
            return got

        got = self._await(take())
        assert len(got) >= min(window, taken)
        assert got == continuation(ModelText(self.backend, SPEC), base + append, len(got))
        self.held = base + append + got

    @rule(
        share=SHARE,
        append=TOKENS,
        turns=st.integers(1, 9),
        interval=st.sampled_from([0.0, 1e-4, 1.0]),
        is_draft=st.booleans(),
    )
    def replace_a_stream(self, share, append, turns, interval, is_draft):
        """What came of it is held when a newer call comes, and nothing is added after that."""
        base, append, call = self._call(share, append)

        async def read(got: list[int]) -> None:
            if is_draft:
                async with aclosing(self.host.draft(call, DraftOptions(max_tokens=9))) as chunks:
                    async for chunk in chunks:
                        got += chunk.proposal.token_ids
                return
            options = DecodeOptions(max_tokens=9, interval_seconds=interval)
            async with aclosing(self.host.decode(call, options)) as messages:
                async for message in messages:
                    got += message.token_ids

        async def replace() -> list[int]:
            got: list[int] = []
            reading = asyncio.ensure_future(read(got))
            for _ in range(turns):
                await asyncio.sleep(0)
            held = self.host._sessions.find(self.session)._prefix.tokens().tolist()
            _, _, newer = self._call(1.0, [2], base=held)
            verdict = await self.host.verify(newer, chain([]))
            await asyncio.wait([reading])
            assert reading.exception() is None or isinstance(reading.exception(), SupersededError)
            assert verdict.held_length == len(held) + 1
            return [*held, 2]

        text = base + append
        held = self._await(replace())
        if len(held) > len(base) + 1:
            right = continuation(ModelText(self.backend, SPEC), text, 9)
            assert held[:-1] == (text + right)[: len(held) - 1]
        self.held = held

    @rule(share=SHARE, append=TOKENS, turns=st.integers(0, 3), is_tree=st.booleans())
    def verify_and_cancel(self, share, append, turns, is_tree):
        proposal = Proposal((1, 1, 2), (0, 1, 1)) if is_tree else chain([1, 1])
        base, append, call = self._call(share, append)

        async def cancel() -> asyncio.Task[Verdict]:
            task = asyncio.ensure_future(self.host.verify(call, proposal))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            return task

        if (task := self._await(cancel())).cancelled():
            # Cancelled before its first step it never reached the host.
            self.held = base if turns else self.held
            self.sequence -= 0 if turns else 1
        else:
            self.held = [*base, *append, *proposal.along(task.result().accepted_path)]

    @rule(first=TOKENS, second=TOKENS, seed=st.integers(0, 9), turns=st.integers(1, 4))
    def verify_and_supersede(self, first, second, seed, turns):
        """A tree and then another one, each about a whole text; the newer one counts."""
        texts = [[1, *first], [1, *second]]
        rights = [continuation(ModelText(self.backend, SPEC), text, 7) for text in texts]
        chance = random.Random(seed)
        trees = [random_tree(chance, right, size=6, vocabulary_size=3) for right in rights]
        calls = [self._call(0.0, text)[2] for text in texts]

        async def supersede() -> tuple[asyncio.Task[Verdict], Verdict]:
            older = asyncio.ensure_future(self.host.verify(calls[0], trees[0]))
            for _ in range(turns):
                await asyncio.sleep(0)
            newer = await self.host.verify(calls[1], trees[1])
            await asyncio.wait([older])
            return older, newer

        older, newer = self._await(supersede())
        expected = trees[1].follow(lambda _, depth: rights[1][depth])
        assert (newer.accepted_path, newer.next_token) == expected
        assert older.exception() is None or isinstance(older.exception(), SupersededError)
        self.held = texts[1] + rights[1][: len(newer.accepted_path)]

    @rule(append=TOKENS, beyond=st.integers(1, 5))
    def ask_for_more_than_held(self, append, beyond):
        _, _, call = self._call(1.0, append, base=[*self.held, *[0] * beyond])
        with pytest.raises(PrefixNotHeldError) as caught:
            self._await(self.host.verify(call))
        assert caught.value.metadata["held_length"] == str(len(self.held))

    # No precondition: what is held depends on the thread's pace, and the rules must not.
    @rule(share=SHARE)
    def build_on_another_prefix(self, share):
        if not self.held:
            return
        base = self.held[: 1 + int(share * (len(self.held) - 1))]
        _, _, call = self._call(1.0, [], base=[*base[:-1], (base[-1] + 1) % 3])
        with pytest.raises(PrefixMismatchError):
            self._await(self.host.verify(call))
        self.held = base

    @precondition(lambda self: self.sequence)
    @rule(back=st.integers(0, 3))
    def come_too_late(self, back):
        sequence = max(1, self.sequence - back)
        with pytest.raises(StaleCallError):
            self._await(self.host.verify(call_on(self.session, sequence, base=[], append=[1])))

    @invariant()
    def nothing_is_live_and_the_list_is_the_models(self):
        if not hasattr(self, "host"):
            return
        assert self.host.statistics().calls_live == 0
        session = self.host._sessions.find(self.session)
        assert session._prefix.tokens().tolist() == self.held

    def teardown(self) -> None:
        if hasattr(self, "host"):
            self._await(self.host.stop())
            self.loop.close()


SessionMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestSessionMachine = SessionMachine.TestCase
