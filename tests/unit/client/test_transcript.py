import pytest

from paceline.errors import InvariantViolatedError
from paceline.transcript import Transcript
from paceline.v1 import orchestrator_service_pb2 as pb

STARTED = pb.GenerateResponse(started=pb.GenerationStarted(seed=7, prompt_token_count=3))


def chunk(position, *token_ids):
    return pb.GenerateResponse(chunk=pb.GenerationChunk(position=position, token_ids=token_ids))


def finished(count):
    return pb.GenerateResponse(
        finished=pb.GenerationFinished(prompt_token_count=3, completion_token_count=count)
    )


def transcript(*responses, **request):
    received = Transcript(pb.GenerateRequest(text="x", **request))
    for response in responses:
        received.add(response)
    return received


def test_each_stream_asks_for_what_the_ones_before_did_not_bring():
    broken = transcript(STARTED, chunk(5, 11, 12), resume_token_ids=[8, 9])
    request = broken.next_request()
    assert list(request.resume_token_ids) == [8, 9, 11, 12]
    assert request.seed == 7
    assert list(transcript().next_request().resume_token_ids) == []


def test_a_branch_goes_on_and_leaves_the_original_as_it_was():
    broken = transcript(STARTED, chunk(3, 11), chunk(4, 12, 13))
    twin = broken.branch()
    for response in (STARTED, chunk(6, 14), finished(4)):
        twin.add(response)
    assert twin.completion().token_ids == (11, 12, 13, 14)
    assert twin.completion().resumed_token_count == 3
    assert [each.token_ids for each in broken.chunks] == [(11,), (12, 13)]
    broken.add(chunk(6, 15))


@pytest.mark.parametrize("count", [0, 2])
def test_an_end_elsewhere_than_after_the_last_token_is_an_error(count):
    with pytest.raises(InvariantViolatedError, match=f"position 4 instead of {3 + count}"):
        transcript(STARTED, chunk(3, 11), finished(count))


def test_tokens_before_the_first_message_are_an_error():
    with pytest.raises(InvariantViolatedError, match="before the first message"):
        transcript(chunk(0, 11))


def a_prompt_chunk(position, *token_ids):
    return pb.GenerateResponse(
        prompt_chunk=pb.PromptChunk(
            position=position, token_ids=token_ids, logprobs=[-1.0] * len(token_ids)
        )
    )


def test_the_prompt_is_told_anew_where_a_stream_broke_before_the_answer_and_else_not_asked_again():
    received = Transcript(pb.GenerateRequest(text="x", prompt_logprobs=0))
    started = pb.GenerationStarted(seed=7, model_fingerprint="m", prompt_token_count=3)
    received.add(pb.GenerateResponse(started=started))
    received.add(a_prompt_chunk(0, 5))
    received.add(a_prompt_chunk(1, 6))
    assert received.next_request().HasField("prompt_logprobs")
    received.add(pb.GenerateResponse(started=started))
    received.add(a_prompt_chunk(0, 5))
    received.add(a_prompt_chunk(1, 6, 7))
    received.add(pb.GenerateResponse(chunk=pb.GenerationChunk(position=3, token_ids=[8])))
    assert not received.next_request().HasField("prompt_logprobs")
    assert [it.token_ids for it in received.prompt_chunks] == [(5,), (6, 7)]
    with pytest.raises(InvariantViolatedError, match="position 4 came where 3"):
        received.add(a_prompt_chunk(4, 9))
