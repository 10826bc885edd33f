"""The pages' measurements are those of the results files."""

from __future__ import annotations

import re
from statistics import median

import pytest

import publish
from paceline_bench.table2.tables import BREAKDOWN_HEADINGS


def circumstances(command):
    return {
        "command": command,
        "date": "2026-01-02",
        "machine": "2 x x86_64, Linux",
        "python": "3.11.7",
        "load_average": 1.2,
    }


def table2_row(strategy, ms, **more):
    return {
        "name": "vicuna/cnn",
        "strategy": strategy,
        "median_ms": ms,
        "online_over_floor": 1.02,
        "online_over_ideal": 1.1,
        "breakdown_ms": None,
        "repeats": 3,
        **more,
    }


def load_row(strategy, speed, *, identical=True, limit="", chosen=None):
    return {
        "orchestrator_count": 1,
        "stream_count": 4,
        "strategy": strategy,
        "tokens_per_second": speed,
        "identical": identical,
        "limit": limit,
        "chosen": chosen or {strategy: 8},
        "speed_up": speed / 98.4,
        "ttft_ms": {"p50": 60.4, "p99": None},
        "itl_ms": {"p50": 40.2, "p99": 80.0},
        "fairness": 0.987,
        "orchestrator_ms_per_token": 1.126,
        "memory_before_mib": 40.0,
        "memory_peak_mib": 41.26,
    }


def pair_row(group, method, name, speed, *, lookahead=None, identical=True):
    return {
        "group": group,
        "method": method,
        "name": name,
        "lookahead": lookahead,
        "tokens_per_second": speed,
        "repeats_ms_per_token": [1e3 / speed, 1.25e3 / speed, 0.8e3 / speed],
        "tokens_per_forward": 2.5,
        "ttft_ms": None if group == "transformers" else 20.4,
        "identical": identical,
    }


def spread(ms):
    return {"median": ms, "low": ms / 2, "high": 3 * ms}


def model(ms):
    return {"ttft_ms": spread(4 * ms), "tpot_ms": spread(ms), "rows_ms": {"1": ms, "9": 2}}


def figure_row(name, *, dispatch="blocks", slower=0):
    comparison = {
        "slower_count": slower,
        "worst_loss": 0.0056 if slower else 0,
        "worst_place": [0.01, 0.4] if slower else None,
        "best_ratio": 1.493,
        "best_place": [0.15, 0.89],
        "mean_ratio": 1.182,
    }
    return {
        "figure": name,
        "dispatch": dispatch,
        "lookahead": 5 if name == "figure7" else None,
        "cell_count": 10_100,
        "below_count": 5050,
        "si_slower_below_count": 5050,
        "si_slower_elsewhere_count": 0,
        "over_non_si": {**comparison, "slower_count": 0},
        "over_si": comparison,
        "over_both": comparison,
        "drawn_best_ratio": 1.551,
        "drawn_best_place": [0.15, 0.9],
    }


def plan_row(strategy, target_count, ms, *, gain=None):
    return {
        "strategy": strategy,
        "target_count": target_count,
        "lookahead": 0 if strategy == "non-SI" else 3,
        "mean_ms": ms,
        "error_ms": 1.2,
        "speed_up": 1000 / ms,
        "gain_per_target": gain,
    }


@pytest.fixture
def results():
    return {
        "simulate": {
            "circumstances": circumstances("paceline simulate --grid full"),
            "table1_is_exact": True,
            "rows": [figure_row("figure2", slower=37), figure_row("figure7")],
        },
        "simulate-served": {
            "circumstances": circumstances("paceline simulate figure2"),
            "rows": [figure_row("figure2", dispatch="work_conserving", slower=1)],
        },
        "plan": {
            "circumstances": circumstances("paceline plan --gpus 3"),
            "rows": [
                plan_row("non-SI", 1, 1000.0),
                plan_row("DSI", 1, 500.0),
                plan_row("DSI", 2, 400.0, gain=0.2),
            ],
        },
        "table2": {
            "circumstances": circumstances("paceline bench table2 --repeats 3"),
            "rows": [
                table2_row("non-SI", 2000.4),
                table2_row("SI", 1200.0),
                table2_row(
                    "DSI",
                    1000.0,
                    paper_speed_up_over_si=1.47,
                    speed_up_over_si=1.19,
                    ideal_speed_up_over_si=1.25,
                    speed_up_over_non_si=2.01,
                    echo_one_way_us=500.0,
                    restart_draft_us=1200.0,
                    restart_verify_us=None,
                    restarts=7,
                    reference_ms={"si": 3, "dsi": 2, "repaired_si": 5, "repaired_dsi": 4},
                ),
                table2_row("DSI (best lookahead)", 990.0),
            ],
            "sweeps": [
                *(table2_row("SI", 1200.0, lookaheads=[count]) for count in (4, 3, 5)),
                table2_row("DSI", 1200.0, lookaheads=[1]),
            ],
            "echoes": [{"overhead_ns": 700_000}, {"overhead_ns": 1_500_000}],
        },
        "load": {
            "circumstances": circumstances("paceline bench load"),
            "system": {
                "targets": 4,
                "target_ms": 40.0,
                "drafters": 1,
                "drafter_ms": 4.0,
                "acceptance": 0.8,
                "tokens": 24,
            },
            "memory": [
                {"strategy": "non-SI", "orchestrator_count": 1, "mib": None},
                {"strategy": "AUTO", "orchestrator_count": 2, "mib": 0.123},
            ],
            "rows": [
                load_row("non-SI", 98.4),
                load_row("SI", 190.0, limit="machine"),
                load_row("AUTO", 201.0, chosen={"SI": 6, "DSI": 2}),
            ],
        },
        "pair": {
            "circumstances": circumstances("paceline bench pair"),
            "rows": [
                pair_row("transformers", "bare", "bare loop", 100.0),
                pair_row("transformers", "plain", "generate", 90.0),
                pair_row("transformers", "speculative", "assisted 4", 150.0, lookahead=4),
                pair_row("transformers", "lookup", "generate, prompt lookup", 160.0),
                pair_row("the services", "plain", "non-SI", 110.0),
                pair_row("the services", "speculative", "SI, lookahead 4", 180.0, lookahead=4),
                pair_row("the services", "distributed", "DSI", 120.0),
            ],
            "models": {"target": model(5.0), "drafter": model(0.5)},
            "acceptance": {
                "common_runs": [3, 5],
                "tokens": 8,
                "rate_by_common_runs": 0.8,
                "rate_by_verdicts": 0.9,
                "blocks": 7,
                "lookahead": 2,
                "accepted_shares": [0.9, 0.81],
            },
            "sharing": [{"texts": 2, "forward_ms": 7.5, "tokens_per_second": 177.4}],
        },
    }


def lines_of(name, results):
    return publish.BLOCKS[name](results).splitlines()


@pytest.mark.parametrize("path", publish.PAGES, ids=lambda path: path.name)
def test_the_pages_are_fresh(path):
    text = path.read_text(encoding="utf-8")
    assert publish.page(text, publish.read_results()) == text, "run `make figures`"


def test_every_block_is_on_a_page_once():
    pages = "".join(path.read_text(encoding="utf-8") for path in publish.PAGES)
    assert sorted(re.findall(r"<!-- measured: (\S+) -->", pages)) == sorted(publish.BLOCKS)


def test_only_what_is_between_the_marks_is_written(results):
    text = "before\n<!-- measured: pair-sharing -->\nold\n<!-- /measured -->\nafter\n"
    written = publish.page(text, results)
    assert written.startswith("before\n<!-- measured: pair-sharing -->\n\n| targets that")
    assert written.endswith("| 2 | 7.50 | 177 |\n\n<!-- /measured -->\nafter\n")
    assert publish.page(written, results) == written


def test_a_mark_that_nothing_is_known_of_is_an_error(results):
    with pytest.raises(KeyError, match="nonsense"):
        publish.page("<!-- measured: nonsense -->\n<!-- /measured -->", results)


def test_table_2_has_a_line_for_each_row(results):
    choices = "Medians of 3 prompts; SI at the best of lookaheads 3 to 5, DSI as the planner chose."
    assert lines_of("table2-summary", results)[0] == choices
    assert lines_of("table2-summary", results)[4:] == [
        "| vicuna/cnn | 2000 | 1200 | 1000 | 1.19x | 1.25x | 2.01x |"
    ]
    assert f"{choices} A bare call took 0.70 to 1.50 ms beyond its sleep." in lines_of(
        "table2", results
    )
    line = next(it for it in lines_of("table2", results) if it.startswith("| vicuna"))
    assert line.split(" | ")[1:] == [
        *("2000", "1.020", "1200", "1.020", "1000", "1.020"),
        *("1.100", "1.19x", "1.25x", "1.47x |"),
    ]


def test_the_headline_tells_the_least_and_the_most_that_dsi_gains(results):
    rows = results["table2"]["rows"]
    other = {"name": "vicuna/alpaca", "speed_up_over_si": 1.08, "speed_up_over_non_si": 2.5}
    unequal = table2_row("DSI", 1.0, name="vicuna/mbpp")
    results["table2"]["rows"] = [*rows, {**rows[2], **other}, unequal]
    assert publish.BLOCKS["table2-headline"](results) == (
        "**2.01 to 2.50 times as fast as plain decoding, 1.08 to 1.19 times as fast as ordinary"
        " speculation**: DSI on 2 rows of Table 2 of the DSI paper."
    )


def test_circumstances_are_told(results):
    assert lines_of("table2", results)[0] == (
        "`paceline bench table2 --repeats 3`, 2026-01-02, 2 x x86_64, Linux, Python 3.11.7;"
        " load average 1.2 at the end."
    )
    results["table2"]["circumstances"]["load_average_at_start"] = 0.5
    assert lines_of("table2", results)[0].endswith(
        "; load average 0.5 at the start, 1.2 at the end."
    )
    assert lines_of("load", results)[0].startswith("`paceline bench load`, ")


def test_table_2_says_how_many_rows_reach_the_goal_and_what_is_below_its_floor(results):
    goal = "Of 1 rows, within the goal of 1.05 of the floor: non-SI in 1, SI in {}, DSI in 1."
    assert lines_of("table2", results)[-1] == goal.format(1)
    results["table2"]["rows"][0]["online_over_floor"] = 0.98
    results["table2"]["rows"][1]["online_over_floor"] = 1.06
    *_, reached, _, below = lines_of("table2", results)
    assert reached == goal.format(0)
    assert below.startswith(r"\* Below its floor")
    assert r"| 2000 | 0.980\* | 1200 | 1.060 |" in publish.BLOCKS["table2"](results)


def test_restarts_are_compared_with_a_bare_call(results):
    assert lines_of("table2-restarts", results)[2:] == [
        "| vicuna/cnn | 0.50 | 1.20 | 2.4 | - | - | 7 |"
    ]


def test_only_what_is_far_above_its_ideal_is_broken_down(results):
    assert lines_of("table2-breakdown", results) == ["Nothing takes more than 1.1 of its ideal."]
    parts = {name: float(index) for index, name in enumerate(BREAKDOWN_HEADINGS)}
    results["table2"]["rows"][2] |= {"online_over_ideal": 1.11, "breakdown_ms": parts}
    headings, _, line = lines_of("table2-breakdown", results)
    assert headings.startswith("| row | strategy | traced run | ideal | bare calls | ")
    assert line == f"| vicuna/cnn | DSI | {' | '.join(f'{part:.1f}' for part in parts.values())} |"


def test_the_references_own_times_stand_beside_ours(results):
    assert lines_of("table2-reference", results)[2:] == [
        "| vicuna/cnn | 1200 | 1000 | 3 | 2 | 5 | 4 |"
    ]


def test_a_grid_that_was_not_measured_leaves_no_trace(results):
    text = "<!-- measured: grid -->\n\nold\n\n<!-- /measured -->\n"
    assert publish.page(text, results) == "<!-- measured: grid -->\n<!-- /measured -->\n"


def test_a_grid_marks_where_dsi_is_slower_than_it_may_be(results):
    ratios = {(0.05, 0.0): 0.9, (0.05, 1.0): 1.021, (1.0, 0.0): 1.02, (1.0, 1.0): None}
    results["grid"] = {
        "circumstances": circumstances("paceline bench table2 --grid 2"),
        "rows": [
            {"drafter": drafter, "acceptance_rate": rate, "strategy": strategy}
            | ({} if ratio is None or strategy != "DSI" else {"over_better": ratio})
            for (drafter, rate), ratio in ratios.items()
            for strategy in ("non-SI", "SI", "DSI")
        ],
    }
    lines = lines_of("grid", results)
    assert "| 0% | 0.900 | 1.020 |" in lines
    assert "| 100% | **1.021** | output differs |" in lines
    assert lines[0].startswith("`paceline bench table2 --grid 2`")


def test_load_is_laid_out_by_streams_and_marks_what_was_short_of_cpu(results):
    lines = lines_of("load", results)
    assert "Targets: 4, 40 ms; drafters: 1, 4 ms; acceptance 80%; 24 tokens a request." in lines[0]
    assert "| 4 | 1 | 98 | 190* | 201 | 2 DSI, 6 SI |" in lines
    assert lines[-1] == (
        "AUTO over non-SI, of loads that were not short of CPU: from 2.04x (4 streams, 1"
        " orchestrator) to 2.04x (4 streams, 1 orchestrator)."
    )


def test_a_strategy_that_was_not_loaded_and_a_short_machine_leave_gaps(results):
    auto = results["load"]["rows"][-1]
    results["load"]["rows"].append({**auto, "orchestrator_count": 2, "limit": "machine"})
    results["load"]["rows"].append({**auto, "strategy": "non-SI", "orchestrator_count": 2})
    assert "| 4 | 2 | 201 | - | 201* | 2 DSI, 6 SI |" in lines_of("load", results)
    auto["limit"] = "machine"
    assert "AUTO over" not in publish.BLOCKS["load"](results)


def test_what_a_stream_gets_is_told_of_auto_beside_plain_decoding(results):
    lines = lines_of("load-streams", results)
    assert lines[2:4] == [
        "| 4 | non-SI | 60 / - | 40 / 80 | 0.99 | 1.13 | 40.0 / 41.3 |",
        "| 4 | AUTO | 60 / - | 40 / 80 | 0.99 | 1.13 | 40.0 / 41.3 |",
    ]
    assert lines[-1].startswith(
        "Memory of one more stream: non-SI on 1 orchestrator below what can be measured;"
        " AUTO on 2 orchestrators 0.12 MiB. "
    )


def test_what_orchestrators_serve_is_left_out_until_it_is_measured(results):
    assert publish.BLOCKS["load-scaling"](results) == ""
    one = {**results["load"]["rows"][0], "orchestrator_load": 1.02, "machine_load": 0.5}
    two = {**one, "orchestrator_count": 2, "tokens_per_second": 187.0, "limit": "machine"}
    results["load"]["scaling"] = {
        "target_ms": 2.0,
        "drafter_ms": 0.2,
        "orchestrator_share": 0.15,
        "rows": [one, two, {**two, "identical": False}],
    }
    text, *_, of_one, of_two = lines_of("load-scaling", results)
    assert "may run in 15% of the time" in text
    assert of_one == "| 1 | 4 | non-SI | 98 | 1.00x | 1.13 | 102% | 50% |"
    assert of_two == "| 2 | 4 | non-SI | 187* | 1.90x | 1.13 | 102% | 50% |"


def test_the_papers_claims_are_told_figure_by_figure(results):
    text, _, headings, _, *lines = lines_of("simulate", results)
    assert text == (
        "`paceline simulate --grid full` and `paceline simulate figure2`, 2026-01-02."
        " Table 1 is reproduced exactly."
    )
    assert headings == "| claim of the paper | Figure 2 | Figure 7 | Figure 2, as served |"
    assert lines[0].split(" | ")[1] == "in 5,050 of those 5,050 cells, no others"
    place = "by 0.6% at most (drafter 0.01, acceptance 0.40)"
    assert lines[2].strip("| ").split(" | ")[1:] == [
        f"but for 37 cells, {place}",
        "holds",
        f"but for 1 cell, {place}",
    ]
    gains = lines[3].split(" | ")[1:3]
    assert gains == ["1.49x (drafter 0.15, acceptance 0.89), 1.18x on average", "-"]


def test_a_plan_says_what_one_more_target_is_worth(results):
    text, *_, last = lines_of("plan", results)
    assert text == "`paceline plan --gpus 3`"
    assert last == "| DSI, 2 targets | 3 | 400 ± 1 | 2.50x | +20.0% |"


def test_a_speed_of_the_pair_is_that_of_the_median_repeat():
    rows = publish.read_results()["pair"]["rows"]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(1e3 / median(row["repeats_ms_per_token"]))


def test_a_ratio_of_the_pair_is_the_median_of_its_repeats(results):
    bare, plain = results["pair"]["rows"][:2]
    bare["repeats_ms_per_token"], plain["repeats_ms_per_token"] = [3, 3, 9], [2, 4, 6]
    assert "| generate | 90 | 167 to 500 | - | 2.50 | 1.50x | - |" in lines_of(
        "pair-contest", results
    )


def test_dsi_on_shared_hardware_is_told_where_it_was_measured(results):
    assert len(lines_of("pair-sharing", results)) == 3
    results["pair"]["sharing_strategies"] = [
        pair_row("the services", "plain", "non-SI", 100.0),
        pair_row("the services", "distributed", "DSI on 1 target", 80.0),
    ]
    last = lines_of("pair-sharing", results)[-1]
    assert last == "| DSI on 1 target | 80 | 64 to 100 | 2.50 | 0.80x |"


def test_the_pair_is_summed_up_by_who_decodes(results):
    assert lines_of("pair-summary", results) == [
        "|  | bare loop | plain | lookahead 4 | other |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| transformers | 100 | 90 | 150 | prompt lookup: 160 |",
        "| the services | - | 110 | 180 | DSI: 120 |",
    ]


def test_a_pair_in_a_sentence_is_each_sides_fastest_way(results):
    slower = pair_row("the services", "speculative", "SI, lookahead 2", 120.0, lookahead=2)
    results["pair-wide"] = {**results["pair"], "rows": [*results["pair"]["rows"], slower]}
    (line,) = lines_of("pair-wide-headline", results)
    assert line.startswith("SI is **1.64 times as fast as plain decoding**, 2.00 times as fast as")
    assert ", and 1.20 times as fast as its speculation" in line
    assert line.endswith("cores: 1.09 times as fast as plain decoding.")


def test_every_way_is_compared_with_the_bare_loop_and_with_its_peer(results):
    lines = lines_of("pair-contest", results)
    assert "| bare loop | 100 | 80 to 125 | - | 2.50 | 1.00x | - |" in lines
    assert "| non-SI | 110 | 88 to 138 | 20 | 2.50 | 1.10x | 1.10x |" in lines
    assert "| SI, lookahead 4 | 180 | 144 to 225 | 20 | 2.50 | 1.80x | 1.20x |" in lines
    assert "| DSI | 120 | 96 to 150 | 20 | 2.50 | 1.20x | - |" in lines


def test_what_forwards_take_and_how_far_drafts_are_right_is_told(results):
    assert lines_of("pair-forwards", results)[0].endswith("| 1 row | 9 rows |")
    assert lines_of("pair-forwards", results)[3] == (
        "| drafter | 2.00 (1.00 to 6.00) | 0.50 (0.25 to 1.50) | 0.50 | 2.00 |"
    )
    text, *_, shares = lines_of("pair-acceptance", results)
    assert "0.800 by the paper's estimator from 2 prompts of 8 tokens" in text
    assert "0.900 by 7 verdicts on blocks of up to 2" in text
    assert shares == "| all right, share of blocks | 0.90 | 0.81 |"


def test_without_equality_there_is_no_speed(results):
    dsi = results["table2"]["rows"][2]
    for name in [name for name in dsi if name.startswith(("speed_up", "ideal_speed_up"))]:
        del dsi[name]
    assert lines_of("table2-summary", results)[-1] == (
        "| vicuna/cnn | 2000 | 1200 | 1000 | - | - | - |"
    )
    results["load"]["rows"][1]["identical"] = False
    assert "| 98 | text differs | 201 |" in publish.BLOCKS["load"](results)
    results["pair"]["rows"][5]["identical"] = False
    line = next(it for it in lines_of("pair-contest", results) if it.startswith("| SI"))
    assert line == "| SI, lookahead 4 | text differs | 144 to 225 | 20 | 2.50 | - | - |"
