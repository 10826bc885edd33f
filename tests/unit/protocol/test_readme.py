"""The package's README is true: its code runs, and its table has what the methods promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import paceline_protocol
from paceline_protocol.invariants import Invariant
from paceline_protocol.methods import METHODS

README = (Path(paceline_protocol.__file__).parent / "README.md").read_text()
LOOP, SETUP = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PLAIN = tuple(range(3, 23))  # after the prompt 1 2, each token is the one before plus one


def draft(prefix, count):
    """Be wrong at every third position."""
    found = range(prefix[-1] + 1, prefix[-1] + 1 + count)
    return tuple(0 if token_id % 3 == 0 else token_id for token_id in found)


def judge(prefix, proposal):
    wanted = prefix[-1] + 1
    for accepted, token_id in enumerate(proposal.token_ids):
        if token_id != wanted + accepted:
            return tuple(range(accepted)), wanted + accepted
    return tuple(range(len(proposal))), wanted + len(proposal)


@pytest.mark.parametrize(("strategy", "row"), METHODS.items())
def test_its_loop_drives_every_method_to_the_targets_own_text(strategy, row):
    names = {}
    exec(LOOP, names)
    exec(SETUP.replace("Strategy.DISTRIBUTED", str(strategy)), names)
    assert tuple(names["decode"](names["method"], draft, judge)) == PLAIN
    counts = names["method"].statistics
    assert (counts.accepted > 5, counts.rejected > 1) == (row.drafts, row.drafts)


def test_its_table_has_the_invariants_and_who_does_not_promise_them():
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.*?) \| (.*?) ?\|$", README, re.MULTILINE)
    assert rows == [
        (
            each.name,
            each.value,
            ", ".join(row.label for row in METHODS.values() if each not in row.invariants),
        )
        for each in Invariant
    ]


def test_the_tests_that_it_names_exist():
    named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", README)
    assert len(named) == 2
    for path, name in named:
        source = (Path(paceline_protocol.__file__).parents[2] / path).read_text()
        assert f"def {name}(" in source
