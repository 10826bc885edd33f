"""What `paceline bench soak` understands, and what it refuses in one line."""

from __future__ import annotations

import shlex

import pytest

from paceline_cli.__main__ import main
from paceline_cli.bench_soak import _EXAMPLES, SoakSettings
from paceline_serving.command_line import parse


def read(line):
    return parse(SoakSettings, shlex.split(line), program="it", environment={})


def test_fifty_thousand_requests_may_cost_a_hundred_bytes_each():
    settings = read("")
    assert (settings.requests, settings.limit_bytes) == (50_000, 100)


@pytest.mark.parametrize("line", [it for it in _EXAMPLES.splitlines() if it])
def test_its_examples_are_understood(line):
    assert line.startswith("paceline bench soak")
    assert isinstance(read(line.removeprefix("paceline bench soak")), SoakSettings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--requests 2", "--requests: Input should be greater than or equal to 10"),
        ("--leaving 2", "--leaving: Input should be less than or equal to 1"),
        ("--request 1", "did you mean --requests?"),
    ],
)
def test_what_it_cannot_do_it_says_before_anything_is_started(capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "soak", *options.split()])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
