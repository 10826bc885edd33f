import io

import pytest

from paceline import Chunk, Completion, TokenOrigin
from paceline.responses import read_finished, read_started
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_cli.streamed_text import TextStream, statistics_line

DRAFT, TARGET = TokenOrigin.ACCEPTED_DRAFT, TokenOrigin.TARGET


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def terminal_of_a_person(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def chunk(text, *origins):
    ids = tuple(range(len(origins)))
    return Chunk(position=0, token_ids=ids, text=text, logprobs=(), origins=origins)


def written(file, *chunks, show_origins):
    with TextStream(file, show_origins=show_origins) as stream:
        for each in chunks:
            stream.write(each)
    return file.getvalue()


def test_a_pipe_gets_the_text_unchanged():
    chunks = chunk("a\x1b[2J", DRAFT), chunk("b", TARGET)
    assert written(io.StringIO(), *chunks, show_origins=False) == "a\x1b[2Jb"


def test_a_terminal_gets_no_control_characters_and_ends_its_line():
    text = written(Terminal(), chunk("a\x1b[2J\tb\r\nc", DRAFT), show_origins=False)
    assert text == "a\N{REPLACEMENT CHARACTER}[2J\tb\N{REPLACEMENT CHARACTER}\nc\n"


def test_origins_are_told_apart_by_colour():
    text = written(Terminal(), chunk("ab", DRAFT), chunk("cd", TARGET), show_origins=True)
    assert "\x1b[32mab\x1b[0m" in text
    assert "\x1b[1;4;35mcd\x1b[0m" in text


def test_without_colour_an_underline_is_left(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = written(Terminal(), chunk("ab", DRAFT), chunk("cd", TARGET), show_origins=True)
    assert "32" not in text
    assert "\x1b[1;4mcd\x1b[0m" in text


def test_a_pipe_marks_the_targets_own_tokens():
    chunks = chunk("ab", DRAFT), chunk("[cd]", TARGET), chunk("ef", DRAFT, TARGET)
    assert written(io.StringIO(), *chunks, show_origins=True) == "ab[[cd]]ef"


def test_the_last_line_has_the_forwards_of_a_stack_by_model_and_none_of_a_single_drafter():
    models = [
        pb.ModelForwards(model_name=name, forward_count=count, forward_ns=count)
        for name, count in [("base", 12), ("small\x1b[2J", 40)]
    ]

    def line(drafter_models):
        statistics = pb.GenerationStatistics(drafter_models=drafter_models)
        finished = read_finished(pb.GenerationFinished(statistics=statistics))
        started = read_started(pb.GenerationStarted())
        return statistics_line(Completion(started=started, chunks=(), finished=finished))

    assert " · base x12, small\N{REPLACEMENT CHARACTER}[2J x40 · " in line(models)
    assert "base" not in line(models[:1])
