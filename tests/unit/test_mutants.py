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
    for bug in BUGS:
        if bug.file == file:
            seeded = bug.seeded_in(text)
            if file.endswith(".py"):
                assert ast.dump(ast.parse(seeded)) != ast.dump(ast.parse(text)), bug.harm
            assert seeded != text, bug.harm


def test_every_bug_has_tests_that_are_there_or_a_reason_to_have_none():
    for bug in BUGS:
        assert bool(bug.tests) != bool(bug.harmless), bug.harm
        for test in bug.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).exists(), test
            assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), test


def test_no_bug_is_listed_twice():
    seeded = Counter((bug.file, bug.find, bug.replace) for bug in BUGS)
    assert max(seeded.values()) == 1
    assert max(Counter(bug.harm for bug in BUGS).values()) == 1
