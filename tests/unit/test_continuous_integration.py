"""What `.ci/run` runs, and what it says of tests that fail at first."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / ".ci/run"
_FLAKY = "tests/e2e/test_text.py::test_one[a b-ä]"
_CACHED = json.dumps(
    dict.fromkeys((_FLAKY, "tests/unit/test_a.py::test_b"), True), indent=2, ensure_ascii=False
)
# Stands for make: its target `test` fails at first, as pytest tells in its cache, and `ahead` takes
# longer than what runs beside it.
_MAKE = f"""#!/usr/bin/env bash
echo "make $*" >>calls
case "$*" in
  *ahead) until grep -q "make buf" calls; do :; done; sleep 0.3; echo "made" >>calls;;
  test) mkdir -p .pytest_cache/v/cache
        echo '{_CACHED}' >.pytest_cache/v/cache/lastfailed
        exit 1;;
  "test PYTEST_ARGS="*) exit "$SECOND";;
esac
"""


@pytest.fixture
def ci_run(tmp_path):
    """Return a function that runs the script over the stub, and returns its end."""
    checkout, programs = tmp_path / "checkout", tmp_path / "bin"
    for folder in (checkout / ".ci", programs):
        folder.mkdir(parents=True)
    shutil.copy(_SCRIPT, checkout / ".ci/run")
    for name, content in (("make", _MAKE), ("id", "#!/bin/sh\necho 1000\n")):
        (programs / name).write_text(content)
        (programs / name).chmod(0o755)

    def run(*, second_ends_with):
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "SECOND": str(second_ends_with)}
        ended = subprocess.run(
            ["bash", checkout / ".ci/run"], env=environment, capture_output=True, text=True
        )
        return ended.returncode, ended.stdout, (checkout / "calls").read_text().splitlines()

    return run


def test_each_test_that_needed_a_second_run_is_named_in_the_last_lines(ci_run):
    status, said, calls = ci_run(second_ends_with=0)
    assert status == 0
    assert said.splitlines()[-3:] == [
        "== failed at first, and ran once more (2) ==",
        _FLAKY,
        "tests/unit/test_a.py::test_b",
    ]
    assert calls[-1] == "make test-clients", "the other rings ran, too"


def test_a_second_failure_ends_it_and_names_the_tests_as_well(ci_run):
    status, said, calls = ci_run(second_ends_with=2)
    assert status == 2
    assert said.splitlines()[-2:] == [_FLAKY, "tests/unit/test_a.py::test_b"]
    assert "make test-long" not in calls


def test_what_the_last_rings_need_is_made_beside_lint_and_before_any_test(ci_run):
    _, _, calls = ci_run(second_ends_with=0)
    before = calls[: calls.index("make test")]
    assert sorted(before) == ["made", "make --keep-going ahead", "make buf", "make lint"]
