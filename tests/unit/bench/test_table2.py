"""Made-up runs on a tiny node, whose ideals are simulated: what is made of them."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from statistics import median

import pytest

from paceline import Strategy
from paceline_bench.charts import save_figure
from paceline_bench.node import TABLE2, SimulatedNode
from paceline_bench.table2 import measurement as table2
from paceline_bench.table2.chart import draw_table2
from paceline_bench.table2.echo import Echo
from paceline_bench.table2.ideal import Plan, ideal_schedule
from paceline_bench.table2.online import PLAIN, PLANNED, Run, Way, make_prompt
from paceline_bench.table2.results import kept
from paceline_bench.table2.tables import report
from paceline_protocol.draft_shape import Shape
from paceline_protocol.laboratory.simulation import ServerLatency
from paceline_protocol.methods import Strategy as Method

MS = 1_000_000
TOKENS = 12
NODE = SimulatedNode(
    target=ServerLatency(first=40 * MS, step=20 * MS),
    drafter=ServerLatency(first=3 * MS, step=2 * MS),
    acceptance_rate=0.6,
)
ROW = replace(TABLE2[0], name="tiny", node=NODE)
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
    Way(Strategy.SPECULATIVE, 2),
    Way(Strategy.SPECULATIVE, 4),
    Way(Strategy.DISTRIBUTED, 1),
)
PLANS = {
    PLAIN: Plan(strategy=Method.AUTOREGRESSIVE, lookahead=0, target_count=1),
    SI_2: Plan(strategy=Method.SPECULATIVE, lookahead=2, target_count=1),
    SI_4: Plan(strategy=Method.SPECULATIVE, lookahead=4, target_count=1),
    PLANNED: Plan(strategy=Method.DISTRIBUTED, lookahead=3, target_count=4),
    DSI_1: Plan(strategy=Method.DISTRIBUTED, lookahead=1, target_count=7),
}


def ideal(way, prompt):
    return ideal_schedule(NODE, PLANS[way], prompt=prompt, max_tokens=TOKENS)


def runs_at(slowness):
    """Runs of every way, each `slowness[way]` times as long as its ideal."""
    by_way = {}
    for way, plan in PLANS.items():
        by_way[way] = []
        for prompt in PROMPTS:
            schedule = ideal(way, prompt)
            run = Run(
                prompt=prompt,
                token_ids=tuple(schedule.result.token_ids),
                plan=plan,
                elapsed_ns=round(schedule.total_ns * slowness.get(way, 1.0)),
                cpu_seconds=0.012,
                drafted_count=0,
                accepted_count=sum(schedule.result.accepted),
                began_quietly=True,
            )
            by_way[way].append(run)
    return table2.RowRuns(by_way)


def spoilt(runs, way):
    """One output of a way has a wrong token."""
    run = runs.by_way[way][1]
    runs.by_way[way][1] = replace(run, token_ids=(*run.token_ids[:-1], run.token_ids[-1] + 1))
    return runs


@pytest.fixture
def result():
    return table2.evaluate(ROW, runs_at({SI_4: 1.5, PLANNED: 1.04}), echoes=ECHOES)


def test_ways_with_trees_are_compared_with_chains_and_leave_their_rows_alone(monkeypatch, result):
    shape = Shape(3, 2)
    si, dsi = (replace(way, shape=shape) for way in (SI_2, DSI_1))
    assert table2.ways([2], [1], shape=shape) == [PLAIN, SI_2, PLANNED, DSI_1, si, dsi]
    for tree, chain in ((si, SI_2), (dsi, DSI_1)):
        plan = replace(PLANS[chain], width=3, branches=2)
        monkeypatch.setitem(PLANS, tree, plan)
    slowness = {SI_4: 1.5, PLANNED: 1.04, si: 1.1}
    with_trees = table2.evaluate(ROW, runs_at(slowness), echoes=ECHOES)

    assert [each.way for each in with_trees.headline] == [each.way for each in result.headline]
    assert [each.way for each in with_trees.beyond] == [si, dsi]
    assert with_trees.identical
    si_row, dsi_row = kept([with_trees])["trees"]
    assert (si_row["width"], si_row["branches"]) == (3, 2)
    speculative = with_trees.speculative
    assert si_row["speed_up_over_si"] == with_trees.beyond[0].speed_over(speculative)
    assert si_row["speed_up_over_chain"] == si_row["speed_up_over_si"]
    assert dsi_row["speed_up_over_chain"] == with_trees.beyond[1].speed_over(with_trees.distributed)
    text = report(kept([with_trees]), max_tokens=12, by_gpu=True)
    assert "| tiny | SI | 3, 2 | 2 |" in text
    assert re.search(r"\| tiny \| DSI, trees \| [\d.]+ \| 8 \|", text)
    assert "trees" not in report(kept([result]), max_tokens=12)


def test_si_that_drafts_ahead_stands_beside_the_papers_which_stays_the_baseline(
    monkeypatch, result
):
    ahead_2, ahead_4 = (replace(way, drafts_ahead=True) for way in (SI_2, SI_4))
    assert table2.ways([2, 4], [1], ahead=True) == [
        PLAIN, SI_2, SI_4, PLANNED, DSI_1, ahead_2, ahead_4
    ]  # fmt: skip
    for ahead, resting in ((ahead_2, SI_2), (ahead_4, SI_4)):
        monkeypatch.setitem(PLANS, ahead, replace(PLANS[resting], drafts_ahead=True))
    runs = runs_at({SI_2: 1.5, SI_4: 1.5, PLANNED: 1.04, ahead_4: 2.0})
    measured = table2.evaluate(ROW, runs, echoes=ECHOES)

    assert runs.best(SI_2) in (SI_2, SI_4)
    assert measured.speculative.way == runs.best(SI_2)
    assert [each.way for each in measured.beyond] == [ahead_2]
    assert measured.identical
    (row,) = kept([measured])["ahead"]
    assert (row["strategy"], row["width"]) == ("SI ahead", 1)
    assert row["speed_up_over_si"] == measured.beyond[0].speed_over(measured.speculative) > 1.3
    text = report(kept([measured]), max_tokens=12, by_gpu=True)
    assert "| tiny | SI ahead | - | 2 |" in text
    assert re.search(r"\| tiny \| SI ahead \| [\d.]+ \| 2 \| [\d.]+ \|", text)
    assert "SI ahead" not in report(kept([result]), max_tokens=12)


def test_dsi_with_the_text_beyond_its_drafter_stands_beside_dsi_as_it_is(monkeypatch, result):
    extended = replace(DSI_1, is_extended=True)
    assert table2.ways([2], [1], extended=True) == [PLAIN, SI_2, PLANNED, DSI_1, extended]
    monkeypatch.setitem(PLANS, extended, PLANS[DSI_1])
    runs = runs_at({SI_4: 1.5, PLANNED: 1.04, extended: 0.9})
    measured = table2.evaluate(ROW, runs, echoes=ECHOES)
    assert runs.best(DSI_1) != extended
    assert [each.way for each in measured.beyond] == [extended]
    content = kept([measured])
    (row,) = content["extended"]
    assert not content["trees"]
    assert not content["ahead"]
    assert row["strategy"] == "DSI + Max-Gram"
    assert row["speed_up_over_chain"] == measured.beyond[0].speed_over(measured.distributed)
    text = report(content, max_tokens=12, by_gpu=True)
    assert "| tiny | DSI + Max-Gram | - | 1 |" in text
    assert re.search(r"\| tiny \| DSI \+ Max-Gram \| [\d.]+ \| 8 \|", text)


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
    assert [each.way for each in result.headline] == [PLAIN, SI_2, PLANNED]
    assert result.planned.lookaheads == (3,)
    assert [each.way for each in result.swept] == [SI_2, SI_4, DSI_1]


def test_dsi_at_its_best_lookahead_may_be_as_planned_or_not():
    for slow, best in ((DSI_1, PLANNED), (PLANNED, DSI_1)):
        assert table2.evaluate(ROW, runs_at({slow: 2.0}), echoes=ECHOES).distributed.way == best


def test_one_disturbed_run_does_not_make_a_lookahead_the_worse():
    runs = runs_at({SI_4: 1.1})
    assert runs.best(SI_2) == SI_2
    runs.by_way[SI_2][0] = replace(runs.by_way[SI_2][0], elapsed_ns=10**12)
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


def reported(results):
    return report(kept(results), max_tokens=12)


def test_what_each_gpu_makes_is_told_if_asked_for(result):
    """SI's two models take turns on one; DSI has one for the drafter beside its targets."""
    text = report(kept([result]), max_tokens=12, by_gpu=True)
    found = {}
    for line in text.partition("### Tokens/s of each GPU")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == result.row.name and len(cells) == 5:
            found[cells[1]] = (float(cells[2]), int(cells[3]), float(cells[4]))
    targets = max(result.planned.target_counts)
    assert [found[name][1] for name in ("non-SI", "SI", "DSI")] == [1, 1, targets + 1]
    for tokens_per_second, gpus, per_gpu in found.values():
        assert per_gpu == pytest.approx(tokens_per_second / gpus, abs=0.1)
    assert "GPU" not in reported([result])


def test_the_report_says_what_was_reached_and_what_was_not(result):
    text = reported([result])

    assert f"| {result.planned.speed_over(result.speculative):.2f}x |" in text
    worst = 1 / min(result.planned.speed_over(it) for it in (result.plain, result.speculative))
    assert f"- DSI ÷ the better of SI and non-SI: at worst {worst:.3f} (tiny); goal 1.02" in text
    assert f"| {median(result.distributed.times):.0f} ms (" in text
    assert "DIFFER" not in text
    assert "goal 1.05" in text
    slow = table2.evaluate(ROW, runs_at({PLANNED: 3.0}), echoes=ECHOES)
    assert "- online ÷ floor: at worst 2.9" in reported([slow])
    assert reported([slow]).count("(tiny, DSI); goal 1.05: MISSED") == 1
    assert reported([slow]).count("(tiny); goal 1.02: MISSED") == 1


def test_what_took_less_than_its_floor_is_marked():
    slow = dict.fromkeys(PLANS, 1.1)
    as_fast_as_ideal = table2.evaluate(ROW, runs_at(slow | {PLAIN: 1.0}), echoes=ECHOES)

    text = reported([as_fast_as_ideal])

    assert re.search(r"\| tiny \| non-SI .*\| 0\.99\d\\\* \|", text)
    assert text.count("*") == 2  # the mark, and what it means
    assert "*" not in reported([table2.evaluate(ROW, runs_at(slow), echoes=ECHOES)])


def test_runs_that_began_on_a_busy_orchestrator_are_told():
    runs = runs_at({})
    runs.by_way[SI_4][1] = replace(runs.by_way[SI_4][1], began_quietly=False)
    result = table2.evaluate(ROW, runs, echoes=ECHOES)

    assert "computed behind an earlier request: 1 runs" in reported([result])
    assert [row["restless_runs"] for row in kept([result])["sweeps"]] == [0, 1, 0]


@pytest.mark.parametrize("way", [SI_4, PLANNED])
def test_without_equal_outputs_there_is_no_speed_up(way):
    result = table2.evaluate(ROW, spoilt(runs_at({}), way), echoes=ECHOES)
    text = reported([result])

    assert not result.identical
    assert "x |" not in text.replace("1.47x |", "")
    assert "AN OUTPUT DIFFERED" in text
    assert not any("speed_up_over_si" in row for row in kept([result])["rows"])


def test_an_output_that_only_the_simulator_disagrees_with_is_not_identical():
    runs = runs_at({})
    for way in PLANS:
        spoilt(runs, way)

    assert not table2.evaluate(ROW, runs, echoes=ECHOES).identical


def test_a_repeat_has_every_way_once():
    ways = table2.ways([2, 4], [1])

    assert ways == [PLAIN, SI_2, SI_4, PLANNED, DSI_1]
    assert table2.sleeps_ns(NODE) == set(OVERHEADS)


def test_the_picture_has_a_bar_for_each_strategy_and_row(result, tmp_path):
    figure = draw_table2([result, result])
    save_figure(figure, tmp_path / "table2.svg")

    ET.parse(tmp_path / "table2.svg")
    times, ratios = figure.axes
    assert len(times.patches) == 6
    assert sorted(bar.get_height() for bar in times.patches[:3]) == pytest.approx(
        sorted(each.times[index] for each, index in _medians(result))
    )
    assert [label.get_text() for label in ratios.get_xticklabels()] == ["tiny", "tiny"]
    labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert "goal: 1.05 of floor" in labels
    assert "median of 3 prompts, and their spread (least to most)" in times.get_title()


def _medians(result):
    return [(each, sorted(range(3), key=each.times.__getitem__)[1]) for each in result.headline]
