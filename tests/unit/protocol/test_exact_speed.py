"""What speed costs and brings, to the unit of time: where a server idles, these numbers grow."""

from __future__ import annotations

import pytest

from paceline_protocol.laboratory.oracles import AgreementOracle
from paceline_protocol.laboratory.simulation import ServerLatency, simulate
from paceline_protocol.laboratory.spans import SpanKind
from paceline_protocol.messages import CapacityChanged
from paceline_protocol.methods import Strategy, create_method
from paceline_protocol.task import DecodingTask

DSI, SI = Strategy.DISTRIBUTED, Strategy.SPECULATIVE


class Scripted(AgreementOracle):
    """A drafter that is wrong at these positions alone, on a right text."""

    def __init__(self, *, wrong, length):
        super().__init__(1.0, seed=0, length=length)
        self._wrong = wrong

    def agrees(self, drafter, position):
        return position not in self._wrong


def run(strategy, *, wrong, count, target, drafter, target_count=1, **options):
    """Continue a prompt of one token by so many; the prompt's forwards take the first times."""
    oracle = Scripted(wrong=wrong, length=count + 1)
    task = DecodingTask(oracle.prompt(1), count, **options)
    capacity = CapacityChanged(targets=tuple(range(target_count)), drafters=(0,))
    return simulate(
        create_method(strategy, task, capacity=capacity),
        oracle,
        targets=[ServerLatency(*target)] * target_count,
        drafters=[ServerLatency(*drafter)],
    )


def verified(result, target):
    """What a target did: from when to when, and whether it was given up."""
    return [
        (span.start, span.end, span.withdrawn)
        for span in result.spans
        if span.kind is SpanKind.VERIFY and span.server == target
    ]


@pytest.mark.parametrize(
    ("kept", "times", "second"),
    [
        # Given up at the correction, the second target begins the prompt again, and never ends it.
        (False, [100, 110, 120, 120, 130, 130], [(5, 100, True), (105, 120, True)]),
        # Finished 5 later, it verifies every other token from then on.
        (
            True,
            [100, 110, 115, 120, 125, 130],
            [(5, 105, False), (105, 115, False), (115, 125, False)],
        ),
    ],
)
def test_a_prompt_that_is_kept_pays_for_itself_with_the_next_tokens(kept, times, second):
    """A prompt takes 100, a forward 10, a draft token 5; the first draft token is wrong."""
    result = run(
        DSI,
        wrong={1},
        count=6,
        target=(100, 10),
        drafter=(5, 5),
        target_count=2,
        lookahead=1,
        keep_prefill=kept,
    )
    assert result.token_times == times
    assert verified(result, 1) == second


@pytest.mark.parametrize(
    ("broadcast", "times", "forwards"),
    [(False, [100, 110, 110, 120, 130], 4), (True, [100, 110, 110, 120, 123], 5)],
)
def test_a_broadcast_prompt_gains_where_the_first_draft_token_comes_late(
    broadcast, times, forwards
):
    """The drafter needs 96 for its prompt: with the draft token the second target begins so late.

    After the correction at 110 both targets are at work only if both have the prompt by then.
    """
    result = run(
        DSI,
        wrong={3},
        count=5,
        target=(100, 10),
        drafter=(96, 3),
        target_count=2,
        lookahead=1,
        broadcast_prefill=broadcast,
        keep_prefill=True,
    )
    assert result.token_times == times
    assert result.target_forwards == forwards
    assert verified(result, 1)[0][0] == (0 if broadcast else 96)


@pytest.mark.parametrize(
    ("ahead", "times", "drafted"),
    [
        # Four rounds of two draft tokens and a verification, one of which brings a single token.
        (False, [48] * 3 + [96] + [144] * 3 + [192] * 3, 8),
        # Of these rounds those after a block that was right as a whole need no drafting: 8 less
        # each. Nine tokens are drafted until the correction, and five of the text after it.
        (True, [48] * 3 + [88] + [136] * 3 + [176] * 3, 14),
    ],
)
def test_drafting_ahead_saves_the_drafting_after_each_right_block_and_no_other(
    ahead, times, drafted
):
    """A forward takes 40, a draft token 4; of ten tokens the fourth is drafted wrong."""
    result = run(
        SI,
        wrong={4},
        count=10,
        target=(40, 40),
        drafter=(4, 4),
        lookahead=2,
        drafts_ahead=ahead,
    )
    assert result.token_times == times
    assert (result.target_forwards, result.drafter_forwards) == (4, drafted)
