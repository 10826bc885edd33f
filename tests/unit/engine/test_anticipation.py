"""A target goes on by itself after a verdict, and the next call takes that over."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from paceline.errors import PrefixMismatchError, PrefixNotHeldError, SessionNotFoundError
from paceline.v1.target_service_pb2 import VerifyRequest
from paceline_contract.calls import VerifyOptions
from paceline_contract.proposal import Proposal
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.simulated import SimulatedBackend
from paceline_engine.terms.calls import SessionSpec
from unit.engine.conftest import Gate, call_on, chain, continuation, instant, running, until

SPEC = SessionSpec(200)
PROMPT = [3, 1, 4]
ORACLE = continuation(ModelText(instant(), SPEC), PROMPT, 40)
AHEAD = VerifyOptions(anticipate=True)


WRONG = (ORACLE[0] + 1) % 256


def opened(host, spec=SPEC) -> str:
    return host.open_session(spec).session_id


async def corrected(host, session: str, options=AHEAD):
    """Have the first token corrected: that is what the model goes on from."""
    call = call_on(session, 1, base=[], append=PROMPT)
    return await host.verify(call, chain([WRONG]), options=options)


async def only_forwards(host, count: int) -> bool:
    """Whether the model ran so many forwards, and no other one waits: asked by one more forward."""
    other = opened(host)
    await host.verify(call_on(other, 1, base=[], append=PROMPT))
    host.close_session(other)
    now = host.statistics()
    return (now.forwards, now.queue_length, now.forwards_running) == (count + 1, 0, 0)


def next_call(session: str, done: int = 1):
    """The call for the token after so many."""
    text = PROMPT + ORACLE[:done]
    return call_on(session, done + 1, base=text[:-1], append=text[-1:])


class Turnstile(Gate):
    """Lets one forward pass at once; the others wait at the gate."""

    def __init__(self) -> None:
        super().__init__()
        self._is_first = True

    def _forward(self, feeds, interrupt):
        if not self._is_first:
            return super()._forward(feeds, interrupt)
        self._is_first = False
        self.entered.append(1)
        return SimulatedBackend._forward(self, feeds, interrupt)


@asynccontextmanager
async def begun(spec=SPEC, **settings):
    """A host, a session for which a forward has begun ahead, and the gate that this waits at."""
    gate = Turnstile()
    async with running(gate, **settings) as host:
        session = opened(host, spec)
        await corrected(host, session)
        await until(lambda: len(gate.entered) >= 2)
        yield host, session, gate


async def test_what_follows_on_a_correction_is_found_begun():
    async with running(instant()) as host:
        session = opened(host)
        assert (await corrected(host, session)).next_token == ORACLE[0]
        await until(lambda: host.statistics().forwards == 2)
        verdict = await host.verify(next_call(session))
        assert (verdict.next_token, verdict.timing.began_early) == (ORACLE[1], True)
        assert host.statistics().calls_anticipated == 1
        host.close_session(session)
        assert host.statistics().wasted_ns == 0


@pytest.mark.parametrize("block", [[], ORACLE[:1], ORACLE[:3]])
async def test_where_nothing_is_rejected_nothing_is_begun(block):
    async with running(instant()) as host:
        session = opened(host)
        call = call_on(session, 1, base=[], append=PROMPT)
        await host.verify(call, chain(block), options=AHEAD)
        assert await only_forwards(host, 1)


@pytest.mark.parametrize(("path", "is_corrected"), [((0, 1), False), ((0,), True), ((2,), False)])
def test_in_a_tree_a_path_to_a_leaf_rejects_nothing(path, is_corrected):
    tree = Proposal((5, 6, 7), (0, 1, 0))
    assert tree.goes_on_after(path) is is_corrected
    assert tree.goes_on_after(())
    assert not Proposal().goes_on_after(())


@pytest.mark.parametrize("propose", [False, True])
async def test_what_is_begun_proposes_as_the_call_before_it(propose):
    options = VerifyOptions(anticipate=True, propose=True)
    async with running(instant(self_rates=(0.9, 0.9))) as host:
        session = opened(host)
        await corrected(host, session, options)
        verdict = await host.verify(next_call(session), options=VerifyOptions(propose=propose))
        assert verdict.timing.began_early is propose
        assert (len(verdict.proposal) > 0) is propose


async def test_lists_that_lie_in_a_message_ask_for_the_same():
    from_wire = VerifyRequest().proposal
    proposal = Proposal(from_wire.token_ids, from_wire.parents, from_wire.distributions)
    async with running(instant()) as host:
        session = opened(host)
        await corrected(host, session)
        assert (await host.verify(next_call(session), proposal)).timing.began_early


async def test_a_forward_that_runs_already_is_taken_over():
    async with begun() as (host, session, gate):
        gate.open.set()
        verdict = await host.verify(next_call(session))
        assert (verdict.next_token, verdict.timing.began_early) == (ORACLE[1], True)
        assert await only_forwards(host, 2), "the last call did not ask to go on"


async def test_nothing_is_begun_unless_it_is_asked_for():
    async with running(instant()) as host:
        session = opened(host)
        assert (await corrected(host, session, VerifyOptions())).next_token == ORACLE[0]
        verdict = await host.verify(next_call(session))
        assert (verdict.next_token, verdict.timing.began_early) == (ORACLE[1], False)
        assert host.statistics().forwards == 2


@pytest.mark.parametrize(
    ("count", "block"), [(1, ORACLE[1:2]), (1, [WRONG]), (2, []), (2, ORACLE[2:4])]
)
async def test_what_asks_for_something_else_gets_its_own_answer(count, block):
    async with running(instant()) as host:
        session = opened(host)
        await corrected(host, session)
        call = call_on(session, 2, base=PROMPT, append=ORACLE[:count])
        verdict = await host.verify(call, chain(block), options=AHEAD)
        accepted = 0 if block == [WRONG] else len(block)
        assert len(verdict.accepted_path) == accepted
        assert verdict.next_token == ORACLE[count + accepted]
        assert not verdict.timing.began_early


async def test_after_accepted_tokens_it_goes_on_behind_them():
    async with running(instant()) as host:
        session = opened(host)
        first = call_on(session, 1, base=[], append=PROMPT)
        await host.verify(first, chain([*ORACLE[:3], WRONG]), options=AHEAD)
        text = PROMPT + ORACLE[:4]
        verdict = await host.verify(call_on(session, 2, base=text[:-1], append=text[-1:]))
        assert (verdict.next_token, verdict.timing.began_early) == (ORACLE[4], True)


async def test_it_gives_way_to_what_somebody_asks_for_and_begins_anew_beside_it():
    async with begun() as (host, session, gate), asyncio.TaskGroup() as group:
        real = group.create_task(corrected(host, opened(host)))
        await until(lambda: host.statistics().forwards_interrupted == 1)
        gate.open.set()
        assert (await real).next_token == ORACLE[0]
        statistics = host.statistics()
        assert statistics.wasted_ns > 0
        assert statistics.forwards_wasted == 0, "it was not withdrawn"
        assert (await host.verify(next_call(session))).next_token == ORACLE[1]


@pytest.mark.parametrize("ends", ["closed", "asked for something else"])
async def test_what_was_begun_is_waste_once_nobody_will_ask_for_it(ends):
    async with running(instant()) as host:
        session = opened(host)
        await corrected(host, session)
        await until(lambda: host.statistics().forwards == 2)
        assert host.statistics().wasted_ns == 0
        if ends == "closed":
            host.close_session(session)
        else:
            await host.verify(next_call(session), chain([WRONG]))
        wasted_ns = host.statistics().wasted_ns
        assert wasted_ns > 0
        host.close_session(session)
        assert host.statistics().wasted_ns == wasted_ns


async def test_a_session_that_ends_takes_what_was_begun_along():
    async with begun() as (host, session, _):
        host.close_session(session)
        await until(lambda: not host.statistics().forwards_running)
        statistics = host.statistics()
        assert (statistics.forwards_wasted, statistics.queue_length) == (1, 0)
        with pytest.raises(SessionNotFoundError):
            await host.verify(next_call(session))


@pytest.mark.parametrize("notices", ["reaper", "call"])
async def test_a_session_whose_lease_ends_takes_what_was_begun_along(notices):
    now, spec = 0.0, SessionSpec(200, lease_seconds=1)
    async with begun(spec, clock=lambda: now) as (host, session, _):
        now = 50.0
        if notices == "reaper":
            opened(host)  # looks for sessions whose lease is over
        else:
            with pytest.raises(SessionNotFoundError):
                await host.verify(next_call(session))
        await until(lambda: not host.statistics().forwards_running)
        statistics = host.statistics()
        assert (statistics.forwards_wasted, statistics.queue_length) == (1, 0)
        assert statistics.sessions_expired == 1


@pytest.mark.parametrize(
    ("base", "error"), [(PROMPT + ORACLE[:5], PrefixNotHeldError), ([9, 9, 9], PrefixMismatchError)]
)
async def test_a_call_that_is_refused_for_its_base_takes_what_was_begun_along(base, error):
    async with begun() as (host, session, gate):
        with pytest.raises(error):
            await host.verify(call_on(session, 2, base=base, append=ORACLE[:1]))
        gate.open.set()
        await until(lambda: not host.statistics().forwards_running)
        statistics = host.statistics()
        assert (statistics.forwards_wasted, statistics.queue_length) == (1, 0)


async def test_a_caller_that_leaves_takes_along_what_its_answer_began():
    gate = Gate()
    async with running(gate) as host:
        session = opened(host)
        call = asyncio.create_task(corrected(host, session))
        await until(lambda: len(gate.entered) >= 1)
        call.cancel()
        gate.open.set()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: not host.statistics().forwards_running)
        again = call_on(session, 2, base=[], append=[*PROMPT, ORACLE[0]])
        assert not (await host.verify(again)).timing.began_early
        assert host.statistics().queue_length == 0
        assert (await host.verify(call_on(session, 3, base=[], append=PROMPT))).next_token == (
            ORACLE[0]
        )


async def test_logprobs_of_what_was_begun_are_those_that_are_asked_for():
    wanted = VerifyOptions(anticipate=True, logprobs=True, top_logprobs=2)
    async with running(instant()) as host:
        session = opened(host)
        await corrected(host, session, wanted)
        verdict = await host.verify(next_call(session), options=wanted)
        assert (verdict.logprobs, verdict.timing.began_early) == ((0.0,), True)
        assert verdict.top_logprobs == (((verdict.next_token, 0.0),),)
        other = opened(host)
        await corrected(host, other, wanted)
        assert not (await host.verify(next_call(other), options=AHEAD)).timing.began_early


async def test_an_error_in_what_was_begun_is_nobodys():
    async with begun() as (host, session, gate):
        gate.failures.append(ZeroDivisionError())
        gate.open.set()
        await until(lambda: not host.statistics().forwards_running)
        await until(lambda: not gate.failures)
        assert (await host.verify(next_call(session))).next_token == ORACLE[1]


@pytest.mark.parametrize("eos", [True, False])
async def test_behind_the_end_of_a_text_nothing_is_begun(eos):
    model = instant()
    ends = (ORACLE[0],) if eos else ()
    model.description = type(model.description)(
        **{
            **{name: getattr(model.description, name) for name in model.description.__slots__},
            "eos_token_ids": ends,
        }
    )
    async with running(model) as host:
        session = opened(host)
        await corrected(host, session)
        if eos:
            assert await only_forwards(host, 1)
        else:
            await until(lambda: host.statistics().forwards == 2)
