import json

import pytest

from paceline_bench.charts import save_figure
from paceline_bench.pair.acceptance import Block
from paceline_bench.pair.chart import draw_pair
from paceline_bench.pair.contest import Contestant, Entry, Group, Method, Outcome
from paceline_bench.pair.engine import Latency
from paceline_bench.pair.random_models import RandomModel, Shape
from paceline_bench.pair.results import acceptance_row, all_identical, model_row, way_rows
from paceline_bench.pair.tables import report


@pytest.fixture(scope="module")
def description():
    return RandomModel(Shape(1, 64), dtype="float32", device="cpu", threads=1).description


def model(description, *, step_ms):
    latency = Latency(first_ms=(4 * step_ms, 6 * step_ms), later_ms=(step_ms,) * 6)
    return model_row(description, latency, {1: step_ms, 5: 2 * step_ms}, context=30)


def entry(group, method, name, *, ms, lookahead=None, targets=None, wrong=0, **fields):
    outcome = Outcome(
        token_ids=(1, 2, 3, 4),
        elapsed_ns=round(4 * ms * 1e6),
        **{"target_forwards": 2, **fields},
    )
    contestant = Contestant(group, method, name, None, lookahead, targets)
    return Entry(contestant, [[outcome, outcome]], wrong=wrong)


@pytest.fixture
def result(alone):
    return {
        **alone,
        "acceptance": acceptance_row([2, 4], [Block(2, 2), Block(2, 0)], tokens=8, lookahead=2),
        "rows": way_rows(ways()),
        "sharing": [
            {"texts": 1, "forward_ms": 8.0, "tokens_per_second": 100.0},
            {"texts": 2, "forward_ms": 12.0, "tokens_per_second": 130.0},
        ],
        "sharing_strategies": way_rows(shared_ways()),
    }


def ways():
    services_speculative = {"forward_ns": 12_000_000, "accepted": 3, "rejected": 1}
    return [
        entry(Group.LIBRARY, Method.BARE, "bare loop", ms=10),
        entry(Group.LIBRARY, Method.PLAIN, "generate", ms=12.5),
        entry(Group.LIBRARY, Method.SPECULATIVE, "assisted", ms=8, lookahead=2),
        entry(Group.ENGINE, Method.PLAIN, "non-SI", ms=8, forward_ns=30_000_000),
        entry(Group.SERVICES, Method.PLAIN, "non-SI", ms=16, forward_ns=40_000_000),
        entry(
            *(Group.SERVICES, Method.SPECULATIVE, "SI, lookahead 2"),
            **{"ms": 5, "lookahead": 2, **services_speculative},
        ),
        entry(Group.SERVICES, Method.DISTRIBUTED, "DSI", ms=4, wrong=1),
    ]


def shared_ways():
    return [
        entry(Group.SERVICES, Method.PLAIN, "non-SI", ms=16, targets=1),
        entry(Group.SERVICES, Method.DISTRIBUTED, "DSI on 1 target", ms=8, targets=1),
        entry(Group.SERVICES, Method.DISTRIBUTED, "DSI on 2 targets", ms=20, targets=2),
    ]


@pytest.fixture
def alone(description):
    models = {role: model(description, step_ms=ms) for role, ms in (("target", 8), ("drafter", 2))}
    return {"models": models, "rows": [], "sharing": [], "sharing_strategies": []}


def cells(text, start):
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_latencies_are_set_side_by_side(result):
    text = report(result)
    assert "2 texts of 4 tokens" in text
    assert cells(text, "first token (TTFT), ms")[1:] == [
        "40 (32 to 48)",
        "10 (8 to 12)",
        "0.250",
    ]
    assert cells(text, "each later one (TPOT), ms")[1:] == ["8 (8 to 8)", "2 (2 to 2)", "0.250"]
    assert cells(text, "TTFT ÷ TPOT")[1:] == ["5.00", "5.00", ""]
    assert cells(text, "rows")[1:] == ["1", "5"]
    assert cells(text, "target, ms")[1:] == ["8.00", "16.00"]
    assert cells(text, "÷ one row")[1:] == ["1.00", "2.00"]


def test_acceptance_is_told_by_both_estimators_and_by_position(result):
    text = report(result)
    common = cells(text, "common runs (the paper's estimator)")
    assert common[1:] == ["0.750", "2 prompts, 3.0 of 8 tokens in common"]
    assert cells(text, "verdicts")[1:] == ["0.667", "2 blocks of up to 2, 1.00 accepted"]
    assert cells(text, "all right, share of blocks")[1:] == ["0.500", "0.500"]


def test_speeds_are_compared_with_the_bare_loop_and_with_their_own_plain_decoding(result):
    text = report(result)
    assert cells(text, "generate")[1:3] == ["80.0", "12.50"]
    assert cells(text, "generate")[-4:] == ["0.80x", "1.00x", "-", "identical"]
    assert cells(text, "SI, lookahead 2")[5:] == [
        *("2.00", "0.750", "2.00x", "3.20x", "1.60x", "identical")
    ]


def test_there_is_no_speed_up_without_equality(result):
    text = report(result)
    assert cells(text, "DSI")[1:4] == ["-", "-", "-"]
    assert cells(text, "DSI")[-4:] == ["-", "-", "-", "1 DIFFERENT"]
    assert not all_identical(result)
    rows = {(row["group"], row["name"]): row for row in result["rows"]}
    assert "speed_up" not in rows["the services", "DSI"]
    assert rows["the services", "SI, lookahead 2"]["speed_up"] == pytest.approx(2)
    result["rows"][1]["near_ties"] = 2
    result["rows"][2] |= {"identical": False, "different": 1}
    assert cells(report(result), "generate")[-1] == "identical but for 2 near-ties"
    assert cells(report(result), "SI, lookahead 2")[-2] == "-"


def test_a_tokens_time_is_split_into_forwards_and_the_rest(result):
    # Of 16 ms a token 10 are forwards; with SI 3 of 5, and a verification gives 2 tokens.
    found = [line for line in report(result).splitlines() if "| 12.50 | 7.50 | 0.50 |" in line]
    assert found[0].endswith("| 10.00 | 6.00 | 12.00 |")
    assert "| SI, lookahead 2 | 8.00 | - | - | 3.00 | 2.00 | 4.00 |" in report(result)


def test_each_way_is_compared_with_the_same_in_transformers(result):
    lines = [line for line in report(result).splitlines() if line.startswith("| non-SI | ")]
    assert [line.split(" | ")[-2] for line in lines[:2]] == ["1.25x", "0.62x"]


def test_sharing_is_told_against_being_alone(result):
    assert cells(report(result), "2") == ["2", "12.00", "1.50", "130.0"]


def test_what_dsi_makes_of_shared_hardware_is_told_against_plain_decoding(result):
    text = report(result)
    words = ["62.5", "16.00", "16.00 to 16.00", "2.00", "1.00x", "identical"]
    assert [line for line in text.splitlines() if f"| {' | '.join(words)} |" in line]
    assert cells(text, "DSI on 1 target")[-2:] == ["2.00x", "identical"]
    assert cells(text, "DSI on 2 targets")[-2:] == ["0.80x", "identical"]
    result["sharing_strategies"][2] |= {"identical": False, "different": 1}
    assert cells(report(result), "DSI on 2 targets")[1:4] == ["-", "-", "-"]
    result["rows"] = []
    assert not all_identical(result)


def test_everything_can_be_kept(result):
    more = json.loads(json.dumps(result))
    assert more["acceptance"]["rate_by_common_runs"] == 0.75
    assert more["acceptance"]["accepted_shares"] == [0.5, 0.5]
    assert more["models"]["target"]["rows_ms"] == {"1": 8.0, "5": 16.0}
    assert more["sharing"][1] == {"texts": 2, "forward_ms": 12.0, "tokens_per_second": 130.0}
    assert more["rows"][5]["tokens_per_second"] == 200
    assert [row["targets"] for row in more["sharing_strategies"]] == [1, 1, 2]
    assert [row["speed_up"] for row in more["sharing_strategies"]] == [1, 2, 0.8]


def test_parts_may_be_missing(alone):
    assert "acceptance" not in report(alone)
    assert all_identical(alone)


def test_the_picture_has_a_bar_for_every_way_and_marks_what_differs(result, tmp_path):
    figure = draw_pair(result)
    speeds, rows, shares = figure.axes
    assert [bar.get_width() for bar in speeds.patches] == pytest.approx(
        [100, 80, 125, 125, 62.5, 200]
    )
    assert [bar.get_y() + bar.get_height() / 2 for bar in speeds.patches] == [*range(6)]
    assert [text.get_position() for text in speeds.texts if "differs" in text.get_text()] == [
        (0, 6)
    ]
    assert rows.get_ylabel() == "ms for a forward, median"
    assert figure.get_suptitle() == "random 1x64 and random 1x64, float32 on cpu"
    assert [list(line.get_ydata()) for line in rows.lines] == [[8.0, 16.0], [2.0, 4.0]]
    assert [bar.get_height() for bar in shares.patches] == [0.5, 0.5]
    save_figure(figure, tmp_path / "pair.svg")
    assert (tmp_path / "pair.svg").stat().st_size > 1000


def test_latencies_alone_make_a_picture_too(alone):
    assert len(draw_pair(alone).axes) == 1


def test_what_each_gpu_would_make_is_told_if_asked_for(result):
    """Ways of DSI have their targets and the drafter, and those that take turns one."""
    text = report(result, per_gpu_targets=3)
    assert cells(text, "DSI on 1 target")[4:6] == ["2", "62.5"]  # 8 ms a token: 125 tokens/s
    assert cells(text, "DSI")[4] == "4"
    lines = [line for line in text.splitlines() if line.startswith("| non-SI | ")]
    assert all(line.split(" | ")[4] == "1" for line in lines if "identical" in line)
    assert "GPU" not in report(result)
