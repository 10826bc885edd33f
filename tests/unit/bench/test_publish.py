"""The pages' measurements are those of the results files."""

from __future__ import annotations

import re
from statistics import median

import pytest

import publish
from support.bench_examples import RESULTS


@pytest.mark.parametrize("path", publish.PAGES, ids=lambda path: path.name)
def test_the_pages_are_fresh(path):
    text = path.read_text(encoding="utf-8")
    assert publish.page(text, publish.read_results()) == text, "run `make figures`"


def test_every_block_is_on_a_page_once():
    pages = "".join(path.read_text(encoding="utf-8") for path in publish.PAGES)
    assert sorted(re.findall(r"<!-- measured: (\S+) -->", pages)) == sorted(publish.BLOCKS)


def test_only_what_is_between_the_marks_is_written():
    text = "before\n<!-- measured: pair-sharing -->\nold\n<!-- /measured -->\nafter\n"
    written = publish.page(text, RESULTS)
    assert written.startswith("before\n<!-- measured: pair-sharing -->\n\n| targets that")
    assert written.endswith(" |\n\n<!-- /measured -->\nafter\n")
    assert publish.page(written, RESULTS) == written


def test_a_mark_that_nothing_is_known_of_is_an_error():
    with pytest.raises(KeyError, match="nonsense"):
        publish.page("<!-- measured: nonsense -->\n<!-- /measured -->", RESULTS)


@pytest.mark.parametrize(
    "name", ["grid", "simulate-trees", "table2-trees", "table2-trees-headline"]
)
def test_what_was_not_measured_leaves_no_trace(name):
    text = f"<!-- measured: {name} -->\n\nold\n\n<!-- /measured -->\n"
    assert publish.page(text, {}) == f"<!-- measured: {name} -->\n<!-- /measured -->\n"


def test_a_speed_of_the_pair_is_that_of_the_median_repeat():
    rows = publish.read_results()["pair"]["rows"]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(1e3 / median(row["repeats_ms_per_token"]))
