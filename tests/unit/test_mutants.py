"""The lists of seeded bugs stay true: each can be seeded, and names tests that are there."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from mutants.run import ROOT, load

BUGS = load()


@pytest.mark.parametrize("file", sorted({bug.file for bug in BUGS}))
def test_every_bug_can_be_seeded_and_leaves_a_program(file):
    text = (ROOT / file).read_text()
    is_program = file.endswith(".py")
    before = ast.dump(ast.parse(text)) if is_program else text
    for bug in BUGS:
        if bug.file == file:
            seeded = bug.seeded_in(text)
            assert (ast.dump(ast.parse(seeded)) if is_program else seeded) != before, bug.harm


def test_every_bug_has_tests_that_are_there():
    for bug in BUGS:
        assert bug.tests, bug.harm
        for test in bug.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).exists(), test
            assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), test


def test_no_bug_is_listed_twice():
    seeded = Counter((bug.place, bug.find, bug.replace) for bug in BUGS)
    assert max(seeded.values()) == 1
    assert max(Counter(bug.harm for bug in BUGS).values()) == 1
