"""What servers answer is checked before it is believed, and learnt from."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import pytest

from paceline.v1.drafter_service_pb2 import DraftResponse
from paceline.v1.session_service_pb2 import CallTiming
from paceline.v1.target_service_pb2 import DecodeResponse, VerifyResponse
from paceline_contract.calls import DecodeOptions, DraftOptions, VerificationRule, VerifyOptions
from paceline_contract.proposal import Proposal
from paceline_orchestrator.decoding.deadline import Deadline, patience_seconds
from paceline_orchestrator.decoding.exchange import SessionSpec
from paceline_orchestrator.decoding.session import RemoteSession
from paceline_orchestrator.decoding.session_opener import Opening
from paceline_orchestrator.fleet.bad_answers import BadAnswerError
from paceline_orchestrator.fleet.latency import ObservedLatency

TEXT = (1, 2, 3, 4)
SIZE = 10
MS = 1_000_000
TIMING = {"forward_count": 1, "forward_ns": 5 * MS, "row_count": 1}


class Messages:
    """A draft's answers."""

    def __init__(self, *messages):
        self._messages = messages

    async def __aiter__(self):
        for message in self._messages:
            kind = DraftResponse if "proposal" in message else DecodeResponse
            yield kind(**message)

    def cancel(self):
        pass


class Silence:
    """Remembers how long each answer may take."""

    def __init__(self):
        self.patience = []

    def begin(self, _rpc, *, patience_seconds, **_more):
        self.patience.append(patience_seconds)
        return SimpleNamespace(is_given_up=False)

    def heard(self, _waiting, *, patience_seconds=None):
        if patience_seconds is not None:
            self.patience.append(patience_seconds)

    def end(self, _waiting, *, rpc):
        pass


def a_server(*, verdict=None, drafts=(), decodes=()):
    """A server that answers each call with this."""

    async def judge():
        return VerifyResponse(**verdict)

    return SimpleNamespace(
        name="it",
        facts=SimpleNamespace(vocabulary_size=SIZE),
        target=SimpleNamespace(
            Verify=lambda *_, **__: judge(), Decode=lambda *_, **__: Messages(*decodes)
        ),
        drafter=SimpleNamespace(Draft=lambda *_, **__: Messages(*drafts)),
        latency=ObservedLatency(clock=lambda: 0.0),
        silence=Silence(),
        session_count=0,
        call_count=0,
    )


def a_session(server, *, rule=VerificationRule.EXACT):
    opening = asyncio.get_running_loop().create_future()
    opening.set_result(Opening(session_id="it"))
    return RemoteSession(
        server,
        SessionSpec(fingerprint="it", reserve_length=9, rule=rule),
        opener=SimpleNamespace(open=lambda *_: opening, close=lambda *_: None),
        deadline=Deadline.after(60),
        note_repair=lambda _: None,
    )


async def verified(server, **options):
    block = Proposal((5, 6))
    return await a_session(server).verify(TEXT, block, VerifyOptions(**options), final_length=4)


async def drafted(server, *, reported=None, rule=VerificationRule.EXACT):
    told = [] if reported is None else reported
    await a_session(server, rule=rule).draft(
        TEXT,
        DraftOptions(max_tokens=4),
        final_length=4,
        report=lambda it: told.extend(it.proposal.token_ids),
    )
    return told


async def decoded(server, *, reported=None, **options):
    told = [] if reported is None else reported
    await a_session(server).decode(
        TEXT,
        DecodeOptions(max_tokens=4, **options),
        report=lambda it: told.extend(it.token_ids),
    )
    return told


RIGHT = {"sequence": 1, "prefix_length": 4, "accepted_path": [0], "next_token_id": 9}


async def test_a_verdict_on_what_was_asked_is_believed():
    judged = await verified(a_server(verdict={**RIGHT, "timing": TIMING}))
    assert (judged.accepted_path, judged.next_token) == ((0,), 9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sequence": 2},
        {"sequence": 0},
        {"prefix_length": 5},
        {"accepted_path": [0, 1, 2]},
        {"accepted_path": [1]},
        {"accepted_path": [1, 0]},
        {"next_token_id": SIZE},
        {"next_token_id": 2**32 - 1},
    ],
    ids=str,
)
async def test_a_verdict_on_something_else_is_an_error(wrong):
    with pytest.raises(BadAnswerError):
        await verified(a_server(verdict={**RIGHT, **wrong}))


LIKELIEST = {"token_ids": [5], "logprobs": [-0.5]}
TOLD = {"logprobs": [-0.5, -0.5], "top_logprobs": [LIKELIEST, LIKELIEST]}


async def test_what_was_likely_is_believed_of_each_token():
    told = await verified(a_server(verdict={**RIGHT, **TOLD}), logprobs=True, top_logprobs=1)
    assert told.logprobs == (-0.5, -0.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": [-0.5] * 3},
        {"logprobs": []},
        {"top_logprobs": [LIKELIEST]},
        {"top_logprobs": [{"logprobs": [-0.5]}, LIKELIEST]},
        {"top_logprobs": [{"token_ids": [SIZE], "logprobs": [-0.5]}, LIKELIEST]},
    ],
    ids=str,
)
async def test_what_is_said_to_be_likely_of_other_tokens_is_an_error(wrong):
    server = a_server(verdict={**RIGHT, **TOLD, **wrong})
    with pytest.raises(BadAnswerError, match="logprobs"):
        await verified(server, logprobs=True, top_logprobs=1)


def draft(start_length, *token_ids, sequence=1, **more):
    return {
        "sequence": sequence,
        "start_length": start_length,
        "proposal": {"token_ids": token_ids, **more},
        "timing": TIMING,
    }


async def test_draft_tokens_that_follow_on_the_text_are_reported():
    server = a_server(drafts=[draft(4, 7), draft(5, 8, 9)])
    assert await drafted(server) == [7, 8, 9]
    server = a_server(drafts=[draft(4, 7, parents=[0]), draft(5, 8, parents=[1])])
    assert await drafted(server) == [7, 8], "a chain may spell out its parents"


@pytest.mark.parametrize(
    "wrong",
    [
        draft(5, 8, sequence=2),
        draft(4, 8),
        draft(6, 8),
        draft(5, SIZE),
        draft(5, 8, 2**32 - 1),
        draft(5),
        draft(5, 8, 9, 10, 11),
        draft(5, 8, parents=[0]),
        draft(5, 8, parents=[5]),
        draft(5, 8, 9, parents=[0, 0]),
        draft(5, 8, distributions=[{"token_ids": [8], "probabilities": [1.0]}]),
    ],
    ids=str,
)
async def test_draft_tokens_of_something_else_are_an_error_and_those_before_stand(wrong):
    reported = []
    with pytest.raises(BadAnswerError):
        await drafted(a_server(drafts=[draft(4, 7), wrong]), reported=reported)
    assert reported == [7]


def said(start_length, *token_ids, sequence=1, **more):
    return {
        "sequence": sequence,
        "start_length": start_length,
        "token_ids": token_ids,
        "timing": TIMING,
        **more,
    }


async def test_decoded_tokens_that_follow_on_the_text_are_reported():
    assert await decoded(a_server(decodes=[said(4, 7), said(5, 8, 9)])) == [7, 8, 9]
    server = a_server(decodes=[said(4, 7, logprobs=[-0.5])])
    assert await decoded(server, logprobs=True) == [7]


@pytest.mark.parametrize(
    "wrong",
    [
        said(5, 8, sequence=2),
        said(4, 8),
        said(6, 8),
        said(5),
        said(5, SIZE),
        said(5, 8, 9, 10, 11),
        said(5, 8, logprobs=[-0.5]),
    ],
    ids=str,
)
async def test_decoded_tokens_of_something_else_are_an_error_and_those_before_stand(wrong):
    reported = []
    with pytest.raises(BadAnswerError):
        await decoded(a_server(decodes=[said(4, 7), wrong]), reported=reported)
    assert reported == [7]


async def test_a_decode_that_ends_without_a_token_is_an_error():
    with pytest.raises(BadAnswerError):
        await decoded(a_server(decodes=[]))


async def test_decoded_tokens_without_the_log_probabilities_asked_for_are_an_error():
    with pytest.raises(BadAnswerError):
        await decoded(a_server(decodes=[said(4, 7)]), logprobs=True)


async def test_messages_that_are_to_be_apart_are_waited_for_longer():
    at_once, apart = (a_server(decodes=[said(4, 7)]) for _ in range(2))
    await decoded(at_once)
    await decoded(apart, interval_seconds=0.5)
    assert apart.silence.patience[-1] == at_once.silence.patience[-1] + 0.5


async def test_what_calls_take_is_learnt_from_both_kinds_of_answers():
    target = a_server(verdict={**RIGHT, "timing": TIMING})
    drafter = a_server(drafts=[draft(4, 7), draft(5, 8)])
    await verified(target)
    await drafted(drafter)
    for server in (target, drafter):
        assert server.latency.step_ns == 5 * MS
        assert server.latency.call_ns is not None


async def test_of_a_stream_the_first_message_alone_tells_what_a_call_takes():
    observed = []
    server = a_server(drafts=[draft(4, 7), draft(5, 8), draft(6, 9)])
    server.latency.observe = lambda _timing, *, elapsed_ns, is_first: observed.append(is_first)
    await drafted(server)
    assert observed == [True, False, False]


async def test_a_prompt_may_take_what_it_takes_and_a_server_that_says_nothing_a_while():
    unknown = a_server(verdict=RIGHT)
    await verified(unknown)
    assert unknown.silence.patience == [patience_seconds(None)]
    known = a_server(verdict=RIGHT)
    known.latency.adopt(((1, MS),), prefill_fixed_ns=0, prefill_ns_per_token=100 * MS)
    await verified(known)
    # Four tokens of the prompt and two of the block.
    assert known.silence.patience == [patience_seconds(600 * MS, is_cold=True)] == [2.4]


def drawn_from(token_ids, probabilities):
    return {"token_ids": token_ids, "probabilities": probabilities}


async def test_under_rejection_a_draft_has_what_each_token_was_drawn_from():
    server = a_server(drafts=[draft(4, 7, distributions=[drawn_from([7, 1], [0.75, 0.25])])])
    assert await drafted(server, rule=VerificationRule.REJECTION) == [7]


@pytest.mark.parametrize(
    "distributions",
    [
        [],
        [drawn_from([7], [1.0])] * 2,
        [drawn_from([], [])],
        [drawn_from([7], [])],
        [drawn_from([7, 1], [1.0])],
        [drawn_from([7, 1], [math.nan, 1.0])],
        [drawn_from([7, 1], [math.inf, 1.0])],
        [drawn_from([7, 1], [math.inf, -math.inf])],
        [drawn_from([7, 1], [1.5, -0.5])],
        [drawn_from([7, 1], [1.0, 0.0])],
        [drawn_from([7, 1], [0.5, 0.4])],
        [drawn_from([7, 7], [0.5, 0.5])],
        [drawn_from([1, 2], [0.5, 0.5])],
        [drawn_from([7, SIZE], [0.5, 0.5])],
        [drawn_from([7] * 5000, [1 / 5000] * 5000)],
        [drawn_from([7] * 100_000, [1e-5] * 100_000)],
    ],
)
async def test_under_rejection_a_draft_without_proper_distributions_is_an_error(distributions):
    server = a_server(drafts=[draft(4, 7, distributions=distributions)])
    with pytest.raises(BadAnswerError, match=r"proposal\.distributions"):
        await drafted(server, rule=VerificationRule.REJECTION)


@pytest.mark.parametrize("forced", [[0, 0], [1, 0], [2], [0, 1, 2], [2**32 - 1]])
async def test_forced_tokens_that_are_none_of_a_drafts_are_an_error(forced):
    server = a_server(drafts=[draft(4, 7, 8, forced=forced)])
    with pytest.raises(BadAnswerError, match=r"proposal\.forced"):
        await drafted(server)


async def test_a_guess_that_nobody_asked_for_is_an_error():
    guess = {"proposal": {"token_ids": [1]}}
    with pytest.raises(BadAnswerError, match="proposal"):
        await verified(a_server(verdict={**RIGHT, **guess}))


async def test_what_is_wrong_is_not_learnt_from():
    server = a_server(verdict={**RIGHT, "sequence": 7, "timing": TIMING})
    with pytest.raises(BadAnswerError, match="sequence"):
        await verified(server)
    assert not server.latency.step_ns


async def test_tokens_behind_the_end_of_a_text_are_an_error():
    with pytest.raises(BadAnswerError, match="token_ids"):
        await decoded(a_server(decodes=[said(4, 7, 8)]), end_token_ids=[7])


class Counted(list):
    """A list of which every look inside is an error."""

    def __iter__(self):
        raise AssertionError("it was looked into before it was measured")


GUESS_LISTS = ("token_ids", "parents", "distributions", "forced")


def long_list(name, *others):
    """Return lists by name, of which one is longer than any may be."""
    return {**{it: [] for it in others}, name: Counted([1] * 9)}


@pytest.mark.parametrize("name", ["token_ids", "parents", "distributions", "forced"])
async def test_a_list_of_a_draft_that_is_too_long_is_refused_unseen(name):
    parts = {"token_ids": [1], **long_list(name, "parents", "distributions")}
    message = SimpleNamespace(proposal=SimpleNamespace(**parts))

    class Stream(Messages):
        async def __aiter__(self):
            yield message

    server = a_server()
    server.drafter = SimpleNamespace(Draft=lambda *_, **__: Stream())
    with pytest.raises(BadAnswerError, match=name):
        await drafted(server)


@pytest.mark.parametrize("name", ["accepted_path", "logprobs", "top_logprobs", "parents"])
async def test_a_list_of_a_verdict_that_is_too_long_is_refused_unseen(name):
    lists = long_list(name, "accepted_path", "logprobs", "top_logprobs", "parents")
    guess = {it: lists.pop("parents") if it == "parents" else [] for it in GUESS_LISTS}
    message = SimpleNamespace(
        **{**RIGHT, **lists, "timing": CallTiming(), "proposal": SimpleNamespace(**guess)}
    )

    async def judge():
        return message

    server = a_server()
    server.target = SimpleNamespace(Verify=lambda *_, **__: judge())
    with pytest.raises(BadAnswerError, match=name):
        await verified(server)


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "top_logprobs"])
async def test_a_list_of_a_decode_that_is_too_long_is_refused_unseen(name):
    lists = long_list(name, "token_ids", "logprobs", "top_logprobs")
    message = SimpleNamespace(sequence=1, start_length=4, timing=CallTiming(), **lists)

    class Stream(Messages):
        async def __aiter__(self):
            yield message

    server = a_server()
    server.target = SimpleNamespace(Decode=lambda *_, **__: Stream())
    with pytest.raises(BadAnswerError, match=name):
        await decoded(server)
