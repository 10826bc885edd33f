"""What Verify, Decode and Draft answer, and what a session holds afterwards."""

from __future__ import annotations

import pytest

from paceline.errors import PrefixNotHeldError
from paceline.v1 import drafter_service_pb2, target_service_pb2
from support.model_contract import PROMPT, continuation


async def test_a_verdict_is_the_targets_own_continuation_whatever_was_drafted(target):
    oracle = await continuation(target, PROMPT, 6)
    session = await target.open()
    wrong = (oracle[2] + 1) % target.info.vocabulary_size
    answer = await target.verify(
        target.call(session, 1, new=PROMPT), [*oracle[:2], wrong, *oracle[3:5]]
    )
    assert (answer.sequence, answer.prefix_length) == (1, len(PROMPT))
    assert (answer.accepted_path, answer.next_token_id) == ([0, 1], oracle[2])
    assert answer.held_length == len(PROMPT) + 2
    assert answer.timing.forward_count == 1


async def test_a_whole_block_is_accepted_with_one_more_token(target):
    oracle = await continuation(target, PROMPT, 4)
    session = await target.open()
    answer = await target.verify(target.call(session, 1, new=PROMPT), oracle[:3])
    assert (answer.accepted_path, answer.next_token_id) == ([0, 1, 2], oracle[3])


async def test_each_decided_token_has_the_log_probability_that_plain_decoding_gives_it(target):
    oracle = await continuation(target, PROMPT, 4)
    session = await target.open()
    alone = []
    for count in range(4):
        call = target.call(session, count + 1, new=(*PROMPT, *oracle[:count]))
        alone += (await target.verify(call, logprobs=True)).logprobs
    assert len(alone) == 4
    assert all(logprob <= 0 for logprob in alone)
    wrong = (oracle[1] + 1) % target.info.vocabulary_size
    for sequence, block, decided in ((5, oracle[:3], 4), (6, [oracle[0], wrong], 2)):
        call = target.call(session, sequence, new=PROMPT)
        answer = await target.verify(call, block, logprobs=True)
        # As near as one forward over a block is to one for each token, in bfloat16, too.
        assert answer.logprobs == pytest.approx(alone[:decided], abs=0.05)
    answer = await target.verify(target.call(session, 7, new=PROMPT), oracle[:3])
    assert not answer.logprobs


async def test_what_is_likely_at_each_place_is_what_plain_decoding_finds_there(target):
    oracle = await continuation(target, PROMPT, 4)
    session = await target.open()
    alone = []
    for count in range(4):
        call = target.call(session, count + 1, new=(*PROMPT, *oracle[:count]))
        alone += (await target.verify(call, top_logprobs=2)).top_logprobs
    assert [each.token_ids[0] for each in alone] == oracle
    answer = await target.verify(target.call(session, 5, new=PROMPT), oracle[:3], top_logprobs=2)
    messages = await target.decode(target.call(session, 6, new=PROMPT), 4, top_logprobs=2)
    streamed = [each for message in messages for each in message.top_logprobs]
    for found in (answer.top_logprobs, streamed):
        for each, expected in zip(found, alone, strict=True):
            assert each.token_ids[0] == expected.token_ids[0]
            assert 1 <= len(each.token_ids) == len(each.logprobs) <= 2
            assert each.logprobs == pytest.approx(expected.logprobs, abs=0.05)
            assert list(each.logprobs) == sorted(each.logprobs, reverse=True)
    without = await target.verify(target.call(session, 7, new=PROMPT), oracle[:3])
    assert not without.top_logprobs


async def test_more_of_the_likeliest_tokens_than_there_may_be_are_refused_by_name(target):
    session = await target.open()
    asked = target.verify(target.call(session, 1, new=PROMPT), top_logprobs=21)
    error = await target.error_of(asked)
    assert [it.field for it in error.violations] == ["top_logprobs"]
    asked = target.decode(target.call(session, 2, new=PROMPT), 1, top_logprobs=21)
    error = await target.error_of(asked)
    assert [it.field for it in error.violations] == ["top_logprobs"]


async def test_keep_and_append_is_rollback_catching_up_and_repetition(target):
    oracle = await continuation(target, PROMPT, 5)
    session = await target.open()
    wrong = [(token + 1) % target.info.vocabulary_size for token in oracle[:3]]
    await target.verify(target.call(session, 1, new=PROMPT), wrong)
    rollback = await target.verify(target.call(session, 2, held=PROMPT, new=oracle[:2]))
    assert rollback.next_token_id == oracle[2]
    held = (*PROMPT, *oracle[:2])
    repeated = await target.verify(target.call(session, 3, held=held))
    assert repeated.next_token_id == oracle[2]
    restart = await target.verify(target.call(session, 4, new=(*held, *oracle[2:4])))
    assert restart.next_token_id == oracle[4]


async def test_a_session_holds_the_accepted_tokens_and_no_rejected_or_next_one(target):
    oracle = await continuation(target, PROMPT, 3)
    session = await target.open()
    wrong = (oracle[1] + 1) % target.info.vocabulary_size
    answer = await target.verify(target.call(session, 1, new=PROMPT), [oracle[0], wrong])
    assert answer.held_length == len(PROMPT) + 1
    held = (*PROMPT, oracle[0])
    for sequence, beyond in ((2, wrong), (3, oracle[1])):
        call = target.call(session, sequence, held=(*held, beyond))
        error = await target.error_of(target.verify(call))
        assert isinstance(error, PrefixNotHeldError)
        assert error.metadata["held_length"] == str(len(held))
    again = await target.verify(target.call(session, 4, held=held, new=oracle[1:2]))
    assert (again.prefix_length, again.next_token_id) == (len(held) + 1, oracle[2])


def tokens(answers):
    return [token for answer in answers for token in answer.token_ids]


async def test_a_target_decodes_what_single_verdicts_say_and_holds_it(target):
    oracle = await continuation(target, PROMPT, 9)
    session = await target.open()
    answers = await target.decode(target.call(session, 1, new=PROMPT), 7)
    assert tokens(answers) == oracle[:7]
    assert all(answer.sequence == 1 for answer in answers)
    assert sum(answer.timing.forward_count for answer in answers) == 7
    length = len(PROMPT)
    for answer in answers:
        assert answer.start_length == length
        length += len(answer.token_ids)
    held = (*PROMPT, *oracle[:7])
    more = await target.decode(target.call(session, 2, held=held), 1)
    assert (more[0].start_length, tokens(more)) == (len(held), oracle[7:8])
    verdict = await target.verify(target.call(session, 3, held=(*held, oracle[7])))
    assert verdict.next_token_id == oracle[8]


async def test_decoding_ends_after_an_end_token(target):
    oracle = await continuation(target, PROMPT, 6)
    session = await target.open()
    ends = [oracle[3], (oracle[3] + 1) % target.info.vocabulary_size]
    answers = await target.decode(target.call(session, 1, new=PROMPT), 6, end_token_ids=ends)
    first = next(place for place, token in enumerate(oracle) if token in ends)
    assert tokens(answers) == oracle[: first + 1]


async def test_decoded_tokens_have_the_log_probabilities_of_single_verdicts(target):
    session = await target.open()
    alone, text = [], list(PROMPT)
    for sequence in range(1, 5):
        verdict = await target.verify(target.call(session, sequence, new=text), logprobs=True)
        alone += verdict.logprobs
        text.append(verdict.next_token_id)
    answers = await target.decode(target.call(session, 5, new=PROMPT), 4, logprobs=True)
    said = [logprob for answer in answers for logprob in answer.logprobs]
    assert said == pytest.approx(alone, abs=0.05)
    assert not any(
        answer.logprobs for answer in await target.decode(target.call(session, 6, new=PROMPT), 2)
    )


async def test_messages_that_shall_be_apart_carry_all_that_was_found_between_them(target):
    session = await target.open()
    request = target_service_pb2.DecodeRequest(
        call=target.call(session, 1, new=PROMPT), max_tokens=9
    )
    request.message_interval.FromMilliseconds(400)
    answers = await target.decode_with(request)
    assert tokens(answers) == await continuation(target, PROMPT, 9)
    # Where forwards take no time the first travels at once, and the rest together.
    assert len(answers) <= 9


async def test_a_cancelled_decode_holds_what_it_streamed(stalling_target):
    target = stalling_target
    session = await target.open()
    request = target_service_pb2.DecodeRequest(
        call=target.call(session, 1, new=PROMPT), max_tokens=9
    )
    stream = target.stub.Decode(request, timeout=20)
    first = await anext(aiter(stream))
    stream.cancel()
    held = (*PROMPT, *first.token_ids)
    again = target.stub.Decode(
        target_service_pb2.DecodeRequest(call=target.call(session, 2, held=held), max_tokens=1),
        timeout=20,
    )
    error = await target.error_of(target.decode(target.call(session, 3, held=(*held, 1)), 1))
    assert isinstance(error, PrefixNotHeldError)
    assert error.metadata["held_length"] == str(len(held))
    again.cancel()


@pytest.mark.parametrize(("chunk_tokens", "sizes"), [(0, [1] * 7), (1, [1] * 7), (3, [3, 3, 1])])
async def test_a_window_is_streamed_in_chunks_and_held(drafter, chunk_tokens, sizes):
    session = await drafter.open()
    call = drafter.call(session, 1, new=PROMPT)
    chunks = await drafter.draft(call, 7, chunk_tokens=chunk_tokens)
    assert [len(chunk.proposal.token_ids) for chunk in chunks] == sizes
    assert all(chunk.sequence == 1 for chunk in chunks)
    starts = [len(PROMPT) + sum(sizes[:index]) for index in range(len(sizes))]
    assert [chunk.start_length for chunk in chunks] == starts
    drafted = tuple(token for chunk in chunks for token in chunk.proposal.token_ids)
    more = await drafter.draft(drafter.call(session, 2, held=(*PROMPT, *drafted)), 1)
    assert more[0].start_length == len(PROMPT) + 7


async def test_a_cancelled_draft_holds_what_it_streamed(stalling_drafter):
    drafter = stalling_drafter
    session = await drafter.open()
    request = drafter_service_pb2.DraftRequest(
        call=drafter.call(session, 1, new=PROMPT), max_tokens=9
    )
    stream = drafter.stub.Draft(request, timeout=20)
    first = await anext(aiter(stream))
    stream.cancel()
    held = (*PROMPT, *first.proposal.token_ids)
    call = drafter.call(session, 2, held=held)
    # It stalls, so it passed the fence: a prefix that is not held is refused at once.
    again = drafter.stub.Draft(
        drafter_service_pb2.DraftRequest(call=call, max_tokens=1), timeout=20
    )
    error = await drafter.error_of(drafter.draft(drafter.call(session, 3, held=(*held, 1)), 1))
    assert isinstance(error, PrefixNotHeldError)
    assert error.metadata["held_length"] == str(len(held))
    again.cancel()
