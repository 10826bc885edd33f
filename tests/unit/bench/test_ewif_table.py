from __future__ import annotations

from paceline_bench.simulate.ewif_table import ewif_table


def test_every_factor_of_the_papers_table_comes_out():
    rows = ewif_table()
    assert [row.ours for row in rows] == [row.paper for row in rows]
    assert len(rows) == 6


def test_the_order_of_the_stages_matters():
    cascades = [row for row in ewif_table() if len(row.stages) > 1]
    assert [row.reversed_order for row in cascades] == ["2.60", "3.41"]
