"""Exact times of SI and DSI without running the protocol for every draw.

What they rest on: a correction is a fresh start. With one drafter that is no slower than the
target, and with targets of equal, steady latency, verdicts come in the order of their positions.
So when a draft token is rejected, all that is in flight descends from it and is withdrawn, and
what follows depends on the number of tokens that remain, and on nothing else. A generation is a
chain of *stretches*, each from a sync point to the next:

    sync point ── a ── a ── ... ── a ── r      a: accepted draft token, r: correction, or the end
                  └── run length ──┘

Until its rejection is known, a stretch is what it would be without it. So one run of the protocol
in which every draft token is right tells when the token after *any* run length is final: the
stretches come from the very objects that serve users, and a generation is a sum of them. SI needs
no protocol: its rounds are independent, and each costs the same; of one that began ahead, while the
block before it was verified, the drafting costs what is left then.

`scheduled_stretches` has the same times from the dispatch rules alone, a hundred times as fast, to
choose among all lookaheads.

tests/unit/bench/test_recurrences.py holds both against the protocol, to the last digit.
"""

from __future__ import annotations

from heapq import heapreplace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline_bench.protocol_runs import run_protocol
from paceline_protocol.task import DispatchPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_bench.protocol_runs import Setup

Floats: TypeAlias = NDArray[np.float64]
# stretches[remaining][run length]: from the sync point until the token after the run is final.
Stretches: TypeAlias = list[list[int]]


def run_lengths(agreements: Sequence[bool]) -> list[int]:
    """Return how many positions agree in a row from each position on."""
    lengths = [0] * (len(agreements) + 1)
    for position in range(len(agreements) - 1, -1, -1):
        lengths[position] = lengths[position + 1] + 1 if agreements[position] else 0
    return lengths[:-1]


def stretches(setup: Setup, *, max_tokens: int) -> Stretches:
    """Run the protocol without a rejection for 1, 2, ... max_tokens remaining tokens.

    Args:
        setup: DSI with steady integer latencies, the drafter's at most the target's.
        max_tokens: The most tokens that remain at a sync point.
    """
    _check_steady(setup)
    return [
        [
            int(time)
            for time in run_protocol(setup, acceptance_rate=1, max_tokens=remaining).token_times
        ]
        for remaining in range(max_tokens + 1)
    ]


def scheduled_stretches(setup: Setup, *, max_tokens: int) -> Stretches:
    """Return what `stretches` does, for calls that take no time besides their forwards."""
    _check_steady(setup)
    assert setup.target.call == setup.drafter.call == 0
    return [_schedule(setup, remaining) for remaining in range(max_tokens + 1)]


def _schedule(setup: Setup, remaining: int) -> list[int]:
    """Tell when each token is final if every draft token is right: token by token, in order.

    Draft token n is there at n drafter steps, and the last token needs none. A verification is sent
    when enough draft tokens wait and a target is free, or when all others are back: then the first
    open position needs it. In blocks that one takes a whole block or no draft token at all.
    """
    if not remaining:
        return []
    target, drafter, last = int(setup.target.step), int(setup.drafter.step), remaining - 1
    free = [0] * (setup.target_count - 1) + [target]  # when each target is, as a heap
    times = [target]  # the first verification has no draft
    sent = 0  # draft tokens, counted with those that a verification without draft has made final
    while sent < last:
        end = min(sent + setup.lookahead, last)
        start = max(end * drafter, free[0])
        if setup.dispatch is DispatchPolicy.WORK_CONSERVING:
            start = min(start, times[-1])
            end = min(start // drafter, last)
        elif times[-1] < start or times[-1] == start == free[0]:
            start, end = times[-1], min(sent + 1 + setup.lookahead, last)
            end = end if end * drafter <= start else sent + 1
        heapreplace(free, start + target)
        times += [start + target] * (end - sent)
        sent = end
    return times


def _check_steady(setup: Setup) -> None:
    assert setup.target.first == setup.target.step >= setup.drafter.step == setup.drafter.first


def distributed_time(runs: Sequence[int], stretches: Stretches) -> int:
    """Return how long DSI takes for as many tokens as there are run lengths."""
    time, position, end = 0, 0, len(runs)
    while position < end:
        remaining = end - position
        run = min(runs[position], remaining - 1)  # the last token needs no draft
        time += stretches[remaining][run]
        position += run + 1
    return time


def speculative_time(
    runs: Sequence[int], *, lookahead: int, target_step: int, drafter_step: int
) -> int:
    """Return how long SI takes: `drafted * drafter_step + target_step` for each round.

    A round drafts min(lookahead, remaining - 1) tokens and yields one more than it accepts.
    """
    time, position, end = 0, 0, len(runs)
    while position < end:
        drafted = min(lookahead, end - position - 1)
        time += drafted * drafter_step + target_step
        position += min(runs[position], drafted) + 1
    return time


def ahead_time(
    runs: Sequence[int], *, lookahead: int, target_step: int, drafter_step: int
) -> float:
    """Return how long SI takes that drafts ahead, with a drafter that is no slower than the target.

    After a block that was accepted whole, with a next token that the drafter had right, too, the
    next block has been drafted since the verification before began: this token, then its own.
    """
    time, position, end, is_ahead = 0.0, 0, len(runs), False
    while position < end:
        drafted = min(lookahead, end - position - 1)
        time += _round_time(drafted, target_step, drafter_step, is_ahead=is_ahead)
        is_ahead = runs[position] > drafted
        position += min(runs[position], drafted) + 1
    return time


def expected_ahead_time(
    acceptance_rate: float,
    *,
    lookahead: int,
    max_tokens: int,
    target_step: float,
    drafter_step: float,
) -> float:
    """Return the exact expectation of `ahead_time` over all draws."""
    rate = acceptance_rate
    anew, ahead = [0.0], [0.0]  # by remaining tokens: how the round begins
    for remaining in range(1, max_tokens + 1):
        drafted = min(lookahead, remaining - 1)
        after = sum(
            rate**accepted * (1 - rate) * anew[remaining - 1 - accepted]
            for accepted in range(drafted + 1)
        )
        after += rate ** (drafted + 1) * ahead[remaining - 1 - drafted]
        anew.append(_round_time(drafted, target_step, drafter_step, is_ahead=False) + after)
        ahead.append(_round_time(drafted, target_step, drafter_step, is_ahead=True) + after)
    return anew[-1]


def _round_time(drafted: int, target_step: float, drafter_step: float, *, is_ahead: bool) -> float:
    if is_ahead:
        return max(target_step, (drafted + 1) * drafter_step)
    return target_step + drafted * drafter_step


def expected_distributed_times(acceptance_rates: Floats, stretches: Stretches) -> Floats:
    """Return DSI's exact expectation over all draws, for each acceptance rate."""
    rates = acceptance_rates[:, np.newaxis]
    expected = np.zeros((len(acceptance_rates), len(stretches)))  # by remaining tokens
    for remaining in range(1, len(stretches)):
        run = np.arange(remaining)
        probability = _run_probability(rates, run)
        after = expected[:, remaining - 1 - run]
        expected[:, remaining] = (probability * (np.array(stretches[remaining]) + after)).sum(1)
    return expected[:, -1]


def expected_speculative_forwards(
    acceptance_rates: Floats, *, lookahead: int, max_tokens: int
) -> tuple[Floats, Floats]:
    """Return how many forwards SI's drafter and target do in expectation, for each rate.

    SI's time is the sum of its forwards, so this is its exact expectation for any latencies.
    """
    rates = acceptance_rates[:, np.newaxis]
    drafter = np.zeros((len(acceptance_rates), max_tokens + 1))  # by remaining tokens
    target = np.zeros_like(drafter)
    for remaining in range(1, max_tokens + 1):
        drafted = min(lookahead, remaining - 1)
        accepted = np.arange(drafted + 1)
        probability = _run_probability(rates, accepted)
        after = remaining - 1 - accepted
        drafter[:, remaining] = drafted + (probability * drafter[:, after]).sum(1)
        target[:, remaining] = 1 + (probability * target[:, after]).sum(1)
    return drafter[:, -1], target[:, -1]


def _run_probability(rates: Floats, run: NDArray[np.int_]) -> Floats:
    """Return the probability of each run length 0, 1, ...; the last one means "or more"."""
    probability: Floats = rates**run * (1 - rates)
    probability[:, -1] = (rates ** run[-1])[:, 0]
    return probability
