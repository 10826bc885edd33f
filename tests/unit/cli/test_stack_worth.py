"""What `paceline check-pair` says of a drafter that is a stack."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from paceline.v1.model_service_pb2 import Stage
from paceline_cli.stack_worth import ToldStack, stack_table


def stage(name, *verdicts, ms=None):
    return Stage(
        model_name=name,
        forward_latencies=[] if ms is None else [{"rows": 1, "median_ns": round(ms * 1e6)}],
        verdicts=[{"judged_count": judged, "accepted_count": right} for judged, right in verdicts],
    )


BASE = stage("base", (100, 50), ms=10)
TEXT = stage("max-gram")


def told(*stages):
    console = Console(file=io.StringIO(), width=120)
    console.print(stack_table(stages))
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_a_stage_that_costs_nothing_is_worth_the_tokens_that_are_accepted():
    # Right half of the time: 1 + 1/2 + 1/4 + ... tokens a forward.
    assert ToldStack([BASE, TEXT]).worth(1) == pytest.approx(2, abs=1e-3)
    assert told(BASE, TEXT)[1:] == [
        ["base", "10.00", "-", "-"],
        ["max-gram", "-", "base", "50%", "2.00x"],
    ]


def test_of_three_stages_each_is_compared_with_the_stack_without_it():
    small = stage("small", (100, 20), ms=1)
    base = stage("base", (100, 80), (100, 50), ms=10)
    stack = ToldStack([base, small, TEXT])
    without_text = ToldStack([base, small, TEXT], places=[0, 1])
    assert (stack.model_count, stack.stage_count) == (2, 3)
    assert (without_text.model_count, without_text.stage_count) == (2, 2)
    assert ToldStack([base, small, TEXT], places=[0, 2]).acceptance(0, 1) == 0.5
    # With the text below it the small model brings less, and the other way round.
    assert 1 < stack.worth(1) < without_text.worth(1)
    assert 1 < stack.worth(2) < 2
    assert told(base, small, TEXT)[3][:6] == ["max-gram", "-", "base", "50%,", "small", "20%"]


def test_what_was_never_judged_or_never_ran_is_said_to_be_so():
    base, idle = stage("base", (0, 0), (0, 0), ms=10), stage("idle", (0, 0))
    assert told(base, idle, TEXT)[2] == ["idle", "-", "base", "never", "judged", "-"]
    assert ToldStack([base, TEXT]).worth(1) == 1


def test_every_pair_of_four_stages_is_told_by_its_own_verdicts():
    base = stage("base", (100, 90), (100, 80), (100, 70), ms=10)
    middle = stage("middle", (100, 60), (100, 50), ms=3)
    small = stage("small", (100, 40), ms=1)
    stack = ToldStack([base, middle, small, TEXT])
    told_rates = [stack.judged(one, two) for one in range(3) for two in range(one + 1, 4)]
    assert told_rates == [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
