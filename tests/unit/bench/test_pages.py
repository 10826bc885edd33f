"""Every table, finding and picture of the benchmarks, as they were reviewed.

examples/ has small results with rare cases: a text that differs, a part that was not measured, a
goal that was missed. golden/ has what is printed, published and drawn of these results.
`pytest tests/unit/bench --rewrite-pages` writes down the pages of today; the diff is reviewed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import publish
from paceline_bench.cascade import tables as cascade
from paceline_bench.cascade.chart import draw_cascade
from paceline_bench.gateway import transports
from paceline_bench.load import peer_tables
from paceline_bench.load import tables as load
from paceline_bench.load.chart import draw
from paceline_bench.load.peer_chart import draw_peers
from paceline_bench.pair import tables as pair
from paceline_bench.pair.chart import draw_pair
from paceline_bench.plan import tables as plan
from paceline_bench.plan.picture import draw_forecast
from paceline_bench.self_drafting import tables as self_drafting
from paceline_bench.self_drafting.chart import draw_self_drafting, draw_sweep
from paceline_bench.simulate.claims import RATIOS, check_claims, per_gpu_claim, summarise
from paceline_bench.simulate.heatmaps import Cell, Timing
from paceline_bench.simulate.pictures import draw_heatmaps
from paceline_bench.simulate.tree_pictures import draw_gains
from paceline_bench.simulate.tree_tables import gains_table, grid_findings, self_finding
from paceline_bench.simulate.trees import Gain
from paceline_bench.table import markdown
from paceline_bench.table2 import tables as table2
from paceline_bench.table2.chart import draw_grid, draw_table2
from paceline_bench.table2.grid_tables import grid_report
from support.bench_examples import EXAMPLES, RESULTS
from support.pictures import described

GOLDEN = Path(__file__).parent / "golden"


def rows(name):
    return EXAMPLES[name]["rows"]


def spoilt(name):
    """Return rows of which the last one's output differs."""
    return [*rows(name)[:-1], rows(name)[-1] | {"identical": False}]


def cascade_page():
    yield cascade.report(EXAMPLES["cascade"], by_gpu=True)
    yield described(draw_cascade(EXAMPLES["cascade"]))


def gateway_page():
    yield markdown(rows("gateway"), transports.COLUMNS)


def grid_page():
    yield grid_report(rows("grid"))
    yield described(draw_grid(rows("grid")))


def load_page():
    content = EXAMPLES["load"]
    scaling = content["scaling"]["rows"]
    yield load.tables(rows("load"), servers=(4, 1))
    yield "\n".join(load.findings(rows("load"), content["memory"]))
    yield "\n".join(load.findings(spoilt("load"), content["memory"]))
    yield "\n".join(load.findings(rows("load")[:4], []))
    yield "\n".join([*load.scaling_findings(scaling), *load.scaling_findings(spoilt("load"))])
    for parts in ((rows("load"), scaling), ([], scaling), (rows("load"), [])):
        yield described(draw(*parts, title="4 targets", scaling_title="2 ms targets"))


def load_models_page():
    content = rows("load-models")
    yield peer_tables.peer_tables(content)
    yield "\n".join(peer_tables.peer_findings(content))
    yield "\n".join(peer_tables.peer_findings(spoilt("load-models")))
    yield described(draw_peers(content, title="1 target"))


def pair_page():
    content = EXAMPLES["pair"]
    alone = {"models": content["models"], "rows": [], "sharing": [], "sharing_strategies": []}
    yield pair.report(content, per_gpu_targets=3)
    yield pair.report(alone)
    yield described(draw_pair(content))
    yield described(draw_pair(alone))


def plan_page():
    yield markdown(rows("plan"), plan.columns())
    yield markdown(rows("plan"), plan.columns(token_count=60))
    yield described(draw_forecast(rows("plan"), title="a plan"))


def published_page():
    for name, block in publish.BLOCKS.items():
        yield f"### {name}\n\n{block(RESULTS)}"


def self_drafting_page():
    yield self_drafting.report(EXAMPLES["self"], by_gpu=True)
    yield self_drafting.sweep_report(EXAMPLES["sweep"])
    yield described(draw_self_drafting(EXAMPLES["self"]))
    yield described(draw_sweep(EXAMPLES["sweep"]))


def table2_page():
    content = EXAMPLES["table2"]
    without = [
        {key: value for key, value in row.items() if "speed_up_over" not in key or "paper" in key}
        for row in rows("table2")
    ]
    yield table2.report(content, max_tokens=50, by_gpu=True)
    yield table2.report({**content, "rows": without, "trees": [], "extended": []}, max_tokens=50)
    yield described(draw_table2(rows("table2"), max_tokens=50))


def cell(*, drafter, acceptance, si, dsi, gain_error=0.0):
    si, dsi = Timing(2, si, 0.5, si), Timing(4, dsi, 0.5, dsi)
    gain = min(si.mean, 100.0) - dsi.mean
    return Cell(drafter, acceptance, 100.0, si, dsi, gain, gain_error)


def heat_maps_page():
    holds = [
        cell(drafter=20, acceptance=10, si=110, dsi=95),
        cell(drafter=20, acceptance=80, si=60, dsi=40),
    ]
    fails = [cell(drafter=1, acceptance=40, si=50, dsi=51, gain_error=0.1), holds[1]]
    drawn = [
        cell(drafter=drafter, acceptance=acceptance, si=si, dsi=50)
        for drafter, acceptance, si in [(10, 20, 80), (10, 60, 70), (90, 20, 160), (90, 60, 140)]
    ]
    for cells in (holds, fails):
        yield "\n".join([*check_claims(summarise(cells)), per_gpu_claim(cells, target_count=7)])
    yield described(draw_heatmaps(drawn, panels=tuple(RATIOS), title="the title"))


def trees_page():
    gains = [Gain(**row) for row in rows("simulate-trees")]
    drawn = [gain for gain in gains if gain.width > 1 and gain.strategy == "DSI"]
    yield gains_table(gains, per_gpu=True)
    yield "\n".join([*grid_findings(gains), self_finding(gains)])
    yield described(draw_gains(drawn, title="trees"))


PAGES = {
    "cascade": cascade_page,
    "gateway": gateway_page,
    "grid": grid_page,
    "heat-maps": heat_maps_page,
    "load": load_page,
    "load-models": load_models_page,
    "pair": pair_page,
    "plan": plan_page,
    "published": published_page,
    "self-drafting": self_drafting_page,
    "table2": table2_page,
    "trees": trees_page,
}


@pytest.mark.parametrize("name", PAGES)
def test_what_is_told_of_a_benchmark_is_as_it_was_reviewed(name, request):
    path = GOLDEN / f"{name}.txt"
    told = "\n".join(part.rstrip("\n") + "\n" for part in PAGES[name]())
    if request.config.getoption("--rewrite-pages"):
        path.write_text(told, encoding="utf-8")
    assert told == path.read_text(encoding="utf-8"), (
        "if it shall be so: pytest tests/unit/bench --rewrite-pages, and read the diff"
    )


def test_golden_pages_are_those_that_are_compared():
    assert {path.stem for path in GOLDEN.iterdir()} == {*PAGES}


def test_what_was_not_measured_of_a_pair_has_no_column():
    content = EXAMPLES["pair"]
    services = [row for row in content["rows"] if row["group"] == "the services"]
    told = pair.report({**content, "rows": services})
    for heading in ("bare loop", "transformers", "our engine"):
        assert heading in pair.report(content)
        assert heading not in told
    assert "the services: forwards" in told
