"""The pages' measurements are those of the results files."""

from __future__ import annotations

import re

import pytest

import publish


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
    }


def pair_row(group, method, name, speed, *, lookahead=None, identical=True):
    return {
        "group": group,
        "method": method,
        "name": name,
        "lookahead": lookahead,
        "tokens_per_second": speed,
        "repeats_ms_per_token": [1e3 / speed, 1.25e3 / speed],
        "tokens_per_forward": 2.5,
        "ttft_ms": None if group == "transformers" else 20.4,
        "identical": identical,
    }


def model(ms):
    return {"ttft_ms": {"median": 4 * ms}, "tpot_ms": {"median": ms}, "rows_ms": {"1": ms, "9": 2}}


@pytest.fixture
def results():
    return {
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
                ),
                table2_row("DSI (best lookahead)", 990.0),
            ],
        },
        "load": {
            "circumstances": circumstances("paceline bench load"),
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
    assert lines_of("table2-summary", results)[2:] == [
        "| vicuna/cnn | 2000 | 1200 | 1000 | 1.19x | 1.25x | 2.01x |"
    ]
    *_, line = lines_of("table2", results)
    assert line.split(" | ")[1:] == [
        *("2000", "1.020", "1200", "1.020", "1000", "1.020"),
        *("1.100", "1.19x", "1.25x", "1.47x |"),
    ]


def test_circumstances_are_told(results):
    assert lines_of("table2", results)[0] == (
        "`paceline bench table2 --repeats 3`, 2026-01-02, 2 x x86_64, Linux, Python 3.11.7;"
        " load average at the end 1.2"
    )
    assert lines_of("load", results)[0].startswith("`paceline bench load`, ")


def test_load_is_laid_out_by_streams_and_marks_what_was_short_of_cpu(results):
    assert lines_of("load", results)[-1] == "| 4 | 1 | 98 | 190* | 201 | 2 DSI, 6 SI |"


def test_the_pair_is_summed_up_by_who_decodes(results):
    assert lines_of("pair-summary", results) == [
        "|  | bare loop | plain | lookahead 4 | other |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| transformers | 100 | 90 | 150 | prompt lookup: 160 |",
        "| the services | - | 110 | 180 | DSI: 120 |",
    ]


def test_every_way_is_compared_with_the_bare_loop_and_with_its_peer(results):
    lines = lines_of("pair-contest", results)
    assert "| bare loop | 100 | 80 to 100 | - | 2.50 | 1.00x | - |" in lines
    assert "| non-SI | 110 | 88 to 110 | 20 | 2.50 | 1.10x | 1.10x |" in lines
    assert "| SI, lookahead 4 | 180 | 144 to 180 | 20 | 2.50 | 1.80x | 1.20x |" in lines
    assert "| DSI | 120 | 96 to 120 | 20 | 2.50 | 1.20x | - |" in lines


def test_what_forwards_take_and_how_far_drafts_are_right_is_told(results):
    assert lines_of("pair-forwards", results)[0].endswith("| 1 row | 9 rows |")
    assert lines_of("pair-forwards", results)[3] == "| drafter | 2.0 | 0.50 | 0.50 | 2.00 |"
    text, *_, shares = lines_of("pair-acceptance", results)
    assert "0.800 by the paper's estimator from 2 prompts of 8 tokens" in text
    assert "0.900 by 7 verdicts on blocks of up to 2" in text
    assert shares == "| all right, share of blocks | 0.90 | 0.81 |"


def test_without_equality_there_is_no_speed(results):
    dsi = results["table2"]["rows"][2]
    for name in [name for name in dsi if name.startswith(("speed_up", "ideal_speed_up"))]:
        del dsi[name]
    assert lines_of("table2-summary", results)[2] == (
        "| vicuna/cnn | 2000 | 1200 | 1000 | - | - | - |"
    )
    results["load"]["rows"][1]["identical"] = False
    assert "| 98 | text differs | 201 |" in lines_of("load", results)[-1]
    results["pair"]["rows"][5]["identical"] = False
    line = next(it for it in lines_of("pair-contest", results) if it.startswith("| SI"))
    assert line == "| SI, lookahead 4 | text differs | 144 to 180 | 20 | 2.50 | - | - |"
