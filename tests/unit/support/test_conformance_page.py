"""The page of clients and cases tells of the clients and cases that there are."""

from __future__ import annotations

from support.conformance.cases import all_cases
from support.conformance.drivers import LANGUAGES, ROOT
from support.conformance.report import Matrix

NAMES = [language.name for language in LANGUAGES]


def skeleton(markdown):
    """Keep headings, the heads of tables and the names of rows."""
    rows = [line.split("|") for line in markdown.splitlines()]
    return [row if row[1:2] in ([" case "], [" cases "]) else row[:2] for row in rows]


def test_the_page_has_every_case_of_every_client():
    matrix = Matrix(NAMES)
    for case in all_cases():
        for name in NAMES:
            matrix.add(group=case.group, name=case.name, language=name, outcome="passed")
    page = (ROOT / "clients" / "conformance.md").read_text()
    assert skeleton(page) == skeleton(matrix.markdown()), "stale: make conformance-page"
    assert "**FAIL**" not in page


def test_a_run_is_whole_if_all_was_played_and_nothing_failed():
    matrix = Matrix(["a", "b"])
    matrix.add(group="g", name="one", language="a", outcome="passed")
    assert not matrix.is_whole(1)
    matrix.add(group="g", name="one", language="b", outcome="skipped")
    assert not matrix.is_whole(1), "b was skipped altogether"
    for language in ("a", "b"):
        matrix.add(group="g", name="two", language=language, outcome="passed")
    assert matrix.is_whole(2)
    assert not matrix.is_whole(3)
    matrix.add(group="g", name="two", language="a", outcome="failed")
    assert not matrix.is_whole(2)
