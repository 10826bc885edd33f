"""What a generation does alike in both clients, whose reading and waiting are written twice."""

import pytest

from paceline import errors
from support.fake_orchestrator import BareCancelError, Leg

WHOLE_TEXT = "3 4 5 6 7 "
AGAIN = errors.DrainingError("draining", retry_after_seconds=0.01)


def text(**options):
    return lambda client: client.generate("x", **options).text()


async def test_a_broken_stream_is_resumed_by_itself(use, fake):
    lost = errors.ConnectionLostError("gone")
    fake.script = [Leg(chunks=2, error=lost), Leg(error=AGAIN), Leg(chunks=1, error=AGAIN)]
    assert await use(fake.address, text(resume_attempts=3)) == WHOLE_TEXT
    assert [len(request.resume_token_ids) for request in fake.requests] == [0, 2, 2, 3]


async def test_a_resumption_has_the_time_that_is_left(use, fake):
    fake.script = [Leg(chunks=2, error=errors.DrainingError("away", retry_after_seconds=0.3))]
    assert await use(fake.address, text(resume_attempts=1)) == WHOLE_TEXT
    first, second = fake.seconds
    assert second < first - 0.25


async def test_the_error_is_raised_when_the_attempts_are_used_up(use, fake):
    fake.script = [Leg(chunks=1, error=AGAIN), Leg(chunks=1, error=AGAIN)]
    streams = []

    def generate(client):
        streams.append(client.generate("x", resume_attempts=1))
        return streams[0].text()

    with pytest.raises(errors.DrainingError):
        await use(fake.address, generate)
    assert len(fake.requests) == 2
    rest = await use(fake.address, lambda client: client.resume(streams[0]).text())
    assert rest == WHOLE_TEXT


@pytest.mark.parametrize(
    ("leg", "error", "match"),
    [
        (
            Leg(error=errors.InvalidFieldError.of("top_p", "must be in (0, 1]")),
            errors.InvalidFieldError,
            "top_p",
        ),
        (Leg(shift=-1), errors.InvariantViolatedError, "where 3 was due"),
        (Leg(shift=1), errors.InvariantViolatedError, "where 3 was due"),
        (Leg(omits_finish=True), errors.InvariantViolatedError, "last message"),
    ],
    ids=["a wrong request", "a duplicate", "a gap", "no end"],
)
async def test_what_another_attempt_cannot_mend_is_not_tried_again(use, fake, leg, error, match):
    fake.script = [leg]
    with pytest.raises(error, match=match):
        await use(fake.address, text(resume_attempts=5))
    assert len(fake.requests) == 1


async def test_another_model_does_not_go_on_with_the_text(use, fake):
    fake.script = [Leg(chunks=2, error=AGAIN), Leg(fingerprint="model-b")]
    with pytest.raises(errors.ModelMismatchError, match="model-b"):
        await use(fake.address, text(resume_attempts=1))


async def test_the_deadline_ends_a_hanging_stream(use, fake):
    fake.script = [Leg(chunks=1, hangs=True)]
    with pytest.raises(errors.DeadlineError):
        await use(fake.address, text(timeout=0.3))


async def test_a_request_that_a_stopping_server_cancels_goes_to_the_next_one(use, fake):
    fake.script = [Leg(error=BareCancelError("CANCELLED"), refuses=True)]
    assert await use(fake.address, text()) == WHOLE_TEXT
    cancelled, other = fake.peers
    assert cancelled != other


async def test_an_error_has_the_time_after_which_to_retry(use, fake):
    fake.script = [Leg(error=errors.OverloadedError("full", retry_after_seconds=3))]
    with pytest.raises(errors.OverloadedError) as caught:
        await use(fake.address, text())
    assert caught.value.retry_after_seconds == 3
