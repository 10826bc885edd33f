"""A session at a server: what it sends, what it repairs, how it is kept and closed."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from paceline import errors
from paceline_contract.calls import DraftOptions, PrefixCall
from paceline_contract.proposal import Proposal
from paceline_orchestrator.decoding.deadline import Deadline
from paceline_orchestrator.decoding.exchange import SessionSpec
from paceline_orchestrator.decoding.session import RemoteSession
from paceline_orchestrator.decoding.session_opener import Opening, SessionOpener
from paceline_orchestrator.fleet.bad_answers import BadAnswerError
from paceline_orchestrator.fleet.discovery import Endpoint, Role
from paceline_orchestrator.fleet.server import ModelServer
from paceline_orchestrator.fleet.wire import fetch_facts
from paceline_serving.transport import pod_channel
from support.fake_models import FakeModelServer, serving
from support.fake_text import continuation

TEXT = (1, 2, 3, 4)


@asynccontextmanager
async def a_session(fake, *, seconds=20.0):
    """Open a session; in the end it is closed, whatever the test did."""
    async with serving(fake):
        channel = pod_channel(fake.address, credentials=None)
        server = ModelServer(Endpoint("it", fake.address, Role(fake.role)), channel)
        server.adopt(await fetch_facts(server.models))
        async with SessionOpener() as opener:
            session = RemoteSession(
                server,
                SessionSpec(fingerprint=fake.fingerprint, reserve_length=100),
                opener=opener,
                deadline=Deadline.after(seconds),
                note_repair=lambda kind: session.repairs.update([kind.value]),
            )
            session.repairs = Counter()
            yield session
            session.close()
        assert not fake.sessions
        assert server.session_count == 0
        await channel.close()


async def test_a_session_for_a_long_text_is_opened_when_it_is_its_turn():
    fake, asked, turn = FakeModelServer("target"), [], asyncio.Event()

    async def passed(length, *, share):
        asked.append((length, share))
        await turn.wait()

    async with serving(fake), SessionOpener() as opener:
        channel = pod_channel(fake.address, credentials=None)
        server = ModelServer(Endpoint("it", fake.address, Role(fake.role)), channel)
        opener.long_texts.wait_turn = passed
        spec = SessionSpec(fingerprint=fake.fingerprint, reserve_length=100, share="a")
        opening = opener.open(server, spec)
        await asyncio.sleep(0)
        assert (asked, len(fake.sessions)) == ([(100, "a")], 0)
        turn.set()
        assert (await opening).session_id in fake.sessions
        opener.close(server, opening)
    await channel.close()


async def verify(session, prefix, block=()):
    return await session.verify(prefix, Proposal(tuple(block)), final_length=len(TEXT))


async def test_a_verdict_is_the_targets():
    fake = FakeModelServer("target")
    async with a_session(fake) as session:
        right = continuation(TEXT, 3)
        judged = await verify(session, TEXT, (*right[:2], 0))
        assert (len(judged.accepted_path), judged.next_token) == (2, right[2])
        await verify(session, (*TEXT, *right))
        assert [it.call.base_length for it in fake.calls] == [0, len(TEXT) + 2]
        assert [list(it.call.token_ids) for it in fake.calls] == [list(TEXT), [right[2]]]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("lose_session", "session_lost"),
        ("lose_tokens", "prefix_resent"),
        ("tamper", "prefix_resent"),
    ],
)
async def test_what_was_lost_is_sent_again(fault, kind):
    fake = FakeModelServer("target")
    async with a_session(fake) as session:
        await verify(session, TEXT)
        fake.faults.append(fault)
        judged = await verify(session, (*TEXT, 5))
        assert judged.next_token == continuation((*TEXT, 5), 1)[0]
        assert session.repairs == {kind: 1}


async def test_a_loss_that_two_calls_hear_of_is_made_good_once_and_by_the_newer():
    fake = FakeModelServer("target")
    async with a_session(fake) as session:
        await verify(session, TEXT)
        fake.faults.extend(["hang", "lose_session"])
        older = asyncio.ensure_future(verify(session, (*TEXT, 5)))
        await fake.until(lambda it: it.running == 1)
        newer = asyncio.ensure_future(verify(session, (*TEXT, 5)))
        await fake.until(lambda it: len(it.calls) == 3)
        # What the older call hears when its handle is gone, too.
        lost = errors.SessionNotFoundError("no such session")
        with pytest.raises(errors.SessionNotFoundError):
            session.repair(lost, fake.calls[1].call)
        assert (await newer).next_token == continuation((*TEXT, 5), 1)[0]
        assert session.repairs == {"session_lost": 1}
        assert fake.opened == 2
        older.cancel()


async def test_who_waits_for_an_opening_that_is_replaced_waits_for_the_new_one():
    openings = [asyncio.get_running_loop().create_future() for _ in range(2)]
    opener = SimpleNamespace(
        open=lambda *_: openings.pop(0), close=lambda *_: None, forget=lambda *_: None
    )
    first, second = openings
    session = RemoteSession(
        SimpleNamespace(session_count=0),
        SessionSpec(fingerprint="it", reserve_length=1),
        opener=opener,
        deadline=Deadline.after(20),
        note_repair=lambda _: None,
    )
    waiting = asyncio.ensure_future(session.opened())
    await asyncio.sleep(0)
    first.set_result(Opening(session_id="lost"))
    session.repair(
        errors.SessionNotFoundError("no such session"), PrefixCall("lost", 0, 0, b"", TEXT, "it")
    )
    second.set_result(Opening(session_id="the newest"))
    assert await waiting == "the newest"


async def test_a_closed_session_is_not_opened_again_for_a_call_that_is_still_under_way():
    fake = FakeModelServer("target")
    async with a_session(fake) as session:
        await verify(session, TEXT)
        fake.faults.append("hang")
        late = asyncio.ensure_future(verify(session, (*TEXT, 5)))
        await fake.until(lambda it: it.running == 1)
        session.close()
        with pytest.raises(errors.SessionNotFoundError):
            session.repair(errors.SessionNotFoundError("it was closed"), fake.calls[1].call)
        late.cancel()
        session.server.session_count += 1  # the context closes it, too


async def test_a_server_that_keeps_losing_is_given_up():
    fake = FakeModelServer("target")
    async with a_session(fake) as session:
        fake.faults.extend(["lose_session"] * 9)
        with pytest.raises(BadAnswerError):
            await verify(session, TEXT)


async def test_a_newer_call_supersedes_one_whose_cancel_has_not_landed():
    fake = FakeModelServer("target")
    async with a_session(fake) as session:
        fake.faults.extend(["", "hang"])
        await verify(session, TEXT)
        async with asyncio.TaskGroup() as tasks:
            stale = tasks.create_task(verify(session, (*TEXT, 9), (8,)))
            await fake.until(lambda it: it.running == 1)
            stale.cancel()
            judged = await verify(session, (*TEXT, 7))
        assert judged.next_token == continuation((*TEXT, 7), 1)[0]
        await fake.until(lambda it: len(it.cut_short) == 1)


async def test_what_nobody_wants_any_more_is_not_repaired():
    fake = FakeModelServer("target")
    async with a_session(fake) as session:
        await verify(session, TEXT)
        fake.faults.append("lose_tokens")
        unwanted = session.verify((*TEXT, 9), Proposal(), final_length=len(TEXT))
        unwanted.release()
        with pytest.raises(errors.SessionError):
            await unwanted
        assert len(fake.calls) == 2
        assert not session.repairs


async def test_what_nobody_wants_any_more_is_not_sent_when_its_session_opens():
    fake = FakeModelServer("target")
    async with a_session(fake) as session:
        unwanted = session.verify(TEXT, Proposal(), final_length=len(TEXT))
        unwanted.release()
        with pytest.raises(errors.SupersededError):
            await unwanted
        assert not fake.calls


async def test_a_drafter_keeps_what_it_streamed_when_it_is_stopped():
    fake = FakeModelServer("drafter", latency_seconds=0.001)
    async with a_session(fake) as session:
        received = []
        enough = asyncio.Event()

        def report(drafted):
            received.extend(drafted.proposal.token_ids)
            if len(received) >= 3:
                enough.set()

        async def draft(prefix, count):
            await session.draft(
                prefix, DraftOptions(max_tokens=count), final_length=len(TEXT), report=report
            )

        async with asyncio.TaskGroup() as tasks:
            drafting = tasks.create_task(draft(TEXT, 90))
            await enough.wait()
            drafting.cancel()
        count = len(received)
        assert received == continuation(TEXT, count)
        await draft((*TEXT, *received), 2)
        assert received == continuation(TEXT, count + 2)
        assert fake.calls[1].call.base_length == len(TEXT) + count
        assert not session.repairs


@pytest.mark.parametrize(("role", "method"), [("target", "Verify"), ("drafter", "Draft")])
async def test_a_call_has_a_second_more_than_its_request(role, method):
    """So that it is the request's end that ends it, and a server that hears nothing ends it too."""
    async with a_session(FakeModelServer(role), seconds=9.0) as session:
        await session.opened()
        stub, timeouts = getattr(session.server, role), []
        send = getattr(stub, method)

        def sending(request, *, timeout):
            timeouts.append(timeout)
            return send(request, timeout=timeout)

        setattr(stub, method, sending)
        before = session._deadline.remaining_seconds
        if role == "target":
            await verify(session, TEXT)
        else:
            await session.draft(
                TEXT, DraftOptions(max_tokens=1), final_length=4, report=lambda _: None
            )
        after = session._deadline.remaining_seconds
        (timeout,) = timeouts
        assert after + 1 <= timeout <= before + 1


async def test_an_idle_session_is_renewed_and_a_busy_one_is_not():
    fake = FakeModelServer("target")
    async with a_session(fake) as session:
        await verify(session, TEXT)
        await session.renew(idle_seconds=60)
        assert fake.renewed == 0
        await session.renew(idle_seconds=0)
        assert fake.renewed == 1
