"""`paceline plan`: its numbers, and what it concludes from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline_bench.plan.forecast import Forecast, forecast
from paceline_bench.plan.jobs import ForecastJob, forecast_jobs
from paceline_bench.plan.tables import conclusions, json_rows
from paceline_bench.simulated_servers import SimulatedServers
from paceline_protocol.draft_shape import Shape
from paceline_protocol.laboratory.guesses import OwnGuesses
from paceline_protocol.laboratory.simulation import ServerLatency
from paceline_protocol.methods import Strategy, label_of
from paceline_protocol.ranks import runner_up_shares

MS = 1_000_000
KNOWN = (Strategy.AUTOREGRESSIVE, Strategy.SPECULATIVE, Strategy.DISTRIBUTED)
TREE = Shape(3, 2)


def servers(
    *,
    target: float = 40,
    drafter: float = 4,
    acceptance: float = 0.8,
    targets: int = 2,
    first: float | None = None,
    call: int = 0,
    row: float = 0,
) -> SimulatedServers:
    return SimulatedServers(
        target=ServerLatency(
            int((first or target) * MS), int(target * MS), call=call * MS, row=int(row * MS)
        ),
        drafter=ServerLatency(int(drafter * MS), int(drafter * MS), call=call * MS),
        acceptance_rate=acceptance,
        target_count=targets,
    )


def known_jobs(of: SimulatedServers, **options: Any) -> list[ForecastJob]:
    """What is forecast of the paper's methods; there may be others."""
    return [job for job in forecast_jobs(of, **options) if job.strategy in KNOWN]


def forecasts(of: SimulatedServers, *, tokens: int = 20, repeats: int = 8) -> list[Forecast]:
    return [forecast(job) for job in known_jobs(of, token_count=tokens, repeats=repeats)]


def row(strategy: Strategy, targets: int, milliseconds: float, *, spread: float = 0) -> Forecast:
    times = (milliseconds - spread, milliseconds, milliseconds + spread)
    lookahead = 0 if strategy is Strategy.AUTOREGRESSIVE else 3
    return Forecast(strategy, targets, lookahead, tuple(time * MS for time in times), 1.5)


def rows(plain: float, si: float, *dsi: float) -> list[Forecast]:
    return [
        row(Strategy.AUTOREGRESSIVE, 1, plain),
        row(Strategy.SPECULATIVE, 1, si),
        *(row(Strategy.DISTRIBUTED, count, each) for count, each in enumerate(dsi, 1)),
    ]


# --- trees ---


def test_with_a_width_methods_that_draft_come_once_more_with_trees():
    jobs = known_jobs(
        servers(targets=2), token_count=8, repeats=2, shape=TREE, shares=runner_up_shares()
    )
    assert [
        (label_of(job.strategy, drafts_ahead=job.drafts_ahead), job.target_count, job.shape.width)
        for job in jobs
    ] == [
        ("non-SI", 1, 1),
        ("SI", 1, 1),
        ("SI ahead", 1, 1),
        ("DSI", 1, 1),
        ("DSI", 2, 1),
        ("SI", 1, 3),
        ("SI ahead", 1, 3),
        ("DSI", 1, 3),
        ("DSI", 2, 3),
    ]
    trees = [forecast(job) for job in jobs[5:]]
    assert all(each.shape == TREE and each.lookahead >= 1 for each in trees)
    assert all(each.mean_ns > 0 and len(each.times_ns) == 2 for each in trees)


# --- a target that drafts for itself ---


def test_with_hit_rates_self_speculation_stands_beside_the_others():
    guesses = OwnGuesses((1.0,), ((0,),))
    at = servers(targets=1, row=4)
    jobs = forecast_jobs(at, token_count=21, repeats=3, guesses=guesses)
    assert len(jobs) == 1 + len(forecast_jobs(at, token_count=21, repeats=3))
    (own,) = (forecast(job) for job in jobs if job.strategy is Strategy.SELF_SPECULATIVE)
    plain = forecast(jobs[0])
    # After the prompt's ten forwards of two rows decide two tokens each.
    assert own.times_ns == ((40 + 10 * 44) * MS,) * 3
    assert own.tokens_per_forward == pytest.approx(21 / 11)
    assert (own.gpu_count, own.lookahead, plain.tokens_per_forward) == (1, 0, 1)


def test_own_guesses_that_are_right_at_times_take_different_times():
    guesses = OwnGuesses((0.5,), ((0,),))
    job = ForecastJob(
        servers(), Strategy.SELF_SPECULATIVE, 1, token_count=30, repeats=5, guesses=guesses
    )
    assert len(set(forecast(job).times_ns)) > 1


# --- numbers ----------------------------------------------------------------------------------


def test_plain_decoding_takes_a_forward_for_each_token_and_the_prompts():
    plain = forecasts(servers(first=100))[0]
    assert (plain.mean_ns, plain.error_ns) == ((100 + 19 * 40) * MS, 0)


def test_with_every_draft_token_right_dsi_drafts_and_verifies_once_more():
    distributed = forecasts(servers(acceptance=1, targets=10))[-1]
    assert distributed.mean_ns == (19 * 4 + 40) * MS


def test_a_call_is_paid_once_for_all_of_plain_decoding():
    assert forecasts(servers(call=1))[0].mean_ns == (1 + 20 * 40) * MS


def test_dear_rows_make_blocks_shorter_and_speculation_slower():
    _, free, *_ = forecasts(servers())
    plain, dear, *_ = forecasts(servers(row=4))
    assert dear.lookahead < free.lookahead
    assert free.mean_ns < dear.mean_ns
    assert plain.mean_ns == 20 * 40 * MS


def test_a_long_prompt_is_not_sent_to_all_targets_where_that_is_slower():
    """The first row of Table 2: 990 ms with a broadcast, 973 without, by an independent run."""
    vicuna = servers(target=37.7, drafter=2.5, acceptance=0.63, targets=7, first=202)
    job = ForecastJob(vicuna, Strategy.DISTRIBUTED, 7, token_count=50, repeats=10)
    assert forecast(job).mean_ns / MS < 980


def test_there_is_a_row_for_each_number_of_targets_that_can_differ():
    """At a tenth of the target's latency ten targets are all that Equation 1 can use."""
    jobs = forecast_jobs(servers(targets=64), token_count=20, repeats=1)
    counts = [job.target_count for job in jobs if job.strategy is Strategy.DISTRIBUTED]
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 10]


def test_without_a_gpu_for_a_second_model_there_is_no_dsi():
    jobs = known_jobs(servers(targets=0), token_count=20, repeats=1)
    assert [job.strategy for job in jobs] == [Strategy.AUTOREGRESSIVE, Strategy.SPECULATIVE]


def test_dsi_gains_from_a_second_target_and_never_loses_to_plain_decoding():
    plain, _, _, one, two = forecasts(servers(acceptance=0.6))
    gain, error = two.gain_over(one)
    assert gain > 5 * error
    assert two.mean_ns < one.mean_ns < plain.mean_ns


def test_a_drafter_slower_than_the_target_is_no_use_and_no_harm():
    plain, speculative, ahead, distributed = forecasts(servers(drafter=60))
    assert ahead.mean_ns == speculative.mean_ns > plain.mean_ns
    assert distributed.mean_ns <= plain.mean_ns


def test_drafting_ahead_gains_where_the_drafter_is_slow_and_right():
    starcoder = servers(target=20.6, drafter=6.8, acceptance=0.93, targets=1)
    _, resting, ahead, _ = forecasts(starcoder, tokens=50)
    gain, error = ahead.gain_over(resting)
    assert (resting.gpu_count, ahead.gpu_count) == (1, 2)
    assert gain - 3 * error > 0.15
    assert ahead.lookahead < resting.lookahead


def test_where_every_token_is_right_a_round_ahead_is_a_verification():
    """A drafter twice as fast: with lookahead 1 each forward of the target is worth two tokens."""
    job = ForecastJob(
        servers(drafter=20, acceptance=1), Strategy.SPECULATIVE, 1, 20, 2, drafts_ahead=True
    )
    found = forecast(job)
    assert (found.lookahead, found.mean_ns) == (1, (20 + 10 * 40) * MS)
    assert found.label == "SI ahead"


@pytest.mark.parametrize(
    ("strategy", "targets", "lookahead", "milliseconds"),
    [
        pytest.param(Strategy.SPECULATIVE, 1, 4, 992, id="SI"),
        pytest.param(Strategy.DISTRIBUTED, 2, 4, 884, id="DSI-SP2"),
        pytest.param(Strategy.DISTRIBUTED, 3, 3, 843, id="DSI-SP3"),
    ],
)
def test_vicuna_comes_to_its_exact_expectation(strategy, targets, lookahead, milliseconds):
    """Vicuna-13B and -68M on CNN-DM, 50 tokens, no prefill: figures of an independent code."""
    vicuna = servers(target=37.7, drafter=2.5, acceptance=0.63)
    found = forecast(ForecastJob(vicuna, strategy, targets, token_count=50, repeats=3))
    assert found.lookahead == lookahead
    assert found.mean_ns / MS == pytest.approx(milliseconds, abs=1)


def test_the_luck_of_the_draws_is_taken_out():
    """So few generations say what many do, also where the prompt's forward takes longer."""
    slow_prompt = servers(target=20, drafter=3, first=100)
    few, more = (
        forecast(ForecastJob(slow_prompt, Strategy.DISTRIBUTED, 2, token_count=30, repeats=repeats))
        for repeats in (5, 60)
    )
    assert more.error_ns < 0.01 * more.mean_ns
    assert few.mean_ns == pytest.approx(more.mean_ns, rel=0.05)


def test_a_method_of_which_nothing_is_known_exactly_is_simulated_with_every_lookahead(monkeypatch):
    monkeypatch.setattr("paceline_bench.plan.expectations._EXPECTATIONS", {})
    vicuna = servers(target=37.7, drafter=2.5, acceptance=0.63)
    found = forecast(ForecastJob(vicuna, Strategy.SPECULATIVE, 1, token_count=50, repeats=20))
    assert 3 <= found.lookahead <= 6
    assert found.mean_ns / MS == pytest.approx(992, rel=0.1)
    assert found.error_ns > 0


# --- what is said of them ---------------------------------------------------------------------


def test_the_fewest_gpus_that_come_near_the_fastest_are_recommended():
    take, fastest = conclusions(rows(1000, 600, 700, 500, 495), servers(targets=3))
    assert take == (
        "Take DSI on 2 targets with lookahead 3 (3 GPUs): 2.00 times as fast as plain decoding,"
        " 1.20 times as fast as SI."
    )
    assert fastest.startswith("The fastest is DSI on 3 targets with lookahead 3 (4 GPUs), by 1.0%")


def test_it_says_when_si_is_enough():
    take, reason = conclusions(rows(1000, 500, 600), servers(targets=1))
    assert take == "Take SI with lookahead 3 (1 GPU): 2.00 times as fast as plain decoding."
    assert reason == "DSI needs a second target to beat SI."


def test_it_says_when_speculation_does_not_pay_and_why():
    nothing, reason = conclusions(
        rows(1000, 1200, 1000), servers(drafter=20, acceptance=0.1, targets=1)
    )
    assert nothing == "Speculation does not pay here: decode plainly."
    assert reason == (
        "SI is slower than plain decoding: its acceptance rate of 10% is below the drafter's"
        " latency, 50% of the target's."
    )


def test_a_row_has_its_speed_up_and_the_gain_of_each_added_target_with_its_error():
    """Four more targets save 80 of 400 ms, with a standard error of 16 ms."""
    listed = [*rows(1000, 500), row(Strategy.DISTRIBUTED, 8, 400)]
    listed.append(row(Strategy.DISTRIBUTED, 12, 320, spread=16 * 3**0.5))
    *_, before, last = json_rows(listed)
    assert (before["gain_per_target"], before["gpu_count"]) == (None, 9)
    assert (last["mean_ms"], last["error_ms"]) == pytest.approx((320, 16))
    assert (last["gain_per_target"], last["gain_error"]) == pytest.approx((0.05, 0.01))
    assert (last["speed_up"], last["tokens_per_forward"]) == (3.125, 1.5)


def test_other_shapes_and_other_methods_are_no_base_of_a_gain():
    tree = Forecast(Strategy.DISTRIBUTED, 1, 1, (80.0 * MS,) * 3, 1.5, TREE)
    wider = replace(tree, target_count=2, times_ns=(60.0 * MS,) * 3)
    speculative = row(Strategy.SPECULATIVE, 1, 500)
    ahead = replace(speculative, times_ns=(400.0 * MS,) * 3, drafts_ahead=True)
    told = json_rows([*rows(1000, 500, 400), tree, wider, speculative, ahead])
    assert [line["gain_per_target"] for line in told] == [None] * 4 + [0.25, None, None]
    assert [line["name"] for line in told[3:]] == [
        *("DSI on 1 target, width 3", "DSI on 2 targets, width 3", "SI", "SI ahead")
    ]
