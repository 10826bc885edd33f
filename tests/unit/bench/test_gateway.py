"""`paceline bench gateway` sums up turns: medians, ratios within a pair, texts, CPU of HTTP's."""

from __future__ import annotations

import pytest

from paceline_bench.gateway.doors import Heard, Turn, doors_table, row


def turn(*seconds, text="t", gateway=0.0):
    heard = tuple(Heard(text, each, each / 10) for each in seconds)
    return Turn(heard=heard, gateway_seconds=gateway, orchestrator_seconds=0.5)


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
    assert "| 3 | 3000.0 / 3500.0 | 1.25x (1.00 to 1.50) |" in doors_table([found])


def test_a_text_that_differs_is_told():
    found = row(1, [(turn(1.0), turn(1.0, text="other"))], max_tokens=2)
    assert not found["identical"]
    assert "DIFFERENT" in doors_table([found])
