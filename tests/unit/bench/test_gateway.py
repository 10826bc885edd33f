"""`paceline bench gateway` sums up turns: medians, ratios within a pair, texts, CPU of HTTP's."""

from __future__ import annotations

import pytest

from paceline_bench.gateway.transports import Heard, Turn, listen, row


def turn(*seconds, text="t", gateway=0.0):
    heard = tuple(Heard(text, each, each / 10) for each in seconds)
    return Turn(heard=heard, gateway_seconds=gateway, orchestrator_seconds=0.5)


@pytest.mark.parametrize(
    ("times", "token_count", "heard"),
    [
        ([10.0, 13.0, 19.0], 5, Heard("abc", 3.0, 6 / 4)),  # the first token's time is its own
        ([10.0, 13.0, 13.5], 1, Heard("abc", 3.0, 0.5)),
    ],
)
async def test_a_stream_is_timed_to_its_first_token_and_for_each_that_follows(
    times, token_count, heard
):
    async def pieces():
        for letter in "abc":
            yield letter

    assert await listen(pieces(), token_count, clock=iter(times).__next__) == heard


def test_each_number_of_a_row_is_made_of_its_own_times():
    slow, fast = (
        Turn(heard=(Heard("t", first, token),), gateway_seconds=gateway, orchestrator_seconds=own)
        for first, token, gateway, own in ((4.0, 0.3, 0.7, 0.11), (2.0, 0.1, 0.9, 0.13))
    )
    found = row(1, [(fast, slow)], max_tokens=10)
    assert (found["first"]["gRPC_ms"], found["first"]["HTTP_ms"]) == (2000, 4000)
    assert (found["token"]["gRPC_ms"], found["token"]["HTTP_ms"]) == (100, 300)
    assert (found["first"]["ratios"], found["token"]["ratios"]) == ([2], [pytest.approx(3)])
    assert found["gateway_ms_per_token"] == pytest.approx(70)
    assert found["orchestrator_ms_per_token"] == pytest.approx(11)


def test_ratios_are_of_the_medians_of_one_pair_of_turns():
    turns = [
        (turn(1.0, 2.0, 9.0), turn(3.0, 3.0, 3.0, gateway=0.6)),
        (turn(4.0, 4.0, 4.0, gateway=9.0), turn(4.0, 4.0, 8.0, gateway=0.6)),
    ]
    found = row(3, turns, max_tokens=10)
    assert found["first"]["gRPC_ms"] == pytest.approx(3000)  # between 2 s and 4 s
    assert found["first"]["HTTP_ms"] == pytest.approx(3500)
    assert found["first"]["ratios"] == pytest.approx([1.0, 1.5])
    assert found["token"]["ratios"] == pytest.approx([1.0, 1.5])
    # 1.2 s for 60 tokens; what the gateway did in gRPC's turns is none of them.
    assert found["gateway_ms_per_token"] == pytest.approx(20)
    assert found["identical"]


def test_a_text_that_differs_is_noted():
    found = row(1, [(turn(1.0), turn(1.0, text="other"))], max_tokens=2)
    assert not found["identical"]
