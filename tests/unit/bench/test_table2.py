"""Made-up runs on tiny servers, whose ideals are simulated: what is made of them."""

import json
from dataclasses import replace

import pytest

from paceline import Strategy
from paceline_bench.simulated_servers import TABLE2, SimulatedServers
from paceline_bench.table2 import measurement as table2
from paceline_bench.table2.echo import Echo
from paceline_bench.table2.ideal import Plan, ideal_schedule
from paceline_bench.table2.online import PLAIN, PLANNED, Run, Variant, make_prompt
from paceline_bench.table2.results import kept
from paceline_protocol.draft_shape import Shape
from paceline_protocol.laboratory.simulation import ServerLatency
from paceline_protocol.methods import Strategy as Method

MS = 1_000_000
TOKENS = 12
SERVERS = SimulatedServers(
    target=ServerLatency(first=40 * MS, step=20 * MS),
    drafter=ServerLatency(first=3 * MS, step=2 * MS),
    acceptance_rate=0.6,
)
ROW = replace(TABLE2[0], name="tiny", servers=SERVERS)
PROMPTS = [make_prompt(f"repeat {index}") for index in range(3)]
OVERHEADS = {2 * MS: 100_000, 3 * MS: 200_000, 20 * MS: 300_000, 40 * MS: 400_000}
ECHOES = {
    sleep: Echo(
        sleep_ns=sleep,
        overhead_ns=overhead,
        overhead_low_ns=overhead - 10_000,
        overhead_high_ns=overhead + 10_000,
        one_way_ns=50_000,
        back_ns=40_000,
        count=3,
    )
    for sleep, overhead in OVERHEADS.items()
}
SI_2, SI_4, DSI_1 = (
    Variant(Strategy.SPECULATIVE, 2),
    Variant(Strategy.SPECULATIVE, 4),
    Variant(Strategy.DISTRIBUTED, 1),
)
PLANS = {
    PLAIN: Plan(strategy=Method.AUTOREGRESSIVE, lookahead=0, target_count=1),
    SI_2: Plan(strategy=Method.SPECULATIVE, lookahead=2, target_count=1),
    SI_4: Plan(strategy=Method.SPECULATIVE, lookahead=4, target_count=1),
    PLANNED: Plan(strategy=Method.DISTRIBUTED, lookahead=3, target_count=4),
    DSI_1: Plan(strategy=Method.DISTRIBUTED, lookahead=1, target_count=7),
}


def ideal(variant, prompt):
    return ideal_schedule(SERVERS, PLANS[variant], prompt=prompt, max_tokens=TOKENS)


def runs_at(slowness):
    """Runs of every variant, each `slowness[variant]` times as long as its ideal."""
    by_variant = {}
    for variant, plan in PLANS.items():
        by_variant[variant] = []
        for prompt in PROMPTS:
            schedule = ideal(variant, prompt)
            run = Run(
                prompt=prompt,
                token_ids=tuple(schedule.result.token_ids),
                plan=plan,
                elapsed_ns=round(schedule.total_ns * slowness.get(variant, 1.0)),
                cpu_seconds=0.012,
                drafted_count=0,
                accepted_count=sum(schedule.result.accepted),
                began_quietly=True,
            )
            by_variant[variant].append(run)
    return table2.RowRuns(by_variant)


def spoilt(runs, variant):
    """One output of a variant has a wrong token."""
    run = runs.by_variant[variant][1]
    runs.by_variant[variant][1] = replace(
        run, token_ids=(*run.token_ids[:-1], run.token_ids[-1] + 1)
    )
    return runs


@pytest.fixture
def result():
    return table2.evaluate(ROW, runs_at({SI_4: 1.5, PLANNED: 1.04}), echoes=ECHOES)


def test_variants_with_trees_are_compared_with_chains_and_leave_rows_alone(monkeypatch, result):
    shape = Shape(3, 2)
    si, dsi = (replace(variant, shape=shape) for variant in (SI_2, DSI_1))
    assert table2.variants([2], [1], shape=shape) == [PLAIN, SI_2, PLANNED, DSI_1, si, dsi]
    for tree, chain in ((si, SI_2), (dsi, DSI_1)):
        plan = replace(PLANS[chain], width=3, branches=2)
        monkeypatch.setitem(PLANS, tree, plan)
    slowness = {SI_4: 1.5, PLANNED: 1.04, si: 1.1}
    with_trees = table2.evaluate(ROW, runs_at(slowness), echoes=ECHOES)

    assert [each.variant for each in with_trees.headline] == [
        each.variant for each in result.headline
    ]
    assert [each.variant for each in with_trees.beyond] == [si, dsi]
    assert with_trees.identical
    si_row, dsi_row = kept([with_trees])["trees"]
    assert (si_row["width"], si_row["branches"]) == (3, 2)
    speculative = with_trees.speculative
    assert si_row["speed_up_over_si"] == with_trees.beyond[0].speed_over(speculative)
    assert si_row["speed_up_over_chain"] == si_row["speed_up_over_si"]
    assert dsi_row["speed_up_over_chain"] == with_trees.beyond[1].speed_over(with_trees.distributed)


def test_si_that_drafts_ahead_stands_beside_the_papers_which_stays_the_baseline(
    monkeypatch, result
):
    ahead_2, ahead_4 = (replace(variant, drafts_ahead=True) for variant in (SI_2, SI_4))
    assert table2.variants([2, 4], [1], ahead=True) == [
        PLAIN, SI_2, SI_4, PLANNED, DSI_1, ahead_2, ahead_4
    ]  # fmt: skip
    for ahead, resting in ((ahead_2, SI_2), (ahead_4, SI_4)):
        monkeypatch.setitem(PLANS, ahead, replace(PLANS[resting], drafts_ahead=True))
    runs = runs_at({SI_2: 1.5, SI_4: 1.5, PLANNED: 1.04, ahead_4: 2.0})
    measured = table2.evaluate(ROW, runs, echoes=ECHOES)

    assert runs.best(SI_2) in (SI_2, SI_4)
    assert measured.speculative.variant == runs.best(SI_2)
    assert [each.variant for each in measured.beyond] == [ahead_2]
    assert measured.identical
    (row,) = kept([measured])["ahead"]
    assert (row["strategy"], row["width"]) == ("SI ahead", 1)
    assert row["speed_up_over_si"] == measured.beyond[0].speed_over(measured.speculative) > 1.3


def test_dsi_with_the_text_beyond_its_drafter_stands_beside_dsi_as_it_is(monkeypatch, result):
    extended = replace(DSI_1, is_extended=True)
    assert table2.variants([2], [1], extended=True) == [PLAIN, SI_2, PLANNED, DSI_1, extended]
    monkeypatch.setitem(PLANS, extended, PLANS[DSI_1])
    runs = runs_at({SI_4: 1.5, PLANNED: 1.04, extended: 0.9})
    measured = table2.evaluate(ROW, runs, echoes=ECHOES)
    assert runs.best(DSI_1) != extended
    assert [each.variant for each in measured.beyond] == [extended]
    content = kept([measured])
    (row,) = content["extended"]
    assert not content["trees"]
    assert not content["ahead"]
    assert row["strategy"] == "DSI + Max-Gram"
    assert row["speed_up_over_chain"] == measured.beyond[0].speed_over(measured.distributed)


def test_the_floor_charges_each_call_of_the_critical_path_once():
    schedule = ideal(PLAIN, PROMPTS[0])
    assert table2.floor_ns(schedule, ECHOES) == schedule.total_ns + 400_000

    schedule = ideal(SI_4, PROMPTS[0])
    drafts = sum(span.kind.value == "draft" for span in schedule.result.spans)
    verifications = len(schedule.result.spans) - drafts
    assert table2.floor_ns(schedule, ECHOES) - schedule.total_ns == (
        200_000 + (drafts - 1) * 100_000 + 400_000 + (verifications - 1) * 300_000
    )


def test_calls_beside_the_critical_path_are_not_charged():
    schedule = ideal(DSI_1, PROMPTS[0])
    assert len(schedule.critical_path) < len(schedule.result.spans) / 2
    charged = table2.floor_ns(schedule, ECHOES) - schedule.total_ns
    assert 0 < charged <= 400_000 * len(schedule.critical_path)


def test_a_row_takes_si_at_its_best_lookahead_and_dsi_as_planned(result):
    assert [each.variant for each in result.headline] == [PLAIN, SI_2, PLANNED]
    assert result.planned.lookaheads == (3,)
    assert [each.variant for each in result.swept] == [SI_2, SI_4, DSI_1]


def test_dsi_at_its_best_lookahead_may_be_as_planned_or_not():
    for slow, best in ((DSI_1, PLANNED), (PLANNED, DSI_1)):
        assert table2.evaluate(ROW, runs_at({slow: 2.0}), echoes=ECHOES).distributed.variant == best


def test_one_disturbed_run_does_not_make_a_lookahead_the_worse():
    runs = runs_at({SI_4: 1.1})
    assert runs.best(SI_2) == SI_2
    runs.by_variant[SI_2][0] = replace(runs.by_variant[SI_2][0], elapsed_ns=10**12)
    assert runs.best(SI_2) == SI_2


def test_ratios_are_taken_prompt_by_prompt(result):
    assert result.planned.over_ideal == pytest.approx([1.04] * 3)
    expected = [
        si / dsi for si, dsi in zip(result.speculative.times, result.planned.times, strict=True)
    ]
    assert result.planned.speed_over(result.speculative) == sorted(expected)[1]


def test_the_counts_of_the_simulator_are_those_of_the_runs(result):
    for each in (*result.headline, *result.swept):
        assert each.accepted == each.ideal_accepted
        assert each.cpu_ms_per_token == pytest.approx(1.0)
        assert all(ideal <= floor for ideal, floor in zip(each.ideals, each.floors, strict=True))


def test_a_sequential_schedule_is_delayed_by_its_calls(result):
    schedule = ideal(PLAIN, PROMPTS[0])
    assert result.plain.delayed[0] * MS == pytest.approx(schedule.total_ns + 300_000)


def test_json_has_a_row_for_each_strategy(result):
    rows = json.loads(json.dumps(kept([result])["rows"]))

    assert [row["strategy"] for row in rows] == ["non-SI", "SI", "DSI", "DSI (best lookahead)"]
    for row in rows:
        assert row["name"] == "tiny"
        assert row["identical"] is True
        assert row["ideal_ms"] <= row["floor_ms"]
        assert row["online_over_floor"] == pytest.approx(
            row["median_ms"] / row["floor_ms"], rel=0.1
        )
        assert row["repeats"] == len(row["times_ms"]) == 3
    assert rows[0]["ideal_ms"] == 40 + 11 * 20
    assert rows[2]["paper_speed_up_over_si"] == 1.47
    assert rows[2]["speed_up_over_si"] == result.planned.speed_over(result.speculative)
    assert [row["lookaheads"] for row in kept([result])["sweeps"]] == [(2,), (4,), (1,)]
    assert {echo["sleep_ns"] for echo in kept([result])["echoes"]} == set(OVERHEADS)


def test_runs_that_began_on_a_busy_orchestrator_are_told():
    runs = runs_at({})
    runs.by_variant[SI_4][1] = replace(runs.by_variant[SI_4][1], began_quietly=False)
    result = table2.evaluate(ROW, runs, echoes=ECHOES)

    assert [row["restless_runs"] for row in kept([result])["sweeps"]] == [0, 1, 0]


@pytest.mark.parametrize("variant", [SI_4, PLANNED])
def test_without_equal_outputs_there_is_no_speed_up(variant):
    result = table2.evaluate(ROW, spoilt(runs_at({}), variant), echoes=ECHOES)

    assert not result.identical
    assert not any("speed_up_over_si" in row for row in kept([result])["rows"])


def test_an_output_that_only_the_simulator_disagrees_with_is_not_identical():
    runs = runs_at({})
    for variant in PLANS:
        spoilt(runs, variant)

    assert not table2.evaluate(ROW, runs, echoes=ECHOES).identical


def test_a_repeat_has_every_variant_once():
    variants = table2.variants([2, 4], [1])

    assert variants == [PLAIN, SI_2, SI_4, PLANNED, DSI_1]
    assert table2.sleeps_ns(SERVERS) == set(OVERHEADS)
