"""What `paceline bench load` understands, and what it refuses in one line."""

from __future__ import annotations

import shlex

import pytest

from paceline_cli.__main__ import main
from paceline_cli.bench_load import _EXAMPLES, LoadSettings
from paceline_serving.command_line import parse


def read(line):
    return parse(LoadSettings, shlex.split(line), program="it", environment={})


def test_streams_go_from_one_to_sixty_four_with_every_strategy():
    settings = read("")
    assert settings.streams == (1, 2, 4, 8, 16, 32, 64)
    assert settings.strategies == ("non-si", "si", "dsi", "auto")
    assert settings.orchestrators == (1, 2)
    assert settings.parts == ("scaling", "strategies")


def test_a_small_load_can_be_asked_for():
    settings = read("--streams 1,4-5,16 --tokens 32 --targets 2 --strategies auto --json a.json")
    assert settings.streams == (1, 4, 5, 16)
    assert (settings.tokens, settings.targets, settings.strategies) == (32, 2, ("auto",))
    assert settings.json_file.name == "a.json"


@pytest.mark.parametrize("line", [it for it in _EXAMPLES.splitlines() if it])
def test_its_examples_are_understood(line):
    command, *_ = line.split("    ")
    assert command.startswith("paceline bench load")
    assert isinstance(read(command.removeprefix("paceline bench load")), LoadSettings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--streams 0", "--streams: '0' is not within 1 to 512"),
        ("--streams 8-2", "--streams: '8-2' goes down; write it as 2-8"),
        ("--streams 1,x", "--streams: 'x' is no number and no range"),
        ("--strategies fast", "there is no strategy 'fast'; there are non-si, si, dsi, auto"),
        ("--parts pair", "there is no part 'pair'; there are scaling, strategies"),
        ("--parts ,", "--parts: name at least one of scaling, strategies"),
        ("--chart load.xyz", "must end in .svg or .png"),
        ("--stream 1", "did you mean --streams?"),
    ],
)
def test_what_it_cannot_do_it_says_before_anything_is_started(capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "load", *options.split()])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
