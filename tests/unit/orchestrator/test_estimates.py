"""What each way to decode is expected to take: examples in which every term decides.

A target's forward of n rows takes 900 + 100 n, a drafter's step 70, a call 30; half of all draft
tokens are accepted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline_orchestrator.fleet.row_prices import RowPrices
from paceline_orchestrator.planning.estimates import (
    Option,
    affordable_lookahead,
    affordable_targets,
    distributed_token_ns,
    on_its_part,
    own_guesses_are_free,
    plain,
    self_speculative,
    speculative,
    stretch,
)
from paceline_orchestrator.planning.measurements import Measurements
from paceline_protocol.methods import Strategy

TARGET = RowPrices(((1, 1.0), (11, 2.0)))
SHARED_TARGET = replace(TARGET, shares_forwards=True)
SHARED_DRAFTER = RowPrices(((1, 1.0), (11, 3.0)), shares_forwards=True)
ALONE = Measurements(
    target_step_ns=1000,
    target_first_ns=5000,
    drafter_step_ns=70,
    acceptance_rate=0.5,
    target_count=2,
    drafter_count=2,
    call_ns=30,
    dispatch_ns=50,
    target_prices=TARGET,
    guess_count=3,
    guesses_accepted=1.5,
)
SHARED = replace(ALONE, target_prices=SHARED_TARGET)


@pytest.mark.parametrize(
    ("node", "requests", "token_ns"),
    [
        (ALONE, 1, 1000),
        (ALONE, 5, 2.5 * 1000),  # a forward for each call
        (SHARED, 5, 900 + 2.5 * 100),  # one for all calls
        (SHARED, 1, 1000),
    ],
)
def test_plain_decoding_takes_a_forward_or_a_turn(node, requests, token_ns):
    assert plain(replace(node, request_count=requests)).token_ns == token_ns


@pytest.mark.parametrize(
    ("node", "requests", "round_ns"),
    [
        (ALONE, 1, 30 + 1300),  # what came before, and three guesses: four rows
        (ALONE, 6, 3 * 1300),
        (SHARED, 6, 2 * (900 + 1.5 * 400)),  # two groups take turns
        (replace(SHARED, call_ns=2000), 6, 2000 + 1.5 * (900 + 1.5 * 400)),
    ],
)
def test_self_speculation_takes_a_round_over_what_it_accepts_and_one(node, requests, round_ns):
    option = self_speculative(replace(node, request_count=requests))
    assert option.token_ns == round(round_ns / 2.5)


@pytest.mark.parametrize(
    ("change", "round_ns", "keeps_up"),
    [
        # Two calls, three steps, four rows.
        ({}, 2 * 30 + 3 * 70 + 1300, True),
        ({"drafting_count": 7}, 2 * 30 + 3 * 70 + 1300, True),
        ({"drafting_count": 9}, 9 * 3 * 70, False),
        ({"request_count": 5}, 2.5 * 1300, True),
        ({"request_count": 5, "drafting_count": 16}, 16 * 3 * 70, False),
        # Others in a drafter's forwards: their rows beside, and a half of one to wait for.
        (
            {"drafter_prices": SHARED_DRAFTER, "target_count": 3, "request_count": 3},
            2 * 30 + 3.5 * 70 * 1.2 + 1300,
            True,
        ),
        (
            {"drafter_prices": SHARED_DRAFTER, "drafting_count": 6},
            2 * 30 + 3.5 * 70 * 2.0 + 1300,
            True,
        ),
        ({"drafter_prices": SHARED_DRAFTER}, 2 * 30 + 3 * 70 + 1300, True),
        # Others in a target's forwards: half of one to wait for, and half of them beside.
        ({"target_prices": SHARED_TARGET, "request_count": 3}, 2 * 1300, True),
        (
            {"target_prices": SHARED_TARGET, "request_count": 6, "call_ns": 500},
            2 * 500 + 3 * 70 + 1.5 * (900 + 1.5 * 400),
            True,
        ),
    ],
)
def test_si_takes_a_round_over_its_expected_tokens(change, round_ns, keeps_up):
    option = speculative(replace(ALONE, **change), 3)
    assert option.token_ns == round(round_ns / (1 + 1 / 2 + 1 / 4 + 1 / 8))
    assert (option.keeps_up, option.drafts_ahead) == (keeps_up, False)


@pytest.mark.parametrize("step_ns", [783, 784])
def test_a_drafter_keeps_up_that_is_ready_just_in_time(step_ns):
    # Three requests, two tokens each: 6 steps against 2 calls, 2 steps and 3 rows.
    node = replace(ALONE, drafting_count=3, call_ns=966, drafter_step_ns=step_ns)
    assert speculative(node, 2).keeps_up is (step_ns == 783)


@pytest.mark.parametrize(
    ("step_ns", "round_ns"),
    [
        # One time in eight the drafter has the next block when the verdict comes.
        (70, 7 / 8 * (60 + 2 * 70 + 1200) + 1 / 8 * (30 + 1200)),
        (500, 7 / 8 * (60 + 2 * 500 + 1200) + 1 / 8 * (3 * 500)),
        (1230, 7 / 8 * (60 + 2 * 1230 + 1200) + 1 / 8 * (3 * 1230)),
        (1231, 60 + 2 * 1231 + 1200),  # it has found nothing by then
    ],
)
def test_si_that_drafts_ahead_takes_the_later_of_verdict_and_drafts(step_ns, round_ns):
    node = replace(ALONE, drafter_step_ns=step_ns)
    option = speculative(node, 2, may_draft_ahead=True)
    assert option.token_ns == round(round_ns / (1 + 1 / 2 + 1 / 4))
    assert option.drafts_ahead


@pytest.mark.parametrize(("rate", "step_ns"), [(0.1, 900), (0.5, 70), (0.9, 70)])
@pytest.mark.parametrize("ahead", [False, True])
def test_the_best_lookahead_is_the_one_that_takes_least(rate, step_ns, ahead):
    node = replace(ALONE, acceptance_rate=rate, drafter_step_ns=step_ns)
    each = {it: speculative(node, it, may_draft_ahead=ahead).token_ns for it in range(1, 65)}
    option = speculative(node, None, may_draft_ahead=ahead)
    assert option.lookahead == min(each, key=each.__getitem__)
    assert option.token_ns == min(each.values())


@pytest.mark.parametrize(
    ("requests", "drafting", "ahead"), [(2, 1, True), (3, 1, False), (1, 2, False)]
)
def test_si_drafts_ahead_only_where_nobody_else_has_work_for_its_drafter(requests, drafting, ahead):
    node = replace(ALONE, request_count=requests, drafting_count=drafting)
    assert speculative(node, 2, may_draft_ahead=True).drafts_ahead is ahead


@pytest.mark.parametrize(
    ("rate", "lookahead", "token_ns"),
    [
        (0.5, 1, 0.5 * (1030 + 0.5 * 30 + 70 * 0.5 / 0.5)),
        (0.5, 2, 0.5 * (1030 + 0.5 * 30 + 2 * 70 * 0.5 / 0.75)),
        (0.25, 3, 0.75 * (1030 + 0.25 * 30 + 3 * 70 * 0.25 / (63 / 64))),
        (0.0, 2, 1030),
        (1.0, 2, 70),
    ],
)
def test_dsi_takes_a_verification_and_a_runs_drafting_for_each_correction(
    rate, lookahead, token_ns
):
    node = replace(ALONE, acceptance_rate=rate)
    assert distributed_token_ns(node, lookahead) == round(token_ns)
    slow = replace(node, drafter_step_ns=100_000)
    assert distributed_token_ns(slow, lookahead) == 1030, "it is never slower than plain decoding"


@pytest.mark.parametrize(
    ("change", "drafter_ns"),
    [
        ({}, 70),
        ({"request_count": 3}, 2 * 70),  # three requests at two drafters meet at one of them
        ({"request_count": 4}, 2 * 70),
        ({"request_count": 3, "drafting_count": 5}, 5 * 70),
        ({"request_count": 3, "drafter_prices": SHARED_DRAFTER}, 1.2 * 70),
    ],
)
def test_on_its_part_dsi_has_a_slower_drafter_and_blocks_of_two_rows(change, drafter_ns):
    part = on_its_part(replace(ALONE, **change))
    assert (part.drafter_step_ns, part.target_step_ns) == (drafter_ns, 1100)
    assert (part.request_count, part.drafting_count) == (1, 1)
    assert part.target_prices.of(9) == part.drafter_prices.of(9) == 1.0
    assert (part.call_ns, part.acceptance_rate) == (30, 0.5)


@pytest.mark.parametrize(
    ("node", "requests", "turn_ns"),
    [
        (ALONE, 1, 1300),
        (ALONE, 2, 1300),
        (ALONE, 3, 1.5 * 1300),
        (SHARED, 6, 2 * (900 + 1.5 * 400)),
    ],
)
def test_dsi_is_stretched_by_its_rows_and_by_others(node, requests, turn_ns):
    assert stretch(replace(node, request_count=requests), 3) == turn_ns / 1100


@pytest.mark.parametrize(
    ("change", "free"),
    [
        ({}, True),
        ({"guess_count": 0}, False),
        ({"target_prices": RowPrices()}, False),
        ({"target_prices": RowPrices(((1, 1.0), (6, 1.049)))}, True),
        ({"target_prices": RowPrices(((1, 1.0), (6, 1.051)))}, False),
        ({"target_prices": RowPrices(((1, 1.0), (6, 1.0), (12, 1.1)))}, True),
        # As many requests as targets: the rows of one; four at two targets: those of two.
        (
            {"target_prices": RowPrices(((1, 1.0), (6, 1.0), (12, 1.1))), "request_count": 2},
            True,
        ),
        (
            {"target_prices": RowPrices(((1, 1.0), (6, 1.0), (12, 1.1))), "request_count": 4},
            False,
        ),
    ],
)
def test_own_guesses_are_free_where_their_rows_are(change, free):
    # One row that decides, two draft tokens, three guesses.
    node = replace(ALONE, **{"target_prices": RowPrices(((1, 1.0), (64, 1.0))), **change})
    assert (
        own_guesses_are_free(
            Option(Strategy.SPECULATIVE, lookahead=2, target_count=1, token_ns=1), node
        )
        is free
    )


@pytest.mark.parametrize(("step_ns", "free"), [(500, True), (501, False)])
def test_own_guesses_are_free_for_dsi_where_a_block_is_drafted_within_a_step(step_ns, free):
    flat = RowPrices(((1, 1.0), (64, 1.0)))
    node = replace(ALONE, target_prices=flat, drafter_step_ns=step_ns)
    assert (
        own_guesses_are_free(
            Option(Strategy.DISTRIBUTED, lookahead=2, target_count=1, token_ns=1), node
        )
        is free
    )
    assert own_guesses_are_free(
        Option(Strategy.SPECULATIVE, lookahead=2, target_count=1, token_ns=1), node
    )
    assert not own_guesses_are_free(
        Option(Strategy.AUTOREGRESSIVE, lookahead=0, target_count=1, token_ns=1), node
    )


@pytest.mark.parametrize(
    ("change", "lookahead"),
    [
        ({"request_count": 5}, 3),  # two drafters, 50 each, twice: 200 in steps of 70
        ({"request_count": 1}, 2),
        ({"request_count": 5, "drafter_prices": SHARED_DRAFTER}, 8),
        ({"request_count": 5, "drafter_count": 9}, 8),
        ({"dispatch_ns": 35}, 1),
        ({"dispatch_ns": 36}, 2),
        ({"dispatch_ns": 0}, 1),
        ({"dispatch_ns": 10**6}, 64),
    ],
)
def test_a_lookahead_is_affordable_whose_blocks_take_half_of_the_loops_time(change, lookahead):
    assert affordable_lookahead(replace(ALONE, **change)) == lookahead


@pytest.mark.parametrize(
    ("change", "targets"),
    [({}, 10), ({"request_count": 5}, 2), ({"dispatch_ns": 0}, 1030), ({"call_ns": 100}, 11)],
)
def test_targets_are_affordable_whose_verifications_take_half_of_the_loops_time(change, targets):
    assert affordable_targets(replace(ALONE, **change)) == targets
