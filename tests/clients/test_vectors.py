"""The vectors are whole, and what compares answers with them can say no."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from paceline.v1 import error_reason_pb2
from support.conformance.cases import all_cases
from support.conformance.drivers import ROOT
from support.conformance.matching import differences

REASONS = error_reason_pb2.ErrorReason.DESCRIPTOR.values_by_name


def test_every_reason_has_a_case():
    reasons = {name.removeprefix("ERROR_REASON_") for name in REASONS}
    named = {case.name for case in all_cases() if case.group == "errors"}
    assert reasons - {"UNSPECIFIED"} <= named


def test_a_strangers_client_is_tested_by_its_drivers_command():
    command = f"{sys.executable} tests/clients/drivers/python_driver.py"
    case = ("tests/clients/test_conformance.py", "-k", "described and field")
    ran = subprocess.run(
        (
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--driver",
            command,
            *case,
        ),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stdout
    (header,) = [line for line in ran.stdout.splitlines() if line.startswith("cases")]
    assert header.split() == ["cases", "driver"]


def test_names_are_unique_within_a_group():
    names = Counter((case.group, case.name) for case in all_cases())
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("expected", "fits", "does_not"),
    [
        (1, 1, 2),
        (1, "1", "2"),
        (1.5, 1.5, 1.6),
        ("a", "a", "b"),
        (None, None, ""),
        (False, False, 0),
        ({"a": 1}, {"a": 1, "b": 2}, {"b": 2}),
        ({"a": {"b": 1}}, {"a": {"b": 1}}, {"a": None}),
        ([1, 2], [1, 2], [1, 2, 3]),
        ([1, 2], [1, 2], [2, 1]),
        ({"$any": True}, "x", None),
        ({"$in": [1, None]}, None, 2),
        ({"$not": "x"}, "y", "x"),
        ({"$min": 1, "$max": 2}, 2, 3),
        ({"$min": 1}, 1, None),
        ({"$matches": "^a"}, "ab", "ba"),
        ({"$length": 2}, [1, 2], [1]),
        ({"$length": {"$min": 2}}, "ab", "a"),
        ({"$each": {"$max": 0}}, [-1, 0], [-1, 1]),
        ({"$some": {"a": 1}}, [{"a": 2}, {"a": 1}], [{"a": 2}]),
        ({"$begins": [1, 2, 3]}, [1, 2], [2, 3]),
        ({"$begins": "abc"}, "ab", ""),
        ({"$exactly": {"a": 1}}, {"a": 1}, {"a": 1, "b": 2}),
    ],
)
def test_a_matcher_lets_through_what_fits_and_nothing_else(expected, fits, does_not):
    assert differences(expected, fits) == []
    assert differences(expected, does_not)
