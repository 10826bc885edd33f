"""Random histories of a host's calls: each gets its own answer, whatever befalls its neighbours.

Calls arrive, are cancelled, replaced, asked again at another depth, foreseen, and fail alone, and
sessions begin with what others have left, while forwards pass a gate one by one and a clock ticks
only when it is read. So a history is its seed's.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest

from paceline.errors import InvalidFieldError, OverloadedError, SupersededError
from paceline_contract.calls import DecodeOptions, DraftOptions, VerificationRule, VerifyOptions
from paceline_contract.proposal import SparseDistribution
from paceline_contract.sampling import SamplingParameters
from paceline_engine.model_backend import Feed
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.simulated import SimulatedBackend, SimulatedCache, SimulatedModel
from paceline_engine.terms.backend import ForwardInterrupted, Interrupt
from paceline_engine.terms.calls import SessionSpec, Verdict
from support.trees import random_tree
from unit.engine.conftest import call_on, chain, continuation, instant, until

TICK_NS = 1_000_000
SESSIONS, STEPS, SEEDS = 10, 220, 12
RESERVED = 1000
# Beside all sessions there is room for a few kept texts.
LIMITS = HostLimits(
    warm_up_rounds=0, queue_limit=5, keep_seconds=600, token_budget=(SESSIONS + 4) * RESERVED
)
LENGTHS = (1, 2, 5, 20, 90, 300)
COMMON = [random.Random(9).randrange(2048), *range(300)]
# Half of a distribution is none; the loop does not look.
HALF = SparseDistribution((3,), (0.5,))


class CopiedText(SimulatedCache):
    """A simulated text that another can begin with, though its seed makes other hashes of it."""

    can_be_copied = True

    def __init__(self, model: SimulatedModel, spec: SessionSpec) -> None:
        super().__init__(model, spec)
        self._made_of = model, spec

    def _copy(self, source, length):
        anew = SimulatedCache(*source._made_of)
        anew.append(Feed(anew, source.token_ids, scored_count=0))
        assert anew._hashes == source._hashes[: len(anew._hashes)], "it stands for what it says"
        self.append(Feed(self, source.token_ids[:length], scored_count=0))


class Gated(SimulatedBackend):
    """An instant model: each forward waits until it is let pass; some texts have no memory."""

    def __init__(self) -> None:
        super().__init__(SimulatedModel(ttft_seconds=0, tpot_seconds=0))
        rules = (VerificationRule.EXACT, VerificationRule.REJECTION)
        self.description = replace(self.description, verification_rules=rules)
        self.without_memory: set[object] = set()
        self.most_together = 0
        self._passes, self._changed = 0.0, threading.Condition()
        self._waiting: Interrupt | None = None

    def new_cache(self, spec: SessionSpec) -> CopiedText:
        return CopiedText(self.model, spec)

    @property
    def waits(self) -> bool:
        """Whether a forward stands at the gate, and nothing moves it."""
        with self._changed:
            return self._waiting is not None and not self._waiting.is_set()

    def let_pass(self, count: float) -> None:
        with self._changed:
            self._passes += count
            self._waiting = None
            self._changed.notify_all()

    def _forward(self, feeds, interrupt):
        if self.without_memory & {feed.cache for feed in feeds}:
            raise OverloadedError("no memory", retry_after_seconds=1)
        with self._changed:
            while self._passes <= 0:
                self._waiting = interrupt
                self._changed.wait(0.0005)
                if interrupt.is_set():
                    self._waiting = None
                    raise ForwardInterrupted
            self._passes -= 1
        self.most_together = max(self.most_together, len(feeds))
        return super()._forward(feeds, interrupt)


def busy(host: ModelHost) -> bool:
    """Whether a forward runs, or should."""
    with host._worker._changed:
        return host._worker.busy or host._worker.queue_length > 0


@dataclass(eq=False)
class Call:
    """One that was made: what it shall get, and what else it may get."""

    expected: object
    again: tuple[object, ...]
    task: asyncio.Task[object] | None = None
    may_get: set[type[BaseException]] = field(default_factory=set)
    must_get: type[BaseException] | None = None


@dataclass(eq=False)
class Caller:
    """A session, and its calls one after the other."""

    name: str
    spec: SessionSpec
    sequence: int = 0
    live: Call | None = None


class History:
    """A host, its callers, and what chance has them do."""

    def __init__(self, host: ModelHost, model: Gated, *, seed: int) -> None:
        self.host, self.model = host, model
        self.chance = random.Random(seed)
        self.callers = [self.opened(n) for n in range(SESSIONS)]
        self.calls: list[Call] = []
        self.met: Counter[str] = Counter()

    def opened(self, n: int) -> Caller:
        rejecting = n % 5 == 4
        spec = SessionSpec(
            RESERVED,
            SamplingParameters(0.0 if rejecting or n % 2 else 1.0),
            seed=n,
            rule=VerificationRule.REJECTION if rejecting else VerificationRule.EXACT,
            share="abc"[n % 3],
        )
        return Caller(self.host.open_session(spec).session_id, spec)

    async def run(self) -> None:
        often = [self.ask] * 6 + [self.ask_again, self.go_on] * 2 + [self.cancel] * 3
        actions = [*often, self.lose_memory, self.find_memory, self.find_memory, self.reopen]
        for _ in range(STEPS):
            self.chance.choice(actions)()
            await self.settled()
            if self.model.waits and self.chance.random() < 0.35:
                self.model.let_pass(1)
                await self.settled()
        self.model.let_pass(10**9)
        await asyncio.wait([call.task for call in self.calls])

    async def settled(self) -> None:
        """Wait until a forward stands at the gate, or nothing is to be done."""
        for _ in range(2):
            # What was begun goes to the worker, and what it gave to the callers.
            for _ in range(5):
                await asyncio.sleep(0)
            await until(lambda: self.model.waits or not busy(self.host))

    # --- what happens -------------------------------------------------------------------------

    def ask(self) -> None:
        caller = self.chance.choice(self.callers)
        text = [self.chance.randrange(2048) for _ in range(self.chance.choice(LENGTHS))]
        if self.chance.random() < 0.5:
            text = COMMON[: self.chance.choice((40, 90, 300))] + text[:20]
        count = self.chance.randint(1, 4)
        if self.chance.random() < 0.4:
            self.send(caller, self.chance.choice(("draft", "decode")), text, count)
            return
        block = continuation(ModelText(instant(), caller.spec), text, count)
        if self.chance.random() < 0.5:
            block[self.chance.randrange(count)] = 7
        tree = chain(block)
        if caller.spec.rule is VerificationRule.EXACT and self.chance.random() < 0.4:
            right = continuation(ModelText(instant(), caller.spec), text, count)
            tree = random_tree(self.chance, right, size=6, vocabulary_size=2048)
        self.send(caller, "verify", text, tree)

    def ask_again(self) -> None:
        """The same call, at another depth: it takes over the older one's work."""
        caller = self.chance.choice(self.callers)
        if caller.live is not None:
            kind, text, what = caller.live.again
            if self.chance.random() < 0.3:
                # The same question about another text is another.
                text = [(text[0] + 1) % 2048, *text[1:]]
            self.send(caller, kind, text, what)

    def go_on(self) -> None:
        """What an answer leaves open: the model may have begun it by itself."""
        caller = self.chance.choice(self.callers)
        call = caller.live
        if call is not None and call.task.done() and not call.task.cancelled():
            kind, text, what = call.again
            if kind == "verify" and call.task.exception() is None:
                accepted, next_token = call.task.result()
                self.send(caller, kind, [*text, *what.along(accepted), next_token], chain([]))

    def cancel(self) -> None:
        call = self.chance.choice(self.callers).live
        if call is not None and not call.task.done():
            self.met["cancelled"] += 1
            call.may_get.add(asyncio.CancelledError)
            call.task.cancel()

    def lose_memory(self) -> None:
        """A text has no memory from now on, and its call may find that out."""
        caller = self.chance.choice(self.callers)
        self.model.without_memory.add(self.cache(caller))
        if caller.live is not None:
            caller.live.may_get.add(OverloadedError)

    def find_memory(self) -> None:
        self.model.without_memory.discard(self.cache(self.chance.choice(self.callers)))

    def reopen(self) -> None:
        n = self.chance.randrange(SESSIONS)
        self.replace(self.callers[n])
        self.host.close_session(self.callers[n].name)
        self.callers[n] = self.opened(n)

    def cache(self, caller: Caller) -> object:
        return self.host._sessions.find(caller.name).cache

    def replace(self, caller: Caller) -> None:
        if caller.live is not None and not caller.live.task.done():
            caller.live.may_get.add(SupersededError)
        caller.live = None

    # --- what is asked ------------------------------------------------------------------------

    def send(self, caller: Caller, kind: str, text: list[int], what) -> None:
        self.replace(caller)
        caller.sequence += 1
        request = call_on(caller.name, caller.sequence, base=[], append=text)
        if kind in {"draft", "decode"}:
            expected = tuple(continuation(ModelText(instant(), caller.spec), text, what))
            call = Call(expected, (kind, text, what))
            work = (self.drafted if kind == "draft" else self.decoded)(request, what)
            self.met[kind] += 1
        else:
            call = Call(self.judgement(caller.spec, text, what), (kind, text, what))
            distributions = ()
            if caller.spec.rule is VerificationRule.REJECTION:
                drawn = (SparseDistribution((each,), (1.0,)) for each in what.token_ids)
                distributions = tuple(drawn)
                if distributions and self.chance.random() < 0.5:
                    distributions = (HALF, *distributions[1:])
                    call.must_get = InvalidFieldError
            options = VerifyOptions(
                depth=self.chance.randrange(4), anticipate=self.chance.random() < 0.7
            )
            work = self.judged(request, replace(what, distributions=distributions), options)
        if self.cache(caller) in self.model.without_memory:
            call.may_get.add(OverloadedError)
        call.task = asyncio.create_task(work, name=f"call {len(self.calls)}")
        self.calls.append(call)
        caller.live = call

    async def drafted(self, request, count: int) -> tuple[int, ...]:
        found: list[int] = []
        async with aclosing(self.host.draft(request, DraftOptions(max_tokens=count))) as chunks:
            async for chunk in chunks:
                found.extend(chunk.proposal.token_ids)
        return tuple(found)

    async def decoded(self, request, count: int) -> tuple[int, ...]:
        found: list[int] = []
        async with aclosing(self.host.decode(request, DecodeOptions(max_tokens=count))) as messages:
            async for message in messages:
                assert message.start_length == request.prefix_length + len(found)
                found.extend(message.token_ids)
        return tuple(found)

    async def judged(self, request, proposal, options) -> tuple[tuple[int, ...], int]:
        verdict: Verdict = await self.host.verify(request, proposal, options=options)
        return verdict.accepted_path, verdict.next_token

    def judgement(self, spec, text, proposal) -> tuple[tuple[int, ...], int]:
        right = continuation(ModelText(instant(), spec), text, len(proposal) + 1)
        self.met["trees"] += not proposal.is_chain
        return proposal.follow(lambda _, depth: right[depth])

    # --- what came of it ----------------------------------------------------------------------

    def check(self, call: Call) -> None:
        if call.task.cancelled():
            assert asyncio.CancelledError in call.may_get
        elif (error := call.task.exception()) is None:
            assert call.must_get is None
            assert call.task.result() == call.expected
            self.met["answered"] += 1
        else:
            queue_was_full = "calls wait for this model" in str(error)
            kinds = {*call.may_get, *filter(None, [call.must_get])}
            assert queue_was_full or type(error) in kinds, (call.again, error)
            self.met["refused" if queue_was_full else type(error).__name__] += 1


@pytest.fixture(scope="module")
def happened() -> Counter[str]:
    """What the histories had, added up."""
    return Counter()


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_every_call_gets_its_own_answer_or_its_own_error(seed, happened):
    model = Gated()
    host = ModelHost(lambda: model, limits=LIMITS)
    host._worker._clock_ns = itertools.count(step=TICK_NS).__next__
    await host.start()
    try:
        history = History(host, model, seed=seed)
        await history.run()
        for call in history.calls:
            history.check(call)
        for caller in history.callers:
            host.close_session(caller.name)
        await until(lambda: not busy(host))
        check_books(host)
        happened.update(history.met + counted(host), histories=1)
        happened["together"] = max(happened["together"], model.most_together)
    finally:
        model.let_pass(10**9)
        await host.stop()


def check_books(host: ModelHost) -> None:
    statistics = host.statistics()
    assert (statistics.calls_live, statistics.queue_length) == (0, 0)
    assert (statistics.sessions_open, statistics.tokens_reserved) == (0, 0)
    places = host._worker._queue._places
    assert (places.free, dict(places._held)) == (LIMITS.queue_limit, {})


def counted(host: ModelHost) -> Counter[str]:
    """What the host saw of the kinds that a history is to have."""
    statistics = host.statistics()
    return Counter(
        parts=statistics.prefill_parts,
        adopted=statistics.calls_adopted,
        foreseen=statistics.calls_anticipated,
        interrupted=statistics.forwards_interrupted,
        reused=statistics.tokens_reused,
    )


def test_the_histories_had_all_that_they_are_about(happened):
    if happened["histories"] < SEEDS:
        pytest.skip(f"this is about {SEEDS} histories that went well")
    kinds = {"answered", "cancelled", "refused", "parts", "adopted", "interrupted", "trees"}
    kinds |= {"draft", "decode", "foreseen", "reused"}
    kinds |= {each.__name__ for each in (SupersededError, InvalidFieldError, OverloadedError)}
    assert {kind for kind in kinds if not happened[kind]} == set(), happened
    assert happened["together"] > 3
