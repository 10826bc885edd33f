"""What Verify and Draft answer, and what a session holds afterwards."""

from __future__ import annotations

import pytest

from paceline.errors import PrefixNotHeldError
from paceline.v1 import drafter_service_pb2
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
